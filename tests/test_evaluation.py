"""Scores: each token once, the same for any batch; nothing of another run, nothing broken."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training.test_train import identity_of, run, write_dataset

from attention_ablation.errors import UserError
from attention_ablation.evaluation import Scoring, batches_of_windows, evaluate, score_windows
from attention_ablation.model.snapshots import load_snapshot, save_snapshot
from attention_ablation.training import state

IDENTITY = identity_of() | {"variant": "MLRA-2", "arm": "scaled"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(folder, write_dataset(folder, tokens=400), IDENTITY)
    return folder


SCORING = Scoring(dataset="noise", tokens=20, precision="float32", code="0123")


def scored(folder, name="e", identity=IDENTITY, scoring=SCORING, **changes):
    options = {
        "snapshots": folder / "run" / "snapshots", "dataset": folder / "dataset.json", "batch": 2, "device": "cpu",
        "threads": 1, "attention": "auto", "output": folder / f"{name}.parquet",
        "sidecar": folder / f"{name}.json", "report": lambda *_: None,
    }  # fmt: skip
    evaluate("MLRA-2.scaled.seed0-0", identity, scoring, **options | changes)
    return pq.read_table(folder / f"{name}.parquet")


def test_every_window_of_every_checkpoint_is_scored_once(trained):
    table = scored(trained)
    assert table["step"].to_pylist() == [2, 2, 2, 10, 10, 10]
    assert table["tokens_seen"].to_pylist() == [32] * 3 + [160] * 3
    assert table["sequence"].to_pylist() == [0, 1, 2] * 2
    assert table["token_count"].to_pylist() == [8, 8, 3] * 2  # 20 tokens have 19 successors
    assert set(table["variant"].to_pylist()) == {"MLRA-2"}
    assert json.loads((trained / "e.json").read_text())["evaluation"]["tokens"] == 20


def test_the_loss_is_the_models_cross_entropy(trained):
    table = scored(trained)
    model = load_snapshot(trained / "run" / "snapshots" / "step-00000010.safetensors")
    tokens = torch.from_numpy(np.fromfile(trained / "part-00000.bin", "<u2")[512 : 512 + 20].astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None, 16:19])
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[17:20], reduction="sum")
    assert table["loss_sum"].to_pylist()[-1] == pytest.approx(float(expected), rel=1e-6)


def test_the_batch_changes_no_loss(trained):
    losses = [
        np.array(scored(trained, scoring=replace(SCORING, tokens=150), batch=batch)["loss_sum"])
        for batch in (1, 3, 8)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-6)


def test_scoring_twice_is_equal_to_the_byte(trained):
    scored(trained, "one")
    scored(trained, "two")
    assert (trained / "one.parquet").read_bytes() == (trained / "two.parquet").read_bytes()


@given(st.integers(2, 200), st.integers(1, 50), st.integers(1, 9))
def test_windows_cover_each_successor_once_in_order(tokens, context, batch):
    text = torch.arange(tokens)
    inputs, targets = zip(*batches_of_windows(text, context=context, batch=batch), strict=True)
    assert torch.cat([x.flatten() for x in inputs]).tolist() == list(range(tokens - 1))
    assert torch.cat([y.flatten() for y in targets]).tolist() == list(range(1, tokens))
    assert all(len(x) <= batch and x.shape[1] <= context for x in inputs)


def test_a_missing_snapshot_is_told(trained, tmp_path):
    state.publish(trained / "run" / "snapshots", tmp_path / "snapshots")
    shutil.copy(trained / "run" / "run.json", tmp_path)
    (tmp_path / "snapshots" / "step-00000002.safetensors").unlink()
    with pytest.raises(UserError, match=r"step-00000002\.safetensors: missing"):
        scored(trained, "missing", snapshots=tmp_path / "snapshots")
    assert not (trained / "missing.parquet").exists()


def test_a_damaged_part_file_is_told(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "damaged")
    content = bytearray((tmp_path / "damaged" / "part-00000.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged" / "part-00000.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"part-00000\.bin"):
        scored(tmp_path / "damaged", "other")


def test_a_run_of_another_token_stream_is_refused(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "other")
    sidecar = tmp_path / "other" / "run" / "run.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"stream": "abc"}))
    with pytest.raises(UserError, match="was trained on token stream abc"):
        scored(tmp_path / "other", "foreign")


def test_a_grid_that_is_not_the_runs_is_refused(trained):
    other = IDENTITY | {"training": IDENTITY["training"] | {"checkpoint_steps": [5, 10]}}
    with pytest.raises(UserError, match=r"has steps \[2, 10\], the run's grid is \[5, 10\]"):
        scored(trained, identity=other)


def test_a_loss_that_is_not_a_number_names_run_step_and_window(trained, tmp_path):
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    for path in (trained / "run" / "snapshots").glob("*.safetensors"):
        model = load_snapshot(path)
        weights = dict(model.named_parameters())
        if "10" in path.name:
            weights["norm.weight"] = weights["norm.weight"] * float("nan")
        metadata = {"model": IDENTITY["model"], "scaling": IDENTITY["scaling"]}
        save_snapshot(snapshots / path.name, weights, metadata)
    entries = [{"file": f"step-{step:08d}.safetensors", "step": step, "tokens_seen": 16 * step} for step in (2, 10)]
    state.write_manifest(snapshots, [entry | state.facts_of(snapshots / entry["file"]) for entry in entries])
    shutil.copy(trained / "run" / "run.json", tmp_path)
    with pytest.raises(UserError, match=r"run MLRA-2\.scaled\.seed0-0: loss is nan at step 10, window 0"):
        scored(trained, "nan", snapshots=snapshots)
    assert not (trained / "nan.parquet").exists()


def test_bfloat16_scores_come_from_bfloat16(trained):
    model = load_snapshot(trained / "run" / "snapshots" / "step-00000010.safetensors")
    windows = list(batches_of_windows(torch.arange(17) % 64, context=8, batch=2))
    exact, _ = score_windows(model, windows, precision="float32")
    rough, counts = score_windows(model, windows, precision="bfloat16")
    assert counts == [8, 8]
    assert exact != rough
    assert rough == pytest.approx(exact, rel=2e-2)
