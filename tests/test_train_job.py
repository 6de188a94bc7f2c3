"""Scores made inside a training are those of the separate step, in one process and in two."""

import json
import socket
from dataclasses import replace

import pytest
from test_evaluation import IDENTITY, SCORING, scored
from training.processes import run_in_processes
from training.test_train import EXECUTION, run, write_dataset

from attention_ablation.config import Execution
from attention_ablation.errors import UserError
from attention_ablation.train_job import _scorer
from attention_ablation.training.world import ALONE, World

RUN = "MLRA-2.scaled.seed0-0"


def train_and_score(world: World, folder, identity=IDENTITY, port=0) -> None:
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    score = _scorer(RUN, identity, Execution(device="cpu"), 2, SCORING, world, folder / "dataset.json")
    execution = replace(EXECUTION, processes=world.size)
    run(
        folder, folder / "dataset.json", identity, execution=execution, score=score, world=world,
        environment=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run all of whose snapshots were kept and scored afterwards."""
    folder = tmp_path_factory.mktemp("kept")
    run(folder, write_dataset(folder, tokens=400), IDENTITY)
    return folder


@pytest.fixture(scope="module")
def let_go(tmp_path_factory):
    folder = tmp_path_factory.mktemp("let_go")
    write_dataset(folder, tokens=400)
    train_and_score(ALONE, folder)
    return folder


def test_the_rows_are_those_of_the_separate_step_and_the_last_weights_stay(kept, let_go):
    assert sorted(path.name for path in (let_go / "run" / "snapshots").iterdir()) == [
        "manifest.json", "step-00000002.parquet", "step-00000010.safetensors",
    ]  # fmt: skip
    assert scored(let_go) == scored(kept)
    assert (let_go / "e.parquet").read_bytes() == (kept / "e.parquet").read_bytes()
    assert json.loads((let_go / "e.json").read_text())["scored_in_training"] == [2]
    assert json.loads((kept / "e.json").read_text())["scored_in_training"] == []


def test_two_processes_share_the_windows_and_make_the_rows_of_one(kept, tmp_path):
    write_dataset(tmp_path, tokens=400)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    run_in_processes(2, tmp_path, train_and_score, tmp_path, IDENTITY, port)
    found, expected = scored(tmp_path), scored(kept)
    assert found.drop_columns("loss_sum") == expected.drop_columns("loss_sum")
    # Two processes add gradients in another order, so the weights differ in the last bits.
    assert found["loss_sum"].to_pylist() == pytest.approx(expected["loss_sum"].to_pylist(), rel=1e-5)


def test_other_settings_than_those_of_the_kept_scores_are_refused(let_go):
    with pytest.raises(UserError, match=r"kept the scores of step 2 and not its weights, and they were made with"):
        scored(let_go, "other", scoring=replace(SCORING, tokens=12))
    assert not (let_go / "other.parquet").exists()


def test_a_training_that_was_cut_keeps_its_scores(kept, tmp_path):
    write_dataset(tmp_path, tokens=400)

    def cut(rows, steps):  # after the autosave of step 3, with the scores of step 2 behind it
        if rows[-1]["step"] > 3:
            raise InterruptedError

    score = _scorer(RUN, IDENTITY, Execution(device="cpu"), 2, SCORING, ALONE, tmp_path / "dataset.json")
    with pytest.raises(InterruptedError):
        run(tmp_path, tmp_path / "dataset.json", IDENTITY, score=score, report=cut)
    train_and_score(ALONE, tmp_path)
    assert scored(tmp_path) == scored(kept)
