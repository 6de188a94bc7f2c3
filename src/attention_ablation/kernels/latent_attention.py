"""The latent attention operator, and the one place where its implementation is chosen."""

from collections.abc import Callable

from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels.reference import latent_attention_reference
from attention_ablation.kernels.sdpa import latent_attention_sdpa

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "sdpa": latent_attention_sdpa,
    "reference": latent_attention_reference,
}


def choose_implementation(requested: str, device_type: str) -> tuple[str, str]:
    """Return (implementation, reason) for `requested`: "auto" or a key of IMPLEMENTATIONS.

    Args:
        requested: the value of `execution.attention`.
        device_type: "cpu" or "cuda", where the model will run.

    Raises:
        UserError: when there is no such implementation.
    """
    if requested == "auto":
        return "sdpa", f"auto: PyTorch's fused attention is the fastest path on {device_type}"
    require_implementation(requested, also="auto")
    return requested, "asked for"


def require_implementation(name: str, *, also: str | None = None) -> None:
    """Raise UserError unless `name` is a key of IMPLEMENTATIONS; `also` is a name to offer beside these."""
    if name not in IMPLEMENTATIONS:
        names = ", ".join(([also] if also else []) + list(IMPLEMENTATIONS))
        raise UserError(f"attention implementation: found {name!r}, expected one of: {names}")


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    implementation: str,
) -> Tensor:
    """`latent_attention_reference` (see there for shapes) by the implementation that was chosen."""
    require_implementation(implementation)
    return IMPLEMENTATIONS[implementation](q_nope, q_rope, k_nope, k_rope, v, softmax_scale=softmax_scale)
