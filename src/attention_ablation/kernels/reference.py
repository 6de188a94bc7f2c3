"""Latent attention in plain torch: the specification that every faster path is tested against.

Shapes: B batch, T tokens, H heads, J branches; Dn nope head dim (keys and values), Dr rope head dim.
"""

import torch
from torch import Tensor


def latent_attention_reference(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, *, softmax_scale: float
) -> Tensor:
    """Sum over the branches of causal softmax attention (paper, "One family of attention", steps 7 and 8).

    The logits of branch j are `softmax_scale * (q_nope . k_nope[j] + q_rope . k_rope)`: the query is the same
    in all branches, and the rope key is the same in all heads and branches. RoPE is already applied.

    Args:
        q_nope: (B, T, H, Dn).
        q_rope: (B, T, H, Dr).
        k_nope: (J, B, T, H, Dn).
        k_rope: (B, T, Dr).
        v: (J, B, T, H, Dn).
        softmax_scale: factor of the logits, 1 / sqrt(Dn + Dr) in the paper.

    Returns:
        (B, T, H, Dn).
    """
    T = q_nope.shape[1]
    logits_JBHTT = torch.einsum("bthd,jbshd->jbhts", q_nope, k_nope) + torch.einsum("bthd,bsd->bhts", q_rope, k_rope)
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_nope.device).triu(diagonal=1)
    weights_JBHTT = (logits_JBHTT * softmax_scale).masked_fill(future_TT, float("-inf")).softmax(dim=-1)
    return torch.einsum("jbhts,jbshd->bthd", weights_JBHTT.to(v.dtype), v)
