"""One run, from identity to published snapshots, in this process."""

import hashlib
import json
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
from training.test_engine_parity import plan_of

from attention_ablation.data.token_files import TokenFileWriter
from attention_ablation.errors import UserError
from attention_ablation.files import sha256_of
from attention_ablation.model.snapshots import load_snapshot
from attention_ablation.training.plan import ExecutionPlan
from attention_ablation.training.train import choose_micro_batch, train
from parity.fixtures import load_fixture

MODEL = {
    "vocabulary_size": 64, "layers": 1, "width": 16, "heads": 2, "nope_dim": 8, "rope_dim": 4, "query_rank": 8,
    "kv_rank": 8, "groups": 2, "branches": 2, "mlp_width": 24,
}  # fmt: skip
EXECUTION = ExecutionPlan(
    device="cpu", threads=1, micro_batch="auto", attention="auto", loss="auto", autosave_minutes=60, autosave_steps=3
)


def identity_of(**training) -> dict:
    plan = {
        "seed": 0, "initialization_std": 0.1, "context": 8, "steps": 10, "batch_tokens": 16, "learning_rate": 1e-2,
        "final_learning_rate": 1e-3, "warmup_steps": 1, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1,
        "gradient_clip": 1.0, "precision": "float32", "checkpoint_steps": [2, 10], "validation_tokens": 20,
    }  # fmt: skip
    return {
        "model": MODEL,
        "scaling": {"query": True, "key_value": True, "output": True},
        "training": plan | training,
    }


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path, tokens=400)


def write_dataset(folder, *, tokens: int):
    ids = np.random.default_rng(0).integers(0, 64, tokens).astype(np.uint16)
    part = folder / "part-00000.bin"
    with TokenFileWriter.create(part) as writer:
        writer.write(ids)
    description = {
        "tokens": tokens,
        "stream_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "vocabulary_size": 64,
        "end_of_text": 0,
        "holdout_tokens": 50,
        "parts": [{"file": part.name, "tokens": tokens, "sha256": sha256_of(part)}],
    }
    path = folder / "dataset.json"
    path.write_text(json.dumps(description))
    return path


def run(folder, dataset, identity=None, report=lambda *_: None, execution=EXECUTION, **options) -> None:
    train(
        "a.b.seed0-0", identity or identity_of(), execution, dataset=dataset, allow_epochs=False,
        state_folder=folder / "state", output=folder / "run", report=report, **options,
    )  # fmt: skip


def weights(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "run" / "snapshots").iterdir())}


class KilledError(Exception):
    """Ends a training at a given step, as a kill would."""


def killed_at(step: int):
    def report(done, total, loss):
        if done == step:
            raise KilledError

    return report


def test_snapshots_of_the_grid_are_published_and_load(tmp_path, dataset):
    run(tmp_path, dataset)
    assert list(weights(tmp_path)) == ["manifest.json", "step-00000002.safetensors", "step-00000010.safetensors"]
    manifest = json.loads((tmp_path / "run" / "snapshots" / "manifest.json").read_text())
    assert [(entry["step"], entry["tokens_seen"]) for entry in manifest["files"]] == [(2, 32), (10, 160)]
    model = load_snapshot(tmp_path / "run" / "snapshots" / "step-00000010.safetensors")
    assert model.config.latents == 4
    assert not (tmp_path / "state" / "autosave" / "step-9").exists()


