"""The operators around the kernels: registration, autograd, compilation, autocast, and training through DeepSpeed."""

import pytest
import torch
from torch import Tensor

from attention_ablation.kernels import operator
from attention_ablation.kernels.latent_attention import latent_attention
from attention_ablation.kernels.operator import latent_attention_triton
from attention_ablation.kernels.reference import latent_attention_reference

KERNELS = ["forward_kernel", "query_gradient_kernel", "key_gradient_kernel"]


def random_inputs(J: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Views, as the model makes them."""
    B, T, H, Dn, Dr = 2, 9, 3, 8, 4
    generator = torch.Generator().manual_seed(J)
    q = torch.randn(B, T, H, Dn + Dr, generator=generator).to(dtype)
    kv = torch.randn(J, B, T, H, 2, Dn, generator=generator).to(dtype)
    k_rope = torch.randn(B, T, Dr, generator=generator).to(dtype)
    return [x.requires_grad_() for x in (q[..., :Dn], q[..., Dn:], kv[..., 0, :], k_rope, kv[..., 1, :])]


def output_and_gradients(function, inputs: list[Tensor]) -> list[Tensor]:
    output = function(*inputs, softmax_scale=0.3)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


@pytest.mark.parametrize("J", [1, 2])
def test_the_operator_is_not_what_torch_wants_of_one(J):
    torch.library.opcheck(operator._forward, (*random_inputs(J), 0.3))
    inputs = [x.detach() for x in random_inputs(J)]
    forward = operator._forward(*inputs, 0.3)
    torch.library.opcheck(operator._backward, (torch.ones_like(forward[0]), *inputs, *forward, 0.3))


def test_the_interpreted_operator_is_not_what_torch_wants_of_one(launched):
    torch.library.opcheck(operator._forward, (*random_inputs(2), 0.3))
    assert set(launched) == set(KERNELS)


@pytest.mark.parametrize("J", [1, 2])
def test_the_cpu_implementation_departs_from_the_reference(J):
    inputs = random_inputs(J, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: operator._forward(*x, 0.3)[0], inputs)
    torch.testing.assert_close(
        operator._forward(*inputs, 0.3)[0], latent_attention_reference(*inputs, softmax_scale=0.3)
    )


@pytest.mark.parametrize("J", [1, 2])
def test_the_statistics_of_the_kernels_and_of_the_cpu_differ(J, monkeypatch):
    inputs = [x.detach() for x in random_inputs(J)]
    expected = operator._forward(*inputs, 0.3)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, a, b in zip(("out", "branch_out", "lse"), operator._forward(*inputs, 0.3), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_torch_compile_breaks_the_graph_or_changes_the_result(launched):
    def attend(*inputs: Tensor, softmax_scale: float) -> Tensor:
        return latent_attention(*inputs, softmax_scale=softmax_scale, implementation="triton") * 2

    inputs = random_inputs(2)
    expected = output_and_gradients(attend, inputs)
    launched.clear()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for a, b in zip(output_and_gradients(compiled, inputs), expected, strict=True):
        assert torch.equal(a, b)
    assert launched == KERNELS


@pytest.mark.slow
def test_inductor_breaks_the_graph_or_changes_the_result():
    def attend(*inputs: Tensor, softmax_scale: float) -> Tensor:
        return latent_attention_triton(*inputs, softmax_scale=softmax_scale) * 2

    inputs = random_inputs(2)
    compiled = torch.compile(attend, fullgraph=True)
    for a, b in zip(output_and_gradients(compiled, inputs), output_and_gradients(attend, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_leaves_float32_or_mixes_types():
    inputs = random_inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        output = latent_attention_triton(*inputs, softmax_scale=0.3)
    assert output.dtype == torch.bfloat16
    for x, gradient in zip(inputs, torch.autograd.grad(output.float().sum(), inputs), strict=True):
        assert gradient.dtype == x.dtype == torch.float32
    torch.testing.assert_close(
        output.float(), latent_attention_reference(*inputs, softmax_scale=0.3), rtol=0.02, atol=0.05
    )


def test_no_gradient_is_wanted_and_one_is_computed(launched):
    inputs = random_inputs(2)
    with torch.no_grad():
        latent_attention(*inputs, softmax_scale=0.3, implementation="triton")
    assert launched == KERNELS[:1]
