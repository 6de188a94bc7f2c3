"""The fast paths of latent attention agree with the reference, and the reference with the definition."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels.latent_attention import (
    IMPLEMENTATIONS,
    choose_implementation,
    latent_attention,
)

SOURCE = Path(__file__).parents[2] / "src"
FAST = ["sdpa"]  # Triton's interpreter is too slow for as many examples: see test_triton_interpreter.py


def random_inputs(J: int, B: int, T: int, H: int, Dn: int, Dr: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, T, H, Dn), (B, T, H, Dr), (J, B, T, H, Dn), (B, T, Dr), (J, B, T, H, Dn))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def output_and_gradients(inputs: list[Tensor], implementation: str) -> list[Tensor]:
    output = latent_attention(*inputs, softmax_scale=0.4, implementation=implementation)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, inputs, direction)]


@pytest.mark.parametrize("implementation", FAST)
@settings(deadline=None, max_examples=40)
@given(
    J=st.integers(1, 4),
    B=st.integers(1, 3),
    T=st.integers(1, 70),
    H=st.integers(1, 5),
    Dn=st.integers(1, 19),
    Dr=st.integers(1, 9),
)
def test_fast_path_departs_from_the_reference(
    implementation: str, J: int, B: int, T: int, H: int, Dn: int, Dr: int
) -> None:
    inputs = random_inputs(J, B, T, H, Dn, Dr)
    expected = output_and_gradients(inputs, "reference")
    found = output_and_gradients(inputs, implementation)
    for name, a, b in zip(("output", "q_nope", "q_rope", "k_nope", "k_rope", "v"), found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_reference_departs_from_the_definition_written_with_loops() -> None:
    J, B, T, H, Dn, Dr = 2, 2, 5, 3, 4, 2
    q_nope, q_rope, k_nope, k_rope, v = (x.detach().double() for x in random_inputs(J, B, T, H, Dn, Dr))
    found = latent_attention(q_nope, q_rope, k_nope, k_rope, v, softmax_scale=0.3, implementation="reference")
    for b in range(B):
        for t in range(T):
            for h in range(H):
                expected = torch.zeros(Dn, dtype=torch.float64)
                for j in range(J):
                    weights = [
                        math.exp(0.3 * float(q_nope[b, t, h] @ k_nope[j, b, s, h] + q_rope[b, t, h] @ k_rope[b, s]))
                        for s in range(t + 1)
                    ]
                    for s, weight in enumerate(weights):
                        expected += weight / sum(weights) * v[j, b, s, h]
                torch.testing.assert_close(found[b, t, h], expected)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_future_tokens_leak_into_the_past(implementation: str) -> None:
    inputs = [x.detach() for x in random_inputs(2, 2, 9, 3, 8, 4)]
    before = latent_attention(*inputs, softmax_scale=0.3, implementation=implementation)
    q_nope, q_rope, k_nope, k_rope, v = (x.clone() for x in inputs)
    for x in (q_nope[:, 5:], q_rope[:, 5:], k_nope[:, :, 5:], k_rope[:, 5:], v[:, :, 5:]):
        x += 10
    after = latent_attention(q_nope, q_rope, k_nope, k_rope, v, softmax_scale=0.3, implementation=implementation)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, 5:], before[:, 5:])


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_auto_names_a_path_that_does_not_exist(device_type: str) -> None:
    chosen, reason = choose_implementation("auto", device_type)
    assert chosen in IMPLEMENTATIONS
    assert device_type in reason


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", sorted(IMPLEMENTATIONS))
def test_a_path_asked_for_is_replaced_in_silence(name: str) -> None:
    assert choose_implementation(name, "cpu") == (name, "asked for")


def test_unknown_attention_path_falls_back_in_silence() -> None:
    with pytest.raises(UserError, match=r"'flash9'.*auto, triton, sdpa, reference"):
        choose_implementation("flash9", "cpu")
    inputs = random_inputs(1, 1, 2, 1, 2, 2)
    with pytest.raises(UserError, match=r"'flash9'.*auto, triton, sdpa, reference"):
        latent_attention(*inputs, softmax_scale=1.0, implementation="flash9")


def test_auto_is_not_what_a_call_does_by_itself() -> None:
    inputs = random_inputs(2, 1, 5, 1, 4, 4)
    found = latent_attention(*inputs, softmax_scale=1.0)
    assert torch.equal(found, latent_attention(*inputs, softmax_scale=1.0, implementation="sdpa"))


def test_triton_on_a_cpu_runs_something_else_in_silence(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="triton was asked for on cpu"):
        choose_implementation("triton", "cpu")
    with pytest.raises(UserError, match="triton was asked for on cpu"):
        latent_attention(*random_inputs(1, 1, 2, 1, 4, 4), softmax_scale=1.0, implementation="triton")


def test_triton_without_its_package_runs_something_else_in_silence(monkeypatch) -> None:
    monkeypatch.setattr("attention_ablation.kernels.latent_attention._has_triton", lambda: False)
    with pytest.raises(UserError, match="triton is not installed"):
        choose_implementation("triton", "cuda")


@pytest.mark.parametrize(
    ("measured", "installed", "expected", "why"),
    [
        ((), True, "sdpa", "not measured"),
        (("sm_90",), False, "sdpa", "without the package"),
        (("sm_90",), True, "triton", "measured faster"),
        (("sm_80",), True, "sdpa", "not measured"),
    ],
)
def test_auto_takes_kernels_that_were_never_run_on_this_gpu(monkeypatch, measured, installed, expected, why) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("attention_ablation.kernels.latent_attention._has_triton", lambda: installed)
    monkeypatch.setattr("attention_ablation.kernels.latent_attention.MEASURED", frozenset(measured))
    chosen, reason = choose_implementation("auto", "cuda")
    assert chosen == expected
    assert why in reason and "sm_90" in reason


def test_importing_the_operator_wants_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from attention_ablation.kernels.latent_attention import latent_attention\n"
        "q = torch.ones(1, 3, 1, 4)\n"
        "latent_attention(q, q, q[None], q[:, :, 0], q[None], softmax_scale=1.0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})
