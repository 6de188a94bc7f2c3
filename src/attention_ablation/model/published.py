"""The authors' checkpoints: their names and layouts, and how they map to ours.

Their key/value up-projection comes in three layouts, which also tell the variants apart: one matrix (MLA),
two numbered matrices (GLA-2), one stacked tensor (GLA-4, MLRA-2, MLRA-4).
Shapes: L latents, C latent dim, N = heads of one group times 2 * nope dim.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels.latent_attention import choose_implementation
from attention_ablation.model.config import ModelConfig, Scaling
from attention_ablation.model.transformer import LanguageModel

EMBEDDING_NAMES = ("lm_head.weight", "transformer.wte.weight")

BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query_down.weight": "attn.q_a_proj.weight",
    "attention.query_norm.weight": "attn.q_a_layernorm.weight",
    "attention.query_up.weight": "attn.q_b_proj.weight",
    "attention.key_value_down.weight": "attn.kv_a_proj_with_mqa.weight",
    "attention.output.weight": "attn.c_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.c_fc1.weight",
    "mlp.up.weight": "mlp.c_fc2.weight",
    "mlp.down.weight": "mlp.c_proj.weight",
}

CONFIG_KEYS = {
    "vocabulary_size": "vocab_size",
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "mlp_width": "intermediate_size",
}


@dataclass(frozen=True)
class Correspondence:
    """One tensor of theirs: ours of that name, or its slice `latent`; transposed where it is (out, in)."""

    ours: str
    theirs: str
    latent: int | None = None
    transposed: bool = False

    def to_theirs(self, ours: Tensor) -> Tensor:
        part = ours if self.latent is None else ours[self.latent]
        return part.T if self.transposed else part

    def to_ours(self, theirs: Tensor) -> Tensor:
        return theirs.T if self.transposed else theirs


def correspondences(config: ModelConfig) -> list[Correspondence]:
    """Every tensor of theirs for a model of this config; the tied embedding is `lm_head.weight`."""
    table = [
        Correspondence("embedding.weight", "lm_head.weight"),
        Correspondence("norm.weight", "layernorm.weight"),
    ]
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.", f"transformer.h.{i}."
        table += [Correspondence(ours + a, theirs + b) for a, b in BLOCK_NAMES.items()]
        table += _latent_correspondences(config, ours + "attention.", theirs + "attn.")
    return table


def _latent_correspondences(config: ModelConfig, ours: str, theirs: str) -> Iterable[Correspondence]:
    norm, up = ours + "latent_norm.weight", ours + "key_value_up"
    if (config.groups, config.branches) in ((1, 1), (2, 1)):  # MLA, GLA-2
        for latent in range(config.latents):
            number = f"_{latent + 1}" if config.latents > 1 else ""
            yield Correspondence(norm, f"{theirs}kv_a_layernorm{number}.weight", latent)
            yield Correspondence(up, f"{theirs}kv_b_proj{number}.weight", latent, transposed=True)
    else:
        for latent in range(config.latents):
            yield Correspondence(norm, f"{theirs}kv_a_layernorms.{latent}.weight", latent)
        yield Correspondence(up, f"{theirs}kv_b_proj")


def to_published(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under our names (a state dict, or gradients) -> under the authors' names and layouts."""
    return {c.theirs: c.to_theirs(tensors[c.ours]) for c in correspondences(config)}


def from_published(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    source: Callable[[str], str] = lambda name: "published weights",
) -> dict[str, Tensor]:
    """Weights under the authors' names -> a state dict of ours, in float32.

    Args:
        weights: the tied embedding under either of its names, or equal under both.
        config: sizes the weights must have.
        source: where a tensor of that name is or should be, for messages.

    Raises:
        UserError: names the tensor that is missing, unexpected or of another shape.
    """
    weights = _with_one_embedding(weights, source)
    table = correspondences(config)
    with torch.device("meta"):
        model = LanguageModel(config, UNSCALED, attention="reference")
    shapes = {name: tensor.shape for name, tensor in to_published(model.state_dict(), config).items()}
    for name, shape in shapes.items():
        if name not in weights:
            raise UserError(f"{source(name)}: tensor {name!r} is missing, expected shape {tuple(shape)}")
        if weights[name].shape != shape:
            found = tuple(weights[name].shape)
            raise UserError(f"{source(name)}: tensor {name!r}: found shape {found}, expected {tuple(shape)}")
    for name in weights:
        if name not in shapes and not name.endswith("inv_freq"):  # a RoPE table is no weight
            raise UserError(f"{source(name)}: unexpected tensor {name!r}: config.json describes another model")
    ours: dict[str, Tensor] = {}
    slices: dict[str, list[Tensor]] = {}
    for c in table:
        tensor = c.to_ours(weights[c.theirs]).detach().to(torch.float32)
        if c.latent is None:
            ours[c.ours] = tensor
        else:
            slices.setdefault(c.ours, []).append(tensor)
    return ours | {name: torch.stack(parts) for name, parts in slices.items()}


def _with_one_embedding(weights: Mapping[str, Tensor], source: Callable[[str], str]) -> dict[str, Tensor]:
    """`weights` with the tied embedding under its first name only."""
    first, second = EMBEDDING_NAMES
    result = dict(weights)
    if second in result:
        embedding = result.pop(second)
        if first in result and not torch.equal(result[first], embedding):
            raise UserError(
                f"{source(second)}: tensors {first!r} and {second!r} differ, but the embedding is tied: "
                "these are not weights of one of the paper's models"
            )
        result[first] = embedding
    return result


