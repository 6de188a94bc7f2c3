"""Layers that the attention and the transformer share.

Matrices are left unfilled at construction, so that no random number is drawn twice:
`attention_ablation.model.initialization` or a checkpoint fills them.
Shapes: B batch, T tokens, L latents, C latent dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-6


class Linear(nn.Linear):
    """A matrix (out, in) without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leave the matrix unfilled."""


class Embedding(nn.Embedding):
    """The token embedding (V, d)."""

    def reset_parameters(self) -> None:
        """Leave the matrix unfilled."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, cast back to x's type.

    A weight of more than one dimension is a weight for each vector: (L, C) for x (B, T, L, C).
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale`, a 0-d tensor, multiplies the result (by way of the weight, the smaller factor)."""
        weight = self.weight if scale is None else self.weight * scale
        # The weight outside of rms_norm: inside, forward and backward of (8, 256, 192) took 2.7 ms, not 1.4.
        normalised = F.rms_norm(x.float(), x.shape[-1:], eps=NORM_EPSILON)
        return (normalised * weight).to(x.dtype)


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) * (W_up x))."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.gate = Linear(width, mlp_width)
        self.up = Linear(width, mlp_width)
        self.down = Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
