"""Latent attention as operators of torch, `attention_ablation::latent_attention` and `..._backward`.

On CUDA they are the Triton kernels. On the CPU they are the reference, so that everything around the kernels
(autograd, `torch.compile`, autocast, DeepSpeed) can be tested without a GPU; with TRITON_INTERPRET=1 in the
environment they are the kernels in Triton's interpreter. Training on the CPU takes neither: see
`latent_attention.choose_implementation`.

Shapes: B batch, T tokens, H heads, J branches; Dn nope head dim (keys and values), Dr rope head dim.
"""

import os
from typing import Any

import torch
from torch import Tensor

from attention_ablation.kernels import reference

Forward = tuple[Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def interpreted() -> bool:
    """Whether the Triton kernels take CPU tensors. Triton reads the same variable, when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def latent_attention_triton(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, *, softmax_scale: float
) -> Tensor:
    """What `latent_attention_reference` computes, in fused kernels; under autocast in autocast's type, as SDPA."""
    inputs = [q_nope, q_rope, k_nope, k_rope, v]
    if torch.is_autocast_enabled(q_nope.device.type):
        dtype = torch.get_autocast_dtype(q_nope.device.type)
        inputs = [x.to(dtype) for x in inputs]
    return _forward(*inputs, softmax_scale)[0]


# Triton is imported by the first launch: a machine without it has all other paths.
@torch.library.custom_op("attention_ablation::latent_attention", mutates_args=(), device_types="cuda")
def _forward(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, softmax_scale: float
) -> Forward:
    from attention_ablation.kernels.triton_launch import run_forward

    return run_forward(q_nope, q_rope, k_nope, k_rope, v, softmax_scale)


@_forward.register_kernel("cpu")
def _forward_cpu(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, softmax_scale: float
) -> Forward:
    if interpreted():
        from attention_ablation.kernels.triton_launch import run_forward

        return run_forward(q_nope, q_rope, k_nope, k_rope, v, softmax_scale)
    return reference.forward_with_statistics(q_nope, q_rope, k_nope, k_rope, v, softmax_scale)


@_forward.register_fake
def _forward_fake(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, softmax_scale: float
) -> Forward:
    J, B, T, H, Dn = k_nope.shape
    out = q_nope.new_empty(B, T, H, Dn)
    return out, q_nope.new_empty(J if J > 1 else 0, B, T, H, Dn), q_nope.new_empty(J, B, H, T, dtype=torch.float32)


@torch.library.custom_op("attention_ablation::latent_attention_backward", mutates_args=(), device_types="cuda")
def _backward(
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
) -> Gradients:
    from attention_ablation.kernels.triton_launch import run_backward

    return run_backward(d_out, q_nope, q_rope, k_nope, k_rope, v, out, branch_out, lse, softmax_scale)


@_backward.register_kernel("cpu")
def _backward_cpu(
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
) -> Gradients:
    arguments = (d_out, q_nope, q_rope, k_nope, k_rope, v, out, branch_out, lse, softmax_scale)
    if interpreted():
        from attention_ablation.kernels.triton_launch import run_backward

        return run_backward(*arguments)
    return reference.backward_from_statistics(*arguments)


@_backward.register_fake
def _backward_fake(
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
) -> Gradients:
    q_nope_gradient, q_rope_gradient, k_nope_gradient, k_rope_gradient, v_gradient = (
        x.new_empty(x.shape) for x in (q_nope, q_rope, k_nope, k_rope, v)
    )
    return q_nope_gradient, q_rope_gradient, k_nope_gradient, k_rope_gradient, v_gradient


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Forward) -> None:
    *tensors, ctx.softmax_scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, d_out: Tensor, _d_branch_out: Tensor, _d_lse: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(d_out, *ctx.saved_tensors, ctx.softmax_scale), None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)
