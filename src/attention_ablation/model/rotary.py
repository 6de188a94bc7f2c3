"""Rotary position embedding (RoPE), in the halves convention.

Shapes: T tokens, D head dim (even). The rotated pair m is (x[m], x[m + D/2]), m = 0 .. D/2 - 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

BASE = 10_000.0


class Rotation(NamedTuple):
    """Tables of one sequence length, (T, D) float32; the second half repeats the first.

    The sine is negated in the first half: a rotation is then two products and a sum.
    """

    cosine: Tensor
    signed_sine: Tensor


def rotation_tables(tokens: int, dim: int, device: torch.device) -> Rotation:
    """Tables for positions 0 .. tokens - 1: angle = position * BASE^(-2m / dim).

    Made anew in each forward, once for all layers: a dozen operations on (T, D/2), and so the model has no
    longest context, no cache to invalidate and no table that a checkpoint or a change of device could spoil.
    """
    pair_M = torch.arange(dim // 2, dtype=torch.float32, device=device)
    position_T1 = torch.arange(tokens, dtype=torch.float32, device=device)[:, None]
    angle_TM = position_T1 * BASE ** (-2.0 * pair_M / dim)
    cosine, sine = angle_TM.cos(), angle_TM.sin()
    return Rotation(torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate x (..., T, D) by its positions, in float32, cast back: (x1 cos - x2 sin, x1 sin + x2 cos)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # (x2, x1)
    return (x * rotation.cosine + swapped * rotation.signed_sine).to(x.dtype)
