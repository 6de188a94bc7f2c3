"""What people watch a run with: real event files, real offline runs."""

import json
import subprocess
import sys

import pytest

from attention_ablation.errors import UserError
from attention_ablation.training import watch
from attention_ablation.training.watch import Watcher


def rows(first: int, last: int, loss: float = 1.0) -> list[dict]:
    return [{"step": step, "loss": loss / step, "learning_rate": 0.1} for step in range(first, last + 1)]


def test_tensorboard_shows_every_step_of_a_resumed_run_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Watcher(tmp_path, "a.b-0", {}, tensorboard=True, wandb="none")
    first.add(rows(1, 7, loss=3.0))  # was killed; the last autosave is of step 4
    second = Watcher(tmp_path, "a.b-0", {}, tensorboard=True, wandb="none")
    second.add(rows(5, 10, loss=5.0))
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    expected = [(step, 3.0 / step) for step in range(1, 5)] + [(step, 5.0 / step) for step in range(5, 11)]
    assert found == [(step, pytest.approx(value)) for step, value in expected]
    assert len(events.Scalars("learning_rate")) == 10


def test_wandb_offline_keeps_the_run_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    watcher = Watcher(tmp_path, "MLA.scaled.seed0-1", {"variant": "MLA"}, tensorboard=False, wandb="offline")
    watcher.add(rows(1, 3))
    watcher.add(rows(4, 5))
    watcher.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-MLA.scaled.seed0-1")
    (record,) = folder.glob("*.wandb")
    content = record.read_bytes()
    assert content.count(b"learning_rate") >= 5
    assert b"variant" in content


class Broken:
    def __init__(self, *_):
        self.calls = 0

    def add(self, rows):
        self.calls += 1
        raise OSError("no space left")

    def close(self):
        raise AssertionError("it was switched off")


def test_a_library_that_fails_is_said_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watch, "TensorBoard", Broken)
    watcher = Watcher(tmp_path, "a", {}, tensorboard=True, wandb="none")
    for step in range(1, 4):
        watcher.add(rows(step, step))
    watcher.close()
    assert caplog.text.count("tensorboard: OSError: no space left; switched off, the training goes on") == 1


def test_a_missing_package_is_told_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed; pip install 'attention-ablation\[watch\]'"):
        Watcher(tmp_path, "a", {}, tensorboard=False, wandb="online")


def test_nothing_is_imported_that_is_switched_off(tmp_path):
    script = f"""
import json, sys
from pathlib import Path
from attention_ablation.training.watch import Watcher
watcher = Watcher(Path({str(tmp_path)!r}), "a", {{}}, tensorboard=False, wandb="none")
watcher.add([{{"step": 1, "loss": 2.0}}])
watcher.close()
print(json.dumps(sorted({{"torch", "tensorboard", "wandb"}} & set(sys.modules))))
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == []
    assert list(tmp_path.iterdir()) == []