@pytest.mark.parametrize("step", [3, 6, 9, 10])
def test_a_training_that_was_cut_continues_bit_equal(tmp_path, dataset, step, caplog):
    run(tmp_path / "unbroken", dataset)
    with pytest.raises(KilledError):
        run(tmp_path / "cut", dataset, report=killed_at(step))
    with caplog.at_level(logging.INFO):
        run(tmp_path / "cut", dataset)
    # The kill came before the autosave of its own step was written.
    assert f"resuming at step {(step - 1) // 3 * 3} of 10" in caplog.text or step == 3
    assert weights(tmp_path / "cut") == weights(tmp_path / "unbroken")
    rows = [
        [json.loads(line) for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
        for name in ("cut", "unbroken")
    ]
    for row in (*rows[0], *rows[1]):
        del row["tokens_per_second"]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == list(range(1, 11))


def test_a_finished_training_is_published_again_without_training(tmp_path, dataset):
    run(tmp_path, dataset)
    before = weights(tmp_path)
    for path in (tmp_path / "run" / "snapshots").iterdir():
        path.unlink()
    run(tmp_path, dataset, report=killed_at(2))
    assert weights(tmp_path) == before


def test_damaged_finished_snapshots_are_trained_again_and_this_is_said(tmp_path, dataset, caplog):
    run(tmp_path, dataset)
    before = weights(tmp_path)
    path = tmp_path / "state" / "snapshots" / "step-00000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run(tmp_path, dataset)
    assert "snapshots are damaged" in caplog.text
    assert weights(tmp_path) == before


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a temporary file left by a kill": lambda folder: (folder / "snapshots" / ".step-2.vm.1.safetensors").write_text(
        "x"
    ),
    "a flipped bit in a snapshot": lambda folder: _flip(folder / "snapshots" / "step-00000002.safetensors"),
    "a truncated snapshot": lambda folder: os.truncate(folder / "snapshots" / "step-00000002.safetensors", 50),
    "a missing snapshot": lambda folder: (folder / "snapshots" / "step-00000002.safetensors").unlink(),
    "no metrics": lambda folder: (folder / "metrics.jsonl").unlink(),
    "half the metrics": lambda folder: os.truncate(folder / "metrics.jsonl", 100),
    "no record of the snapshots": lambda folder: (folder / "snapshots.json").unlink(),
    "half a sidecar": lambda folder: (folder / "run.json").write_text("{"),
    "half an identity": lambda folder: (folder / "identity.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=str)
def test_an_unfinished_state_that_was_damaged_ends_bit_equal(tmp_path, dataset, damage):
    run(tmp_path / "unbroken", dataset)
    with pytest.raises(KilledError):
        run(tmp_path / "cut", dataset, report=killed_at(9))
    DAMAGE[damage](tmp_path / "cut" / "state")
    run(tmp_path / "cut", dataset)
    assert weights(tmp_path / "cut") == weights(tmp_path / "unbroken")
    rows = (tmp_path / "cut" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 11))


def test_a_resumed_run_keeps_the_execution_that_it_began_with(tmp_path, dataset, caplog):
    run(tmp_path / "unbroken", dataset)
    with pytest.raises(KilledError):
        run(tmp_path / "cut", dataset, report=killed_at(9))
    other = replace(EXECUTION, micro_batch=1, attention="reference")
    run(tmp_path / "cut", dataset, execution=other)
    assert "execution.micro_batch: going on with 2, as the run began, not with 1" in caplog.text
    assert weights(tmp_path / "cut") == weights(tmp_path / "unbroken")
    assert json.loads((tmp_path / "cut" / "run" / "run.json").read_text())["execution"]["attention"] == "sdpa"


def test_the_state_of_another_learning_rate_is_not_continued(tmp_path, dataset):
    other = identity_of(learning_rate=5e-3)
    with pytest.raises(KilledError):
        run(tmp_path, dataset, report=killed_at(9))
    run(tmp_path, dataset, other)
    run(tmp_path / "fresh", dataset, other)
    assert weights(tmp_path) == weights(tmp_path / "fresh")


def test_more_tokens_than_there_are_is_told_with_both_numbers(tmp_path):
    dataset = write_dataset(tmp_path, tokens=100)
    with pytest.raises(UserError, match="160 asked for, but after 20 validation tokens the corpus has 72"):
        run(tmp_path, dataset)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_rate(tmp_path, dataset):
    with pytest.raises(UserError, match=r"training broke down: loss .* at step \d+ \(learning rate"):
        run(tmp_path, dataset, identity_of(learning_rate=1e30, gradient_clip=1e30))
    assert not (tmp_path / "run").exists()


def test_an_automatic_micro_batch_divides_the_batch_and_holds_4096_tokens():
    fixture = load_fixture("mla")
    for context, sequences, expected in ((256, 8, 8), (256, 24, 12), (1024, 10, 2), (8192, 3, 1), (64, 7, 7)):
        plan = plan_of(fixture, context=context, batch_tokens=context * sequences)
        assert choose_micro_batch("auto", plan) == expected
