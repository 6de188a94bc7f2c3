"""Snapshots come back bit by bit, have one sequence of bytes, and are refused when damaged or foreign."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from attention_ablation.errors import UserError
from attention_ablation.model.snapshots import load_snapshot, read_metadata, save_snapshot
from attention_ablation.model.transformer import LanguageModel
from model.sizes import UNSCALED, VARIANTS, random_model, random_tokens


def metadata_of(model: LanguageModel, **others: Any) -> dict[str, Any]:
    return {
        "model": dataclasses.asdict(model.config),
        "scaling": dataclasses.asdict(model.scaling),
        **others,
    }


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "step 3.safetensors"
    model = random_model(VARIANTS["MLRA-2"])
    save_snapshot(path, model.state_dict(), metadata_of(model, step=3))
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_or_arm_change_on_the_way_to_disk_and_back(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "new" / "step.safetensors"
    model = random_model(VARIANTS[variant], UNSCALED)
    others = {"step": 7, "tokens_seen": 10**12, "identity": {"b": 1, "a": [1.5, None, "é"]}}
    save_snapshot(path, model.state_dict(), metadata_of(model, **others))
    assert read_metadata(path) == metadata_of(model, **others)
    loaded = load_snapshot(path, attention="sdpa")
    assert (loaded.config, loaded.scaling, loaded.training) == (model.config, model.scaling, False)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    tokens = random_tokens(2, 9)
    assert torch.equal(loaded(tokens), model(tokens))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_embedding_is_stored_twice(snapshot: Path) -> None:
    with safe_open(snapshot, framework="pt") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    config = VARIANTS["MLRA-2"]
    assert shapes.count((config.vocabulary_size, config.width)) == 1


def test_bfloat16_snapshot_is_not_loaded_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    model = random_model(VARIANTS["MLA"])
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    save_snapshot(path, rounded, metadata_of(model))
    for name, tensor in load_snapshot(path).state_dict().items():
        assert torch.equal(tensor, rounded[name].float())


WRITER = """
import sys
from pathlib import Path
import torch
from attention_ablation.model.snapshots import save_snapshot
names = sys.argv[2].split(",")
weights = {name: torch.full((2, 3), float(len(name))) for name in names}
metadata = {name: {other: 1 for other in names} for name in names}
save_snapshot(Path(sys.argv[1]), weights, metadata)
"""


def test_bytes_of_a_snapshot_differ_between_processes(tmp_path: Path) -> None:
    digests = set()
    for seed, names in (("1", "a,bb,ccc,dddd,eeeee"), ("2", "eeeee,ccc,a,dddd,bb")):
        path = tmp_path / f"{seed}.safetensors"
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", WRITER, str(path), names], check=True, env=environment)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


@settings(deadline=None, max_examples=40)
@given(kept=st.floats(0, 1, exclude_max=True))
def test_truncated_snapshot_is_loaded(tmp_path_factory: pytest.TempPathFactory, kept: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "step.safetensors"
    model = random_model(VARIANTS["MLA"])
    save_snapshot(path, model.state_dict(), metadata_of(model))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    for read in (load_snapshot, read_metadata):
        with pytest.raises(UserError, match=path.name):
            read(path)


def test_interrupted_write_destroys_the_snapshot_before_it(snapshot: Path) -> None:
    before = snapshot.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        save_snapshot(snapshot, {"a": torch.zeros(1)}, {"loss": float("nan")})
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        save_snapshot(snapshot, {"a": shared, "b": shared}, {})
    assert snapshot.read_bytes() == before


def test_missing_file_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.safetensors: found no file"):
        load_snapshot(tmp_path / "none.safetensors")


def test_foreign_safetensors_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"foreign.*not a snapshot"):
        load_snapshot(path)
    save_file({"a": torch.zeros(1)}, path, metadata={"attention_ablation": "{"})
    with pytest.raises(UserError, match="not JSON"):
        read_metadata(path)


def rewritten(snapshot: Path, change: Any) -> Path:
    """The snapshot with `change(weights, metadata)` applied."""
    with safe_open(snapshot, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["attention_ablation"])
    change(weights, metadata)
    save_snapshot(snapshot, weights, metadata)
    return snapshot


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, m: w.pop("norm.weight"), r"tensor 'norm\.weight' is missing"),
        (lambda w, m: w.update(extra=torch.zeros(1)), "unexpected tensor 'extra'"),
        (lambda w, m: w.update({"norm.weight": torch.zeros(5)}), r"found shape \(5,\), expected \(32,\)"),
        (lambda w, m: m.pop("model"), "'model': found None, expected the fields vocabulary_size"),
        (lambda w, m: m["model"].pop("heads"), "expected the fields vocabulary_size"),
        (lambda w, m: m["scaling"].update(logits=True), "expected the fields query, key_value, output"),
    ],
)
def test_snapshot_of_another_model_is_loaded(snapshot: Path, change: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_snapshot(rewritten(snapshot, change))
    assert str(snapshot) in str(caught.value)
