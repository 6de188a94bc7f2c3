"""The latent attention operator, and the one place where its implementation is chosen."""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels.operator import interpreted, latent_attention_triton
from attention_ablation.kernels.reference import latent_attention_reference
from attention_ablation.kernels.sdpa import latent_attention_sdpa

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "triton": latent_attention_triton,
    "sdpa": latent_attention_sdpa,
    "reference": latent_attention_reference,
}

# Architectures on which `benchmarks/gpu.py` found the Triton kernels right and faster than SDPA. None yet: they were
# compiled for sm_80, sm_90 and sm_100 and run in the interpreter, but no GPU was at hand.
MEASURED: frozenset[str] = frozenset()


def choose_implementation(requested: str, device_type: str) -> tuple[str, str]:
    """Return (implementation, reason) for `requested`: "auto" or a key of IMPLEMENTATIONS.

    Args:
        requested: the value of `execution.attention`.
        device_type: "cpu" or "cuda", where the model will run.

    Raises:
        UserError: when there is no such implementation, or it cannot run here.
    """
    if requested == "auto":
        return _choose_automatically(device_type)
    require_implementation(requested, also="auto")
    if requested == "triton":
        _require_triton(device_type)
    return requested, "asked for"


def _choose_automatically(device_type: str) -> tuple[str, str]:
    if device_type != "cuda":
        return "sdpa", f"auto: PyTorch's fused attention is the fastest path on {device_type}"
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "no GPU"
    if architecture not in MEASURED:
        return "sdpa", f"auto: on cuda ({architecture}) the Triton kernels were not measured; ask for triton to try"
    if not _has_triton():
        return "sdpa", f"auto: on cuda ({architecture}) without the package triton"
    return "triton", f"auto: measured faster than PyTorch's fused attention on cuda ({architecture})"


def _require_triton(device_type: str) -> None:
    if not _has_triton():
        raise UserError("attention: triton was asked for, but the package triton is not installed; ask for auto")
    if device_type != "cuda" and not interpreted():
        raise UserError(
            f"attention: triton was asked for on {device_type}, where it runs only in Triton's interpreter, for "
            "tests (TRITON_INTERPRET=1 in the environment); ask for auto"
        )


@functools.cache  # each call of the operator asks
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def require_implementation(name: str, *, also: str | None = None) -> None:
    """Raise UserError unless `name` is a key of IMPLEMENTATIONS; `also` is a name to offer beside these."""
    if name not in IMPLEMENTATIONS:
        names = ", ".join(([also] if also else []) + list(IMPLEMENTATIONS))
        raise UserError(f"attention implementation: found {name!r}, expected one of: {names}")


# A constant for `torch.compile`, which could not look for packages.
_choose_for_a_call = torch.compiler.assume_constant_result(choose_implementation)


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    implementation: str = "auto",
) -> Tensor:
    """`latent_attention_reference` (see there for shapes) by the implementation asked for, or chosen for "auto".

    Raises:
        UserError: the implementation does not exist, or cannot run on the device of `q_nope`.
    """
    chosen, _ = _choose_for_a_call(implementation, q_nope.device.type)
    return IMPLEMENTATIONS[chosen](q_nope, q_rope, k_nope, k_rope, v, softmax_scale=softmax_scale)
