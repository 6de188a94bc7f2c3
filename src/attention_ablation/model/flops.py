"""Floating-point operations of training, in closed form."""

from dataclasses import dataclass

from attention_ablation.model.config import ModelConfig


@dataclass(frozen=True)
class FlopCount:
    """FLOP a training token, forward and backward; a multiplication and an addition are two.

    `dense` is six for each weight of a matrix product, the usual 6 N; `attention` is that of scores and values over
    the tokens that a causal query sees, (T + 1) / 2 of T on average.
    """

    dense: float
    attention: float

    @property
    def total(self) -> float:
        """All that a training token needs; what activation checkpointing computes again is not counted."""
        return self.dense + self.attention


def flops_per_token(config: ModelConfig, context: int) -> FlopCount:
    """FLOP a token of training `config` on sequences of `context` tokens."""
    head_dim = config.nope_dim + config.rope_dim
    attention = (
        config.width * config.query_rank
        + config.query_rank * config.heads * head_dim
        + config.width * (config.kv_rank + config.rope_dim)
        # L latents of c dims, each to the keys and values of one group's heads.
        + config.kv_rank * config.heads // config.groups * 2 * config.nope_dim
        + config.heads * config.nope_dim * config.width
    )
    mlp = 3 * config.width * config.mlp_width
    weights = config.layers * (attention + mlp) + config.vocabulary_size * config.width  # tied: the output's
    seen = (context + 1) / 2
    products = 2 * seen * (head_dim + config.nope_dim)  # of one query, one head, one branch
    return FlopCount(dense=6.0 * weights, attention=3 * config.layers * config.branches * config.heads * products)
