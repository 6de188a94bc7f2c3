"""The profiles as Snakemake itself reads them."""

import os

import pytest
from snakemake.cli import parse_args
from workflow.snakemake_runs import ROOT, snakemake, write_study


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def read(*arguments: str):
    _, found = parse_args(list(arguments))
    return found


def test_the_default_profile_is_found_without_a_flag():
    found = read()
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.executor in (None, "local")
    assert found.rerun_incomplete
    assert found.nolock
    assert found.keep_going
    assert found.show_failed_logs


def test_one_gpu_is_handed_out():
    assert {name: value.value for name, value in read().resources.items()} == {"gpu": 1}


def test_a_flag_wins_over_the_profile():
    found = read("--cores", "1", "--resources", "gpu=4")
    assert found.cores == 1
    assert found.resources["gpu"].value == 4


def test_each_training_on_a_gpu_asks_for_the_one_there_is(tmp_path):
    """So, by Snakemake's accounting, two of them never run at once."""
    study = write_study(tmp_path / "study.yaml", execution={"device": "cuda"})
    result = snakemake(tmp_path, "--dry-run", "--configfile", str(study))
    assert result.returncode == 0, result.stdout
    jobs = [block for block in result.stdout.split("\n[") if "rule train:" in block]
    assert len(jobs) == 4
    assert all("gpu=1" in job for job in jobs)
