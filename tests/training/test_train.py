"""One run, from identity to published snapshots, in this process."""

import hashlib
import json
import logging
import os
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch

from attention_ablation.data.stream import TokenStream
from attention_ablation.data.token_files import TokenFileWriter
from attention_ablation.errors import UserError
from attention_ablation.files import sha256_of
from attention_ablation.model.snapshots import load_snapshot
from attention_ablation.training.execution import choose_micro_batch
from attention_ablation.training.plan import ExecutionPlan
from attention_ablation.training.train import Hooks, train
from attention_ablation.training.world import ALONE

MODEL = {
    "vocabulary_size": 64, "layers": 1, "width": 16, "heads": 2, "nope_dim": 8, "rope_dim": 4, "query_rank": 8,
    "kv_rank": 8, "groups": 2, "branches": 2, "mlp_width": 24,
}  # fmt: skip
EXECUTION = ExecutionPlan(
    device="cpu", processes=1, threads=1, micro_batch="auto", zero_stage=0, offload_optimizer=False,
    activation_checkpointing=False, compile=False, deterministic=False, attention="auto", loss="auto",
    collective_minutes=1, autosave_minutes=60, autosave_steps=3, validation_sequences=2,
)  # fmt: skip


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


def run(
    folder, dataset, identity=None, report=lambda *_: None, execution=EXECUTION, score=None, world=ALONE,
    environment=MappingProxyType({}),
) -> None:  # fmt: skip
    hooks = Hooks(report, lambda device, precision: 1e9, score)
    train(
        "a.b.seed0-0", identity or identity_of(), execution, hooks, world=world, dataset=dataset, allow_epochs=False,
        state_folder=folder / "state", output=folder / "run", environment=environment,
    )  # fmt: skip


def weights(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "run" / "snapshots").iterdir())}


class KilledError(Exception):
    """Ends a training at a given step, as a kill would."""


def killed_at(step: int):
    def report(rows, steps):
        if rows[-1]["step"] == step:
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
        for measured in ("tokens_per_second", "model_flop_utilisation", "memory_bytes"):
            del row[measured]
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


def test_a_resumed_run_keeps_what_was_left_to_auto(tmp_path, dataset, caplog):
    begun = replace(EXECUTION, attention="reference", micro_batch=1)
    run(tmp_path / "unbroken", dataset, execution=begun)
    with pytest.raises(KilledError):
        run(tmp_path / "cut", dataset, report=killed_at(9), execution=begun)
    run(tmp_path / "cut", dataset)
    assert weights(tmp_path / "cut") == weights(tmp_path / "unbroken")
    sidecar = json.loads((tmp_path / "cut" / "run" / "run.json").read_text())
    assert sidecar["execution"]["attention"] == "reference"
    assert sidecar["changes"] == []


def test_another_execution_on_the_way_is_done_said_and_recorded(tmp_path, dataset, caplog):
    with pytest.raises(KilledError):
        run(tmp_path, dataset, report=killed_at(9))
    run(tmp_path, dataset, execution=replace(EXECUTION, micro_batch=1, zero_stage=2))
    assert "execution.micro_batch: the run was begun with 2 and goes on with 1" in caplog.text
    sidecar = json.loads((tmp_path / "run" / "run.json").read_text())
    assert sidecar["changes"] == [
        {"step": 6, "key": "micro_batch", "from": 2, "to": 1},
        {"step": 6, "key": "zero_stage", "from": 0, "to": 2},
    ]
    assert json.loads((tmp_path / "run" / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 2


def test_a_run_begun_on_another_kind_of_device_is_not_continued(tmp_path, dataset):
    with pytest.raises(KilledError):
        run(tmp_path, dataset, report=killed_at(9))
    sidecar = json.loads((tmp_path / "state" / "run.json").read_text())
    sidecar["execution"]["device"] = "cuda"
    (tmp_path / "state" / "run.json").write_text(json.dumps(sidecar))
    with pytest.raises(UserError, match="the run began on cuda, this host offers cpu"):
        run(tmp_path, dataset)


def test_a_subset_of_the_validation_split_is_scored_at_each_checkpoint(tmp_path, dataset):
    run(tmp_path, dataset)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "validation_loss" in row] == [2, 10]
    model = load_snapshot(tmp_path / "run" / "snapshots" / "step-00000010.safetensors")
    tokens = torch.from_numpy(TokenStream.open(dataset).read(0, 17).astype(np.int64))
    logits = model(tokens[:16].view(2, 8))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:17]).item()
    assert rows[9]["validation_loss"] == pytest.approx(expected, abs=1e-6)


def test_looking_at_validation_changes_no_weight(tmp_path, dataset):
    run(tmp_path / "with", dataset)
    run(tmp_path / "without", dataset, execution=replace(EXECUTION, validation_sequences=0))
    assert weights(tmp_path / "with") == weights(tmp_path / "without")


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


def test_a_loss_that_is_not_finite_stops_the_run_for_good_with_step_and_batch(tmp_path, dataset):
    broken = identity_of(learning_rate=1e30, gradient_clip=1e30, warmup_steps=6)
    with pytest.raises(
        UserError, match=r"training broke down: loss .* at step \d+ .*windows \d+, \d+ of the tr"
    ) as first:
        run(tmp_path, dataset, broken)
    assert not (tmp_path / "run").exists()

    def never(rows, steps):
        raise AssertionError("a retry must not train")

    with pytest.raises(UserError) as again:
        run(tmp_path, dataset, broken, report=never)
    assert str(again.value) == str(first.value)
    run(tmp_path, dataset)  # another identity is another run


def test_an_automatic_micro_batch_divides_the_batch_and_holds_4096_tokens():
    for context, sequences, expected in ((256, 8, 8), (256, 24, 12), (1024, 10, 2), (8192, 3, 1), (64, 7, 7)):
        assert choose_micro_batch("auto", sequences, context) == expected
