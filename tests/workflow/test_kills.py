"""Real processes killed at real moments, and the same command again: nothing lost, nothing mixed."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import duckdb
import pytest
from workflow.snakemake_runs import command, planned, snakemake, write_study

pytestmark = pytest.mark.slow

TARGET = "figures/smoke.svg"
EXECUTION = {"autosave_steps": 2}


def study_in(directory: Path, **changes) -> Path:
    """Long enough to be killed in the middle: 200 steps."""
    directory.mkdir(parents=True, exist_ok=True)
    training = {"tokens": 102_400} | changes.pop("training", {})
    return write_study(directory / "study.yaml", training=training, execution=EXECUTION, **changes)


def start(directory: Path, study: Path) -> subprocess.Popen:
    # In a session of its own: the kill of a test reaches only what the test names.
    return subprocess.Popen(
        command(directory, TARGET, "--configfile", str(study)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for(condition, process: subprocess.Popen) -> None:
    """Until `condition()` holds; fails when the process ends before, or after two minutes."""
    pause = threading.Event()
    for _ in range(12_000):
        if condition():
            return
        assert process.poll() is None, "the workflow ended before it could be killed"
        pause.wait(0.01)
    raise AssertionError("the moment to kill at never came")


def autosaved_beyond(directory: Path, step: int) -> list[Path]:
    """State folders of runs in training whose newest whole autosave is beyond `step`."""
    found = []
    for manifest in (directory / "results" / ".state").glob("*/autosave/step-*/manifest.json"):
        if int(manifest.parent.name.partition("-")[2]) > step:
            found.append(manifest.parent.parent.parent)
    return found


def trainings(directory: Path) -> list[int]:
    """Process ids of the trainings at work in `directory`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            here = (process / "cwd").resolve() == directory.resolve()
        except OSError:
            continue
        if here and b"train" in arguments and any(argument.endswith(b"ablation") for argument in arguments):
            found.append(int(process.name))
    return found


def outputs(directory: Path) -> dict[str, bytes]:
    """Everything that has to be equal to the byte, by path."""
    patterns = ["results/runs/*/snapshots/*", "results/runs/*/evaluation-*.parquet", "results/smoke/*.parquet"]
    patterns += ["figures/smoke.svg", "figures/smoke.csv", "figures/smoke.png", "figures/smoke.md"]
    found = {}
    for pattern in patterns:
        paths = sorted(directory.glob(pattern))
        assert paths, pattern
        found |= {str(path.relative_to(directory)): path.read_bytes() for path in paths}
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    directory = tmp_path_factory.mktemp("unbroken")
    result = snakemake(directory, TARGET, "--configfile", str(study_in(directory)))
    assert result.returncode == 0, result.stdout
    return outputs(directory)


def test_the_study_twice_from_scratch_is_equal_to_the_byte(tmp_path, unbroken):
    result = snakemake(tmp_path, TARGET, "--configfile", str(study_in(tmp_path)))
    assert result.returncode == 0, result.stdout
    assert outputs(tmp_path) == unbroken


def test_a_killed_training_continues_and_ends_equal_to_the_byte(tmp_path, unbroken):
    study = study_in(tmp_path)
    first = start(tmp_path, study)
    wait_for(lambda: autosaved_beyond(tmp_path, 20), first)
    killed = trainings(tmp_path)
    for process in killed:
        os.kill(process, signal.SIGKILL)
    assert killed
    assert first.wait() != 0
    second = snakemake(tmp_path, TARGET, "--configfile", str(study))
    assert second.returncode == 0, second.stdout
    logs = [path.read_text() for path in (tmp_path / "results" / ".state").glob("*/train.log")]
    resumed = [int(log.partition("resuming at step ")[2].split()[0]) for log in logs if "resuming at step" in log]
    assert max(resumed) > 20
    assert outputs(tmp_path) == unbroken


def test_a_killed_snakemake_leaves_a_training_that_the_next_one_waits_for(tmp_path, unbroken):
    study = study_in(tmp_path)
    first = start(tmp_path, study)
    wait_for(lambda: autosaved_beyond(tmp_path, 4), first)
    orphans = trainings(tmp_path)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert orphans
    second = snakemake(tmp_path, TARGET, "--configfile", str(study))
    assert second.returncode == 0, second.stdout
    assert outputs(tmp_path) == unbroken


def test_a_corrupt_newest_autosave_gives_way_to_the_one_before_it(tmp_path, unbroken):
    study = study_in(tmp_path)
    first = start(tmp_path, study)
    wait_for(lambda: autosaved_beyond(tmp_path, 20), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    damaged = 0
    for folder in (tmp_path / "results" / ".state").glob("*/autosave"):
        steps = sorted(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
        if len(steps) < 2:
            continue
        for path in steps[-1].glob("*.pt"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 255
            path.write_bytes(content)
        damaged += 1
    assert damaged
    second = snakemake(tmp_path, TARGET, "--configfile", str(study))
    assert second.returncode == 0, second.stdout
    logs = "".join(path.read_text() for path in (tmp_path / "results" / ".state").glob("*/train.log"))
    assert "is not whole" in logs
    assert "resuming at step" in logs
    assert outputs(tmp_path) == unbroken


def test_a_learning_rate_changed_half_way_is_never_mixed(tmp_path):
    first = start(tmp_path, study_in(tmp_path))
    wait_for(lambda: autosaved_beyond(tmp_path, 20), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    changed = study_in(tmp_path, training={"learning_rate": 2e-3})
    result = snakemake(tmp_path, TARGET, "--configfile", str(changed))
    assert result.returncode == 0, result.stdout
    fresh = tmp_path / "fresh"
    result = snakemake(fresh, TARGET, "--configfile", str(study_in(fresh, training={"learning_rate": 2e-3})))
    assert result.returncode == 0, result.stdout
    assert outputs(tmp_path) == outputs(fresh)


def test_going_to_another_study_and_back_redraws_and_retrains_nothing(tmp_path):
    study = study_in(tmp_path, training={"tokens": 20_480})
    assert snakemake(tmp_path, TARGET, "--configfile", str(study)).returncode == 0
    a = outputs(tmp_path)
    study_in(tmp_path, training={"tokens": 20_480, "learning_rate": 2e-3})
    assert snakemake(tmp_path, TARGET, "--configfile", str(study)).returncode == 0
    assert (tmp_path / TARGET).read_bytes() != a[TARGET]
    study_in(tmp_path, training={"tokens": 20_480})
    assert planned(tmp_path, TARGET, "--configfile", str(study)) == {"loss_deltas": 1, "figure": 1}
    assert snakemake(tmp_path, TARGET, "--configfile", str(study)).returncode == 0
    after = outputs(tmp_path)
    assert {path: after[path] for path in a} == a


def test_a_second_snakemake_in_the_same_checkout_is_refused_and_told_who_is_there(tmp_path):
    study = study_in(tmp_path)
    first = start(tmp_path, study)
    wait_for(lambda: autosaved_beyond(tmp_path, 2), first)
    second = snakemake(tmp_path, TARGET, "--configfile", str(study))
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert second.returncode != 0
    assert f"another snakemake is at work here (process {first.pid} on" in second.stdout


def test_deltas_differ_from_zero_somewhere(unbroken, tmp_path):
    path = tmp_path / "deltas.parquet"
    path.write_bytes(unbroken["results/smoke/loss_deltas.parquet"])
    assert duckdb.sql(f"select max(abs(delta)) from '{path}'").fetchall()[0][0] > 1e-3