UNSCALED = Scaling(query=False, key_value=False, output=False)


def load_published(
    folder: str | Path, *, scaled: bool, attention: str = "auto", device: str = "cpu"
) -> LanguageModel:
    """A model of the authors, in float32 on `device`, in eval mode.

    Args:
        folder: holds `config.json` and `model.safetensors`, `pytorch_model.bin`, or the shards
            `pytorch_model-*.bin` with their `pytorch_model.bin.index.json`.
        scaled: whether the run was trained with scaling; the authors' files do not say.
        attention: as `choose_implementation` takes it.
        device: "cpu" or "cuda"; it has a say in what attention can run.

    Raises:
        UserError: names the file and the tensor or key at fault.
    """
    folder = Path(folder)
    weights, source = _read_weights(folder)
    config = _read_config(folder / "config.json", weights, source)
    implementation, _ = choose_implementation(attention, device)
    with torch.device("meta"):
        model = LanguageModel(
            config, Scaling(query=scaled, key_value=scaled, output=scaled), attention=implementation
        )
    model.load_state_dict(from_published(weights, config, source=source), assign=True)
    return model.to(device).eval()


def _read_config(path: Path, weights: Mapping[str, Tensor], source: Callable[[str], str]) -> ModelConfig:
    """Sizes from config.json; groups and branches, which it does not tell, from the weights."""
    fields = _read_json(path)
    sizes: dict[str, int] = {}
    for ours, theirs in CONFIG_KEYS.items():
        if theirs not in fields:
            raise UserError(f"{path}: key {theirs!r} is missing, expected a whole number")
        value = fields[theirs]
        if type(value) is not int or value < 1:
            raise UserError(f"{path}: key {theirs!r}: found {value!r}, expected a whole number over 0")
        sizes[ours] = value
    groups, branches = _groups_and_branches(weights, sizes["heads"] * 2 * sizes["nope_dim"], source)
    for name, whole, parts in (
        ("n_head", sizes["heads"], groups),
        ("kv_lora_rank", sizes["kv_rank"], groups * branches),
    ):
        if whole % parts:
            raise UserError(f"{path}: key {name!r}: found {whole}, expected a multiple of {parts}")
    return ModelConfig(**sizes, groups=groups, branches=branches)


def _groups_and_branches(
    weights: Mapping[str, Tensor], all_heads: int, source: Callable[[str], str]
) -> tuple[int, int]:
    """(g, b) by names and shapes of the first layer's tensors; `all_heads` = heads * 2 * nope dim."""
    prefix = "transformer.h.0.attn.kv_b_proj"
    if f"{prefix}.weight" in weights:
        return 1, 1
    if f"{prefix}_1.weight" in weights:
        return 2, 1
    if prefix not in weights:
        raise UserError(
            f"{source(prefix)}: found none of {prefix + '.weight'!r} (MLA), {prefix + '_1.weight'!r} (GLA-2) "
            f"and {prefix!r} (GLA-4, MLRA): not a checkpoint of the paper's models"
        )
    shape = tuple(weights[prefix].shape)
    if len(shape) == 3:
        groups = all_heads // max(shape[2], 1)
        if groups * shape[2] == all_heads and groups and shape[0] % groups == 0:
            return groups, shape[0] // groups
    raise UserError(
        f"{source(prefix)}: tensor {prefix!r}: found shape {shape}, expected (L, c, N) where N divides "
        f"heads * 2 * nope dim = {all_heads} into groups, and the groups divide L"
    )


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], Callable[[str], str]]:
    """All tensors in the folder, and a function from a tensor's name to the file where it is or should be."""
    index = folder / "pytorch_model.bin.index.json"
    if (single := folder / "model.safetensors").exists():
        return _read_safetensors(single), lambda name: str(single)
    if (single := folder / "pytorch_model.bin").exists():
        return _read_pickle(single), lambda name: str(single)
    if not index.exists():
        raise UserError(f"{folder}: expected model.safetensors, pytorch_model.bin or {index.name}, found none")
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise UserError(f"{index}: key 'weight_map' is missing, expected a file for each tensor")
    weights: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise UserError(f"{index}: found the shard name {file!r}, expected a file beside the index")
        if not (folder / file).exists():
            first = min(name for name in files if files[name] == file)
            raise UserError(f"{folder / file}: the shard is missing; {index.name} has {first!r} in it")
        shard = _read_pickle(folder / file)
        for name in (name for name in files if files[name] == file):
            if name not in shard:
                raise UserError(f"{folder / file}: tensor {name!r} is missing; {index.name} has it there")
            weights[name] = shard[name]
    return weights, lambda name: str(folder / files[name]) if name in files else str(index)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}): fetch it again") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors of a .bin file; `weights_only` lets no other object out of the pickle."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for a damaged or foreign file
        raise UserError(f"{path}: not a whole file of tensors ({type(error).__name__}): fetch it again") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{path}: found {type(weights).__name__}, expected a mapping of names to tensors")
    return dict(weights)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: the file is missing") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value
