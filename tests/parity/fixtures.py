"""The parity fixtures: what the paper's implementation computed, in float32 on a CPU, from random weights.

A `.safetensors` file a variant and arm, `*_no_scale` being unscaled. The weights and gradients have the names
of the published checkpoints, with the tied embedding once, as `lm_head.weight`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from attention_ablation.model.config import ModelConfig, Scaling

FOLDER = Path(__file__).parent
NAMES = ("mla", "mla_no_scale", "gla_2", "gla_2_no_scale", "mlra_2", "mlra_2_no_scale")
GROUPS_AND_BRANCHES = {"mla": (1, 1), "gla_2": (2, 1), "mlra_2": (2, 2)}


@dataclass(frozen=True)
class Fixture:
    """One file. Tokens are int64; B = 3 sequences of T = 40 tokens, S = 16 steps of 2 micro-batches."""

    name: str
    config: ModelConfig
    scaling: Scaling
    published_config: dict[str, Any]  # content of the published config.json
    schedule: dict[str, Any]  # peak_lr, min_lr, warmup_steps, decay_steps, steps, betas, eps, ...
    num_parameters: int
    weights: dict[str, Tensor]  # by published name
    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    logits: Tensor  # (B, T, V)
    loss: Tensor  # 0-d, mean cross-entropy
    gradients: dict[str, Tensor]  # of that loss, by published name
    train_tokens: Tensor  # (S, 2, T)
    train_targets: Tensor  # (S, 2, T)
    learning_rates: Tensor  # (S,)
    train_losses: Tensor  # (S,), mean over the micro-batches
    gradient_norms: Tensor  # (S,), global, before clipping


def load_fixture(name: str) -> Fixture:
    """The fixture of a name in NAMES."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    published = json.loads(metadata["config"])
    scaled = not name.endswith("_no_scale")
    groups, branches = GROUPS_AND_BRANCHES[name.removesuffix("_no_scale")]

    def under(prefix: str) -> dict[str, Tensor]:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

    return Fixture(
        name=name,
        config=ModelConfig(
            vocabulary_size=published["vocab_size"],
            layers=published["n_layer"],
            width=published["n_embd"],
            heads=published["n_head"],
            nope_dim=published["qk_nope_head_dim"],
            rope_dim=published["qk_rope_head_dim"],
            query_rank=published["q_lora_rank"],
            kv_rank=published["kv_lora_rank"],
            groups=groups,
            branches=branches,
            mlp_width=published["intermediate_size"],
        ),
        scaling=Scaling(query=scaled, key_value=scaled, output=scaled),
        published_config=published,
        schedule=json.loads(metadata["schedule"]),
        num_parameters=int(metadata["num_parameters"]),
        weights=under("weight/"),
        tokens=tensors["input/tokens"].to(torch.int64),
        targets=tensors["input/targets"].to(torch.int64),
        logits=tensors["expect/logits"],
        loss=tensors["expect/loss"].squeeze(0),
        gradients=under("expect/grad/"),
        train_tokens=tensors["train/tokens"].to(torch.int64),
        train_targets=tensors["train/targets"].to(torch.int64),
        learning_rates=tensors["expect/lr"],
        train_losses=tensors["expect/train_loss"],
        gradient_norms=tensors["expect/grad_norm"],
    )
