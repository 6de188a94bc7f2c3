"""Launches of the Triton kernels: which arguments, how many programs, what is allocated.

Shapes: B batch, T tokens, H heads, J branches; Dn nope head dim (keys and values), Dr rope head dim.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels import triton_kernels
from attention_ablation.kernels.tiles import Tile, Tiles, padded, tiles_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 128
LARGEST_TILE = 128  # tokens


class Launch(NamedTuple):
    """One kernel with all that it is called with; `ablation kernels` compiles exactly this without a GPU."""

    kernel: Any
    programs: int
    arguments: dict[str, Tensor | int | float]
    constants: dict[str, int]
    warps: int
    stages: int

    def run(self) -> None:
        """Launch on the device of the tensors; in Triton's interpreter if they are on the CPU."""
        if self.programs == 0:
            return
        device = next(x.device for x in self.arguments.values() if isinstance(x, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[(self.programs,)](
                **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
            )


def architecture_of(device: torch.device) -> str:
    """ "sm_90" and the like; "interpreter" for the CPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def run_forward(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`forward_with_statistics` of the reference, in one kernel."""
    inputs = [_addressable(x) for x in (q_nope, q_rope, k_nope, k_rope, v)]
    _check(inputs)
    J, B, T, H, Dn = k_nope.shape
    out = q_nope.new_empty(B, T, H, Dn)
    branch_out = q_nope.new_empty(J if J > 1 else 0, B, T, H, Dn)
    lse = q_nope.new_empty(J, B, H, T, dtype=torch.float32)
    tiles = _tiles_of(inputs, architecture_of(q_nope.device))
    forward_launch(inputs, out, branch_out, lse, softmax_scale, tiles.forward).run()
    return out, branch_out, lse


def run_backward(
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
    """`backward_from_statistics` of the reference, in two kernels and a sum over the heads."""
    inputs = [_addressable(x) for x in (q_nope, q_rope, k_nope, k_rope, v)]
    d_out = _addressable(d_out)
    J, B, T, H, Dn = k_nope.shape
    Dr = q_rope.shape[-1]
    delta = torch.empty_like(lse)
    d_q_nope, d_q_rope = q_nope.new_empty(B, T, H, Dn), q_nope.new_empty(B, T, H, Dr)
    d_k_nope, d_v = v.new_empty(J, B, T, H, Dn), v.new_empty(J, B, T, H, Dn)
    # One a head and not one a (head, branch): 4 * Dr bytes a token and head, as much as half of dv at the paper's
    # two branches in bfloat16. Added up below by torch's own sum, whose order is fixed; atomics would have none.
    d_k_rope_BHTD = q_nope.new_empty(B, H, T, Dr, dtype=torch.float32)
    tiles = _tiles_of(inputs, architecture_of(q_nope.device))
    branches = branch_out if J > 1 else out
    query_gradient_launch(
        inputs, d_out, branches, lse, delta, d_q_nope, d_q_rope, softmax_scale, tiles.query_gradient
    ).run()
    key_gradient_launch(
        inputs, d_out, lse, delta, d_k_nope, d_k_rope_BHTD, d_v, softmax_scale, tiles.key_gradient
    ).run()
    return d_q_nope, d_q_rope, d_k_nope, d_k_rope_BHTD.sum(1).to(k_rope.dtype), d_v


def forward_launch(
    inputs: list[Tensor], out: Tensor, branch_out: Tensor, lse: Tensor, softmax_scale: float, tile: Tile
) -> Launch:
    """`inputs` are q_nope, q_rope, k_nope, k_rope and v; the other tensors are written."""
    tensors = {"out": out, "branch_out": branch_out, "lse": lse}
    return _launch(triton_kernels.forward_kernel, inputs, tensors, {}, softmax_scale, tile, per=tile.queries)


def query_gradient_launch(
    inputs: list[Tensor],
    d_out: Tensor,
    branch_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    d_q_nope: Tensor,
    d_q_rope: Tensor,
    softmax_scale: float,
    tile: Tile,
) -> Launch:
    """Writes `delta`, `d_q_nope` and `d_q_rope`; `branch_out` is the output itself where there is one branch."""
    tensors = {"branch_out": branch_out, "lse": lse, "delta": delta, "d_q_nope": d_q_nope, "d_q_rope": d_q_rope}
    return _launch(
        triton_kernels.query_gradient_kernel, inputs, tensors, {"d_out": d_out}, softmax_scale, tile, per=tile.queries
    )


def key_gradient_launch(
    inputs: list[Tensor],
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    d_k_nope: Tensor,
    d_k_rope_BHTD: Tensor,
    d_v: Tensor,
    softmax_scale: float,
    tile: Tile,
) -> Launch:
    """Reads `delta`, which the query's kernel wrote; writes `d_k_nope`, `d_k_rope_BHTD` and `d_v`."""
    tensors = {"lse": lse, "delta": delta, "d_k_nope": d_k_nope, "d_k_rope": d_k_rope_BHTD, "d_v": d_v}
    return _launch(
        triton_kernels.key_gradient_kernel, inputs, tensors, {"d_out": d_out}, softmax_scale, tile, per=tile.keys
    )


def _launch(
    kernel: Any,
    inputs: list[Tensor],
    contiguous: dict[str, Tensor],
    strided: dict[str, Tensor],
    softmax_scale: float,
    tile: Tile,
    *,
    per: int,
) -> Launch:
    """The launch of `kernel` with one program a head and `per` tokens."""
    names = ("q_nope", "q_rope", "k_nope", "k_rope", "v")
    strided = dict(zip(names, inputs, strict=True)) | strided
    J, B, T, H, Dn = strided["v"].shape
    Dr = strided["q_rope"].shape[-1]
    letters = {"k_nope": "jbth", "v": "jbth", "k_rope": "bt"}
    strides = {
        f"{name}_{letter}": stride
        for name, x in strided.items()
        for letter, stride in zip(letters.get(name, "bth"), x.stride(), strict=False)
    }
    return Launch(
        kernel=kernel,
        programs=-(-T // per) * B * H,
        arguments={**strided, **contiguous, "scale": softmax_scale, "B": B, "T": T, "H": H, **strides},
        constants={
            "J": J,
            "DN": Dn,
            "DR": Dr,
            "BLOCK_DN": padded(Dn),
            "BLOCK_DR": padded(Dr),
            "BLOCK_Q": tile.queries,
            "BLOCK_K": tile.keys,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def _tiles_of(inputs: list[Tensor], architecture: str) -> Tiles:
    q_nope, q_rope, k_nope, _, _ = inputs
    return tiles_for(
        architecture,
        element_bytes=q_nope.element_size(),
        nope_dim=q_nope.shape[-1],
        rope_dim=q_rope.shape[-1],
        branches=k_nope.shape[0],
    )


def _addressable(x: Tensor) -> Tensor:
    """`x` (B, T, ...) or (J, B, T, H, Dn), copied only where the kernels cannot address it.

    They want a last stride of 1, and offsets within a tile that 32 bits hold.
    """
    token_stride = x.stride(2 if x.dim() == 5 else 1)
    return x if x.stride(-1) == 1 and token_stride * LARGEST_TILE < 2**31 else x.contiguous()


def _check(inputs: list[Tensor]) -> None:
    """Raise UserError for what the kernels do not take."""
    q_nope, q_rope, k_nope, _, _ = inputs
    J, B, T, H, Dn = k_nope.shape
    Dr = q_rope.shape[-1]
    expected = [(B, T, H, Dn), (B, T, H, Dr), (J, B, T, H, Dn), (B, T, Dr), (J, B, T, H, Dn)]
    found = [tuple(x.shape) for x in inputs]
    if found != expected:
        raise UserError(f"latent attention: found shapes {found}, expected {expected}")
    if q_nope.dtype not in DTYPES or {x.dtype for x in inputs} != {q_nope.dtype}:
        raise UserError(
            f"latent attention in Triton: found {[str(x.dtype) for x in inputs]}, expected one type for all of "
            f"{', '.join(map(str, DTYPES))}"
        )
    if q_nope.dtype == torch.bfloat16 and q_nope.device.type == "cpu":
        # Triton 3.7's interpreter computes bfloat16 dots wrongly without a word: 8e8 where -2 was right.
        raise UserError("latent attention in Triton's interpreter: bfloat16 is wrong there, ask for float32 or sdpa")
    if max(Dn, Dr) > LARGEST_HEAD_DIM:
        raise UserError(f"latent attention in Triton: found head dims {Dn} and {Dr}, 128 is the largest")
