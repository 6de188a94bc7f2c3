"""Latent attention in plain torch: the specification that every faster path is tested against.

Shapes: B batch, T tokens, H heads, J branches; Dn nope head dim (keys and values), Dr rope head dim.
"""

import math

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
    weights_JBHTT = _masked_logits(q_nope, q_rope, k_nope, k_rope, softmax_scale).softmax(dim=-1)
    return torch.einsum("jbhts,jbshd->bthd", weights_JBHTT.to(v.dtype), v)


def forward_with_statistics(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and what `backward_from_statistics` wants beside the inputs.

    Returns:
        `latent_attention_reference`; each branch's share of it (J, B, T, H, Dn), empty for one branch, whose
        share is the output; the logarithm to base 2 of each softmax's denominator (J, B, H, T), in float32.
    """
    logits_JBHTT = _masked_logits(q_nope, q_rope, k_nope, k_rope, softmax_scale)
    branch_out = torch.einsum("jbhts,jbshd->jbthd", logits_JBHTT.softmax(dim=-1).to(v.dtype), v).contiguous()
    lse_JBHT = (logits_JBHTT.float().logsumexp(dim=-1) / math.log(2)).contiguous()
    if len(branch_out) == 1:
        return branch_out[0].clone(), branch_out[:0].clone(), lse_JBHT
    return branch_out.sum(0), branch_out, lse_JBHT


def backward_from_statistics(
    d_out: Tensor,
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    out: Tensor,
    branch_out: Tensor,
    lse: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q_nope, q_rope, k_nope, k_rope and v: what the Triton kernels compute, tile by tile.

    For each branch P = 2^(S log2(e) - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K,
    dK = scale dS^T Q (FlashAttention-2, arXiv:2307.08691, algorithm 2); summed over what is shared.
    """
    branch_out = branch_out if len(branch_out) else out[None]
    logits_JBHTT = _masked_logits(q_nope, q_rope, k_nope, k_rope, softmax_scale)
    weights_JBHTT = torch.exp2(logits_JBHTT / math.log(2) - lse[..., None]).to(v.dtype)
    d_v = torch.einsum("jbhts,bthd->jbshd", weights_JBHTT, d_out)
    delta_JBHT1 = torch.einsum("bthd,jbthd->jbht", d_out, branch_out)[..., None]
    d_logits_JBHTT = weights_JBHTT * (torch.einsum("bthd,jbshd->jbhts", d_out, v) - delta_JBHT1) * softmax_scale
    return (
        torch.einsum("jbhts,jbshd->bthd", d_logits_JBHTT, k_nope).contiguous(),
        torch.einsum("jbhts,bsd->bthd", d_logits_JBHTT, k_rope).contiguous(),
        torch.einsum("jbhts,bthd->jbshd", d_logits_JBHTT, q_nope).contiguous(),
        torch.einsum("jbhts,bthd->bsd", d_logits_JBHTT, q_rope).contiguous(),
        d_v.contiguous(),
    )


def _masked_logits(q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, softmax_scale: float) -> Tensor:
    """(J, B, H, T, T), queries before keys; -inf where the key is later than the query."""
    T = q_nope.shape[1]
    logits_JBHTT = torch.einsum("bthd,jbshd->jbhts", q_nope, k_nope) + torch.einsum("bthd,bsd->bhts", q_rope, k_rope)
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_nope.device).triu(diagonal=1)
    return (logits_JBHTT * softmax_scale).masked_fill(future_TT, float("-inf"))
