"""Snapshots: weights in safetensors, what defines the model as JSON in its metadata. Never a pickle."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.files import replacing
from attention_ablation.kernels.latent_attention import choose_implementation
from attention_ablation.model.config import ModelConfig, Scaling
from attention_ablation.model.transformer import LanguageModel

METADATA_KEY = "attention_ablation"

Fields = TypeVar("Fields", ModelConfig, Scaling)


def save_snapshot(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a LanguageModel's state dict, whole or not at all; the same input gives the same bytes.

    Args:
        path: the `.safetensors` file to write or replace.
        weights: by our names, in float32 or bfloat16, on any device; the tied embedding is in it once.
        metadata: JSON values. `model` (fields of ModelConfig) and `scaling` (fields of Scaling) are what
            `load_snapshot` needs; all other keys are the caller's.
    """
    # One key, since safetensors keeps several in the order of a hash map, which differs between processes.
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    tensors = {name: weights[name].detach().to("cpu").contiguous() for name in sorted(weights)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: text})


def read_metadata(path: Path) -> dict[str, Any]:
    """What `save_snapshot` was given as metadata. UserError when the file is not a whole snapshot."""
    with _opened(path) as file:
        return _metadata_of(file, path)


def load_snapshot(path: Path, *, attention: str = "auto", device: str = "cpu") -> LanguageModel:
    """The model of a snapshot, in float32 on `device`, in eval mode.

    Args:
        path: a file that `save_snapshot` wrote.
        attention: as `choose_implementation` takes it.
        device: "cpu" or "cuda"; it has a say in what attention can run.

    Raises:
        UserError: the file is missing, not whole, no snapshot, or does not hold the weights of its model.
    """
    implementation, _ = choose_implementation(attention, device)
    with _opened(path) as file:
        metadata = _metadata_of(file, path)
        config = _fields(ModelConfig, metadata, "model", path)
        scaling = _fields(Scaling, metadata, "scaling", path)
        with torch.device("meta"):
            model = LanguageModel(config, scaling, attention=implementation)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = set(file.keys())
        if missing := sorted(expected.keys() - found):
            raise UserError(f"{path}: tensor {missing[0]!r} is missing ({len(missing)} of {len(expected)} are)")
        if unexpected := sorted(found - expected.keys()):
            raise UserError(f"{path}: unexpected tensor {unexpected[0]!r} ({len(unexpected)} in all)")
        weights = {}
        for name, shape in expected.items():
            if (found_shape := tuple(file.get_slice(name).get_shape())) != shape:
                raise UserError(f"{path}: tensor {name!r}: found shape {found_shape}, expected {shape}")
            # A copy, so that a model does not depend on the file once it is loaded.
            weights[name] = file.get_tensor(name).to(torch.float32, copy=True)
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval()


def _opened(path: Path) -> Any:
    """The opened safetensors file, a context manager."""
    if not Path(path).is_file():
        raise UserError(f"{path}: found no file, expected a snapshot")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{path}: found no whole safetensors file ({error}), expected a snapshot") from error


def _metadata_of(file: Any, path: Path) -> dict[str, Any]:
    text = (file.metadata() or {}).get(METADATA_KEY)
    if text is None:
        raise UserError(f"{path}: found no metadata {METADATA_KEY!r}: not a snapshot of this project")
    try:
        metadata = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: metadata {METADATA_KEY!r} is not JSON ({error})") from error
    if not isinstance(metadata, dict):
        raise UserError(f"{path}: metadata {METADATA_KEY!r}: found {type(metadata).__name__}, expected an object")
    return metadata


def _fields(kind: type[Fields], metadata: Mapping[str, Any], key: str, path: Path) -> Fields:
    """`metadata[key]` as `kind`, whose field names it must have."""
    values = metadata.get(key)
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(values, dict) or values.keys() != set(names):
        found = ", ".join(sorted(values)) if isinstance(values, dict) else repr(values)
        raise UserError(f"{path}: metadata {key!r}: found {found}, expected the fields {', '.join(names)}")
    return kind(**values)
