"""What the compiler makes of the Triton kernels: an ahead-of-time compile for a target, without a GPU.

Training does not import this module. Shapes: B batch, T tokens, H heads, J branches; Dn, Dr head dims.
"""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_ablation.errors import UserError
from attention_ablation.kernels import operator
from attention_ablation.kernels.tiles import tiles_for

# Bytes of shared memory that a program may have (CUDA C++ Programming Guide, table of compute capabilities).
SHARED_MEMORY = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448}
SHARED_MEMORY |= {"sm_120": 101_376}
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
INSTRUCTIONS = (*MATRIX_INSTRUCTIONS, "ldmatrix", "cp.async", "ex2.approx", "bar.sync", "trap")
TRITON_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


class Compiled(NamedTuple):
    """One kernel as compiled; registers a thread, shared memory in bytes, spilled bytes a thread."""

    kernel: str
    tile: str
    registers: int
    shared: int
    spilled: int
    instructions: dict[str, int]


def launches(
    target: str,
    *,
    branches: int,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (128, 64),
    tokens: int = 2048,
    heads: int = 24,
) -> list[Any]:
    """The three launches at a shape, by default the paper's (B 1), on tensors without memory."""
    from attention_ablation.kernels import triton_launch

    (Dn, Dr), J, B, T, H = dims, branches, 1, tokens, heads
    # Views as the model makes them: the query is split out of one matrix, keys and values alternate in another.
    q = torch.empty(B, T, H, Dn + Dr, dtype=dtype, device="meta")
    kv = torch.empty(J, B, T, H, 2, Dn, dtype=dtype, device="meta")
    k_rope, out = q.new_empty(B, T, Dr), q.new_empty(B, T, H, Dn)
    inputs: list[Tensor] = [q[..., :Dn], q[..., Dn:], kv[..., 0, :], k_rope, kv[..., 1, :]]
    lse = q.new_empty(J, B, H, T, dtype=torch.float32)
    d_k_rope_BHTD = q.new_empty(B, H, T, Dr, dtype=torch.float32)
    branch_out = q.new_empty(J, B, T, H, Dn)
    scale = (Dn + Dr) ** -0.5
    tiles = tiles_for(target, element_bytes=q.element_size(), nope_dim=Dn, rope_dim=Dr, branches=J)
    return [
        triton_launch.forward_launch(inputs, out, branch_out, lse, scale, tiles.forward),
        triton_launch.query_gradient_launch(
            inputs, out, branch_out, lse, lse, out, q[..., Dn:].contiguous(), scale, tiles.query_gradient
        ),
        triton_launch.key_gradient_launch(
            inputs, out, lse, lse, branch_out, d_k_rope_BHTD, branch_out, scale, tiles.key_gradient
        ),
    ]


def compile_launch(launch: Any, target: str) -> Compiled:
    """Compile the launch for `target` ("sm_90") as it would be compiled on such a GPU.

    Raises:
        UserError: in a process that interprets Triton.
    """
    if target not in SHARED_MEMORY:
        raise UserError(f"--target {target}: expected one of {', '.join(SHARED_MEMORY)}")
    if operator.interpreted():
        raise UserError("TRITON_INTERPRET=1 is in the environment: unset it to compile")
    if importlib.util.find_spec("triton") is None:
        raise UserError("the package triton is not installed")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for name in launch.kernel.arg_names:
        # As Triton specialises at a launch: 1 is a constant, pointers and integers may be multiples of 16.
        value = launch.arguments.get(name)
        if name in launch.constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            continue
        if isinstance(value, Tensor):
            signature[name] = TRITON_TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned[(launch.kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )
    registers, spilled = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    counts = {name: len(re.findall(rf"\b{re.escape(name)}\b", ptx)) for name in INSTRUCTIONS}
    return Compiled(
        kernel=launch.kernel.__name__,
        tile=f"{launch.constants['BLOCK_Q']}x{launch.constants['BLOCK_K']}, {launch.warps} warps",
        registers=registers,
        shared=compiled.metadata.shared,
        spilled=spilled,
        instructions={name: count for name, count in counts.items() if count},
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread: registers that are spilled go to local memory, on the stack."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump said no resources: {said}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def report(target: str, *, branches: int) -> str:
    """Lines for a reader: each kernel at the paper's head dims in bfloat16, for `target`."""
    lines = []
    for launch in launches(target, branches=branches):
        one = compile_launch(launch, target)
        mix = ", ".join(f"{name} {count}" for name, count in one.instructions.items())
        lines.append(
            f"{one.kernel:<22} J {branches}  {one.tile:<16} {one.registers:>3} registers, "
            f"{one.shared:>7,} bytes shared, {one.spilled} spilled; {mix}"
        )
    return "\n".join(lines)
