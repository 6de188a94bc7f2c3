"""A run's private folder: nothing half-written or foreign is ever taken for whole."""

import logging
import multiprocessing
import os

import pytest

from attention_ablation.errors import UserError
from attention_ablation.training import state


def autosave(folder, step: int, content: bytes = b"weights"):
    path = folder / "autosave" / f"step-{step}"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    state.write_manifest(path, [state.facts_of(path / "model.pt")])
    return path


def newest(folder):
    return state.newest_whole_autosave(folder, lambda step: None)


def test_the_newest_autosave_is_taken(tmp_path):
    for step in (2, 10, 4):  # by number, not by letter
        autosave(tmp_path, step)
    assert newest(tmp_path)[0] == 10


def _flip_a_bit(path):
    content = bytearray((path / "model.pt").read_bytes())
    content[0] ^= 1
    (path / "model.pt").write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        _flip_a_bit,
        lambda path: (path / "model.pt").unlink(),
        lambda path: os.truncate(path / "model.pt", 3),
        lambda path: (path / state.MANIFEST).unlink(),
        lambda path: (path / state.MANIFEST).write_text("{"),
    ],
    ids=["flipped bit", "missing file", "truncated file", "no manifest", "half a manifest"],
)
def test_a_damaged_autosave_gives_way_to_the_one_before_it_and_this_is_said(tmp_path, caplog, damage):
    autosave(tmp_path, 2)
    damage(autosave(tmp_path, 4))
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path)[0] == 2
    assert "step-4 is not whole" in caplog.text


def test_two_autosaves_are_kept(tmp_path):
    for step in (2, 4, 6):
        path = state.begin_autosave(tmp_path, step)
        (path / "weights").write_text("1")
        state.finish_autosave(tmp_path, path)
    assert [path.name for path in state.autosaves(tmp_path)] == ["step-6", "step-4"]


@pytest.mark.parametrize(
    ("identity", "stream", "said"), [({"seed": 1}, "a", "run identity"), ({"seed": 0}, "b", "token stream")]
)
def test_the_state_of_another_run_or_corpus_is_discarded_and_this_is_said(tmp_path, caplog, identity, stream, said):
    state.keep_only_if_of(tmp_path, {"seed": 0}, "a")
    autosave(tmp_path, 2)
    state.keep_only_if_of(tmp_path, {"seed": 0}, "a")
    assert newest(tmp_path)
    with caplog.at_level(logging.WARNING):
        state.keep_only_if_of(tmp_path, identity, stream)
    assert newest(tmp_path) is None
    assert f"another {said}: discarded" in caplog.text


def test_a_finished_run_is_kept_when_the_data_under_its_name_change(tmp_path):
    state.keep_only_if_of(tmp_path, {"seed": 0}, "a")
    (tmp_path / "snapshots").mkdir()
    state.write_manifest(tmp_path / "snapshots", [])
    with pytest.raises(UserError, match="was trained on token stream a, but the data of the same name is now b"):
        state.keep_only_if_of(tmp_path, {"seed": 0}, "b")
    assert (tmp_path / "snapshots" / state.MANIFEST).exists()


def test_a_damaged_record_of_whose_state_it_is_discards_it_and_is_said(tmp_path, caplog):
    state.keep_only_if_of(tmp_path, {"seed": 0}, "a")
    autosave(tmp_path, 2)
    (tmp_path / "identity.json").write_text("{")
    state.keep_only_if_of(tmp_path, {"seed": 0}, "a")
    assert "is damaged: the state is discarded" in caplog.text
    assert newest(tmp_path) is None


def test_state_without_a_record_of_whose_it_is_is_discarded(tmp_path):
    autosave(tmp_path, 2)
    state.keep_only_if_of(tmp_path, {"seed": 0}, "a")
    assert newest(tmp_path) is None


def _hold(folder, held, done):
    with state.locked(folder):
        held.set()
        done.wait()


def test_a_second_process_waits_for_the_first_and_names_it(tmp_path, caplog):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(tmp_path, held, done))
    first.start()
    assert held.wait(60)

    class Release(logging.Handler):
        def emit(self, record):
            done.set()  # the wait was announced: let the first one go

    logging.getLogger(state.__name__).addHandler(handler := Release())
    try:
        with caplog.at_level(logging.WARNING), state.locked(tmp_path):
            assert done.is_set()
    finally:
        logging.getLogger(state.__name__).removeHandler(handler)
        done.set()
        first.join()
    assert f"waiting: process {first.pid} on" in caplog.text


def test_published_files_outlive_their_publication(tmp_path):
    source, target = tmp_path / "state" / "snapshots", tmp_path / "run" / "snapshots"
    source.mkdir(parents=True)
    (source / "a").write_text("1")
    (source / ".a.tmp").write_text("left by a kill")
    state.write_manifest(source, [state.facts_of(source / "a")])
    (target.parent / ".snapshots.host.1").mkdir(parents=True)
    target.mkdir(parents=True)
    (target / "stale").write_text("old")
    state.publish(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["a", state.MANIFEST]
    assert [path.name for path in target.parent.iterdir()] == ["snapshots"]
    assert (source / "a").samefile(target / "a")
    (target / "a").unlink()
    assert (source / "a").read_text() == "1"


def test_a_manifest_names_the_file_that_changed(tmp_path):
    (tmp_path / "a").write_text("1")
    state.write_manifest(tmp_path, [state.facts_of(tmp_path / "a") | {"step": 3}])
    assert state.read_manifest(tmp_path)[0]["step"] == 3
    (tmp_path / "a").write_text("2")
    with pytest.raises(UserError, match=r"a: its content is not what was recorded"):
        state.read_manifest(tmp_path)
