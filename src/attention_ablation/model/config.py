"""The numbers that define a model. No defaults here: they are the study's, in `attention_ablation.config`."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one variant, in the paper's terms (section "One family of attention")."""

    vocabulary_size: int
    layers: int
    width: int  # d
    heads: int  # H
    nope_dim: int  # d_n, also the value head dim
    rope_dim: int  # d_r
    query_rank: int  # r_q
    kv_rank: int  # r_kv, over all latents
    groups: int  # g
    branches: int  # b
    mlp_width: int

    @property
    def latents(self) -> int:
        """L = g * b latent heads."""
        return self.groups * self.branches

    @property
    def latent_dim(self) -> int:
        """c = r_kv / L dims of one latent."""
        return self.kv_rank // self.latents


@dataclass(frozen=True)
class Scaling:
    """Which latents are scaled; what is not has the factor 1."""

    query: bool
    key_value: bool
    output: bool


def scaling_factors(config: ModelConfig, scaling: Scaling) -> tuple[float, float, float]:
    """(alpha_q, alpha_kv, alpha_o): sqrt(d / r_q), sqrt(d / c), 1 / sqrt(b), or 1 where not scaled."""
    return (
        math.sqrt(config.width / config.query_rank) if scaling.query else 1.0,
        math.sqrt(config.width / config.latent_dim) if scaling.key_value else 1.0,
        1 / math.sqrt(config.branches) if scaling.output else 1.0,
    )


def width_preserving_std(width: int, *, std: float, reference_width: int) -> float:
    """std * sqrt(reference_width / width).

    Keeps width * std^2, the variance of a projection of an RMS-normalised vector, at the reference's value:
    with the paper's 0.02 at 3072 that is 1.23. So the balance between nope and rope keys, which is what the
    scaling changes, is the paper's at any width.
    """
    return std * math.sqrt(reference_width / width)
