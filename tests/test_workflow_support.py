"""What the Snakefile is given: untracked values, fingerprints, one lock."""

import json
import multiprocessing
from pathlib import Path

import pytest

from attention_ablation import workflow
from attention_ablation.errors import UserError
from attention_ablation.study import load_study


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def study(request):
    return load_study([request.config.rootpath / "config.yaml"])


def changed(study, **execution):
    return study.model_copy(update={"execution": study.execution.model_copy(update=execution)})


def test_the_stored_study_is_the_study_and_keeps_its_name(study):
    path = workflow.store_study(study)
    assert load_study([path]) == study
    assert workflow.store_study(study) == path
    assert workflow.store_study(changed(study, threads=2)) != path


def test_a_stored_study_that_was_changed_is_written_again(study):
    path = workflow.store_study(study)
    Path(path).write_text("{}")
    assert load_study([workflow.store_study(study)]) == study


def test_half_a_dataset_description_is_told(study, tmp_path):
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset\.json: not whole; remove"):
        workflow.parts_of(study, str(tmp_path / "dataset.json"))


def test_a_fingerprint_names_each_file():
    lines = workflow.code("figure")
    assert lines == sorted(lines)
    assert any(line.startswith("src/attention_ablation/figures.py ") for line in lines)


def test_parts_are_those_that_the_stream_was_made_with(study, tmp_path):
    assert workflow.parts_of(study, "dataset.json") == study.data.parts == 2
    (tmp_path / "dataset.json").write_text(json.dumps({"parts": [{}, {}, {}]}))
    assert workflow.parts_of(study, "dataset.json") == 3


def test_a_training_on_the_cpu_asks_for_no_gpu(study):
    assert workflow.gpus_a_run(changed(study, device="cpu")) == 0
    assert workflow.gpus_a_run(changed(study, device="cuda")) == 1


def _hold(path, held, done):
    workflow.hold_lock(path)
    held.set()
    done.wait()


def test_a_second_holder_is_refused_with_the_firsts_name_until_it_ends(tmp_path):
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(tmp_path / "lock", held, done))
    first.start()
    assert held.wait(60)
    with pytest.raises(UserError, match=rf"another snakemake is at work here \(process {first.pid} on"):
        workflow.hold_lock(tmp_path / "lock")
    first.kill()
    first.join()
    workflow.hold_lock(tmp_path / "lock")
    assert str(multiprocessing.current_process().pid) in (tmp_path / "lock").read_text()
