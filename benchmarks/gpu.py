"""Are the Triton kernels right and fast on this GPU? One command from a checkout, under five minutes:

    python benchmarks/gpu.py            # a table
    python benchmarks/gpu.py --json     # one object a line: name, ours, baseline, unit, ratio
    python benchmarks/gpu.py --tiny     # no GPU: tiny shapes in Triton's interpreter, to test this script

It wants torch (2.11 or later) and triton, nothing else; flash-attn is measured where it is installed. A ratio over 1
means that ours is better. First the largest errors in bfloat16 against the reference in float64, next to those of
PyTorch's SDPA; then, at the paper's shape, time and memory against the fastest of SDPA's backends, with values padded
to the query's width and not; then a training step of one layer of the paper's model. Where a device comes out right
and faster, add it to MEASURED in `kernels/latent_attention.py`.

Shapes: B batch, T tokens, H heads, J branches; Dn nope head dim (keys and values), Dr rope head dim.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

# Forward TFLOP/s of flash-attention 4 on an H100, heads of 192 and 128, 16 heads, causal, as its authors published.
PUBLISHED = {2048: 422.0, 8192: 611.0}


class Shape(NamedTuple):
    """What is measured; `repeats` are timed after as many to warm up."""

    tokens: tuple[int, ...]
    branches: tuple[int, ...]
    checked_tokens: int
    heads: int
    nope_dim: int
    rope_dim: int
    width: int
    mlp_width: int
    matmul: int
    repeats: int


PAPER = Shape((2048, 8192), (1, 2, 4), 1111, 24, 128, 64, 3072, 10048, 8192, 10)
TINY = Shape((20,), (1, 2), 20, 2, 16, 8, 32, 40, 64, 1)


class Line(NamedTuple):
    """One result; `ratio` over 1 means that ours is better."""

    name: str
    ours: float
    baseline: float
    unit: str
    ratio: float


def main() -> int:
    options = _parser().parse_args()
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print("error: no GPU here; --tiny runs this script in Triton's interpreter", file=sys.stderr)
        return 1
    shape = TINY if options.tiny else PAPER
    device = "cpu" if options.tiny else "cuda"
    dtype = torch.float32 if options.tiny else torch.bfloat16  # the interpreter's bfloat16 products are wrong
    name = "interpreter" if options.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}", file=sys.stderr)
    for line in measure(shape, device, dtype):
        if options.json:
            print(json.dumps(line._asdict()), flush=True)
        else:
            print(
                f"{line.name:<58} {line.ours:>10.4g} {line.baseline:>10.4g} {line.unit:<8} {line.ratio:.2f}",
                flush=True,
            )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Correctness and speed of the Triton kernels on this GPU.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, in Triton's interpreter")
    return parser


def measure(shape: Shape, device: str, dtype: Any) -> Iterator[Line]:
    """All results, in the order in which they are had."""
    for branches in shape.branches:
        yield from errors(shape, branches, device, dtype)
    peak = matmul_peak(shape, device, dtype)
    for tokens in shape.tokens:
        for branches in shape.branches:
            yield from speed(shape, tokens, branches, device, dtype, peak)
    for branches in shape.branches:
        yield layer_step(shape, branches, device)


# --- inputs and paths -----------------------------------------------------------------------------------------


def inputs_of(shape: Shape, J: int, T: int, device: str, dtype: Any) -> list[Any]:
    """Random inputs, views as the model makes them."""
    import torch

    B, H, Dn, Dr = 1, shape.heads, shape.nope_dim, shape.rope_dim
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    q, kv, k_rope = normal(B, T, H, Dn + Dr), normal(J, B, T, H, 2, Dn), normal(B, T, Dr)
    return [x.requires_grad_() for x in (q[..., :Dn], q[..., Dn:], kv[..., 0, :], k_rope, kv[..., 1, :])]


def ours(*inputs: Any, softmax_scale: float) -> Any:
    """The Triton kernels."""
    from attention_ablation.kernels.latent_attention import latent_attention

    return latent_attention(*inputs, softmax_scale=softmax_scale, implementation="triton")


def unpadded_sdpa(q_nope: Any, q_rope: Any, k_nope: Any, k_rope: Any, v: Any, *, softmax_scale: float) -> Any:
    """As `latent_attention_sdpa`, but for the values, which keep their width."""
    import torch

    q, k, v_JBHTD = concatenated(q_nope, q_rope, k_nope, k_rope, v)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v_JBHTD, is_causal=True, scale=softmax_scale)
    return out.transpose(1, 2).unflatten(0, (len(v), -1)).sum(0)


def flash_attention(q_nope: Any, q_rope: Any, k_nope: Any, k_rope: Any, v: Any, *, softmax_scale: float) -> Any:
    """The package flash-attn, values padded to the query's width."""
    import torch
    from flash_attn import flash_attn_func

    q, k, v_JBHTD = (x.transpose(1, 2) for x in concatenated(q_nope, q_rope, k_nope, k_rope, v))
    v_padded = torch.nn.functional.pad(v_JBHTD, (0, q_rope.shape[-1]))
    out = flash_attn_func(q, k, v_padded, softmax_scale=softmax_scale, causal=True)
    return out.unflatten(0, (len(v), -1))[..., : v.shape[-1]].sum(0)


def concatenated(q_nope: Any, q_rope: Any, k_nope: Any, k_rope: Any, v: Any) -> list[Any]:
    """Query, key (JB, H, T, Dn + Dr) and value (JB, H, T, Dn) of all branches."""
    import torch

    J, B, T, H, Dn = k_nope.shape
    Dr = q_rope.shape[-1]
    q = torch.cat([q_nope.expand(J, B, T, H, Dn), q_rope.expand(J, B, T, H, Dr)], dim=-1)
    k = torch.cat([k_nope, k_rope[:, :, None].expand(J, B, T, H, Dr)], dim=-1)
    return [x.flatten(0, 1).transpose(1, 2) for x in (q, k, v)]


def baselines(device: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """SDPA on each backend, with padded and unpadded values, and flash-attn where it is."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from attention_ablation.kernels.sdpa import latent_attention_sdpa

    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for backend in backends if device == "cuda" else [SDPBackend.MATH]:
        for padding, function in (("padded", latent_attention_sdpa), ("unpadded", unpadded_sdpa)):

            def on_backend(*inputs: Any, _function: Any = function, _backend: Any = backend, **settings: Any) -> Any:
                with sdpa_kernel(_backend):
                    return _function(*inputs, **settings)

            yield f"SDPA {backend.name.lower()} {padding}", on_backend
    if device == "cuda" and importlib.util.find_spec("flash_attn"):
        yield "flash-attn", flash_attention


# --- measurements ---------------------------------------------------------------------------------------------


def errors(shape: Shape, J: int, device: str, dtype: Any) -> Iterator[Line]:
    """Largest error of the output and of each gradient, over the tensor's largest entry; the baseline is SDPA's."""
    import torch

    from attention_ablation.kernels.reference import latent_attention_reference
    from attention_ablation.kernels.sdpa import latent_attention_sdpa

    inputs = inputs_of(shape, J, shape.checked_tokens, device, dtype)
    scale = (shape.nope_dim + shape.rope_dim) ** -0.5
    d_out = torch.randn(inputs[0].shape, generator=torch.Generator(device).manual_seed(1), device=device, dtype=dtype)

    def results(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
        output = function(*inputs, softmax_scale=scale)
        return [output.detach(), *torch.autograd.grad(output, inputs, d_out.to(output.dtype))]

    exact = results(latent_attention_reference, [x.detach().double().requires_grad_() for x in inputs])
    found, theirs = results(ours, inputs), results(latent_attention_sdpa, inputs)
    for name, a, b, c in zip(
        ("output", "q_nope", "q_rope", "k_nope", "k_rope", "v"), found, theirs, exact, strict=True
    ):
        own, other = (float((x.double() - c).abs().max() / c.abs().max()) for x in (a, b))
        if own > 0.03:
            raise SystemExit(
                f"error: {name}, J {J}: off by {own:.3g} of its largest entry: the kernels are wrong here"
            )
        yield Line(f"error of {name}, J {J}, T {shape.checked_tokens}", own, other, "of max", other / max(own, 1e-30))


def matmul_peak(shape: Shape, device: str, dtype: Any) -> float:
    """TFLOP/s of a large square matrix product: what the device can do."""
    import torch

    a, b = (torch.randn(shape.matmul, shape.matmul, device=device, dtype=dtype) for _ in range(2))
    return 2 * shape.matmul**3 / seconds(lambda: a @ b, shape.repeats, device) / 1e12


def speed(shape: Shape, T: int, J: int, device: str, dtype: Any, peak: float) -> Iterator[Line]:
    """Time, TFLOP/s and memory, forward and forward with backward."""
    import torch

    inputs = inputs_of(shape, J, T, device, dtype)
    scale = (shape.nope_dim + shape.rope_dim) ** -0.5
    d_out = torch.randn_like(inputs[0])
    D, Dn = shape.nope_dim + shape.rope_dim, shape.nope_dim
    pairs = J * shape.heads * T * T  # twice the causal half: two operations a product
    for part, work in (("forward", pairs * (D + Dn)), ("forward+backward", pairs * (D + Dn + 3 * D + 2 * Dn))):

        def call(function: Callable[..., Any], part: str = part) -> None:
            output = function(*inputs, softmax_scale=scale)
            if part != "forward":
                torch.autograd.grad(output, inputs, d_out)

        rivals = {}
        for name, function in baselines(device):
            try:
                rivals[name] = cost(lambda f=function: call(f), shape.repeats, device)
            except RuntimeError as refusal:  # a backend that does not take these head dims, or too little memory
                print(f"{name}, T {T}, J {J}: {str(refusal).splitlines()[0]}", file=sys.stderr)
        best = min(rivals, key=lambda name: rivals[name][0])
        time_ours, memory_ours = cost(lambda: call(ours), shape.repeats, device)
        time_best, memory_best = rivals[best]
        label = f"{part}, T {T}, J {J}"
        yield Line(f"{label}, {best}", time_ours * 1e3, time_best * 1e3, "ms", time_best / time_ours)
        rate = work / time_ours / 1e12
        yield Line(f"{label}, of the matmul peak", rate, peak, "TFLOP/s", rate / peak)
        if part == "forward" and J == 1 and T in PUBLISHED:
            yield Line(f"{label}, flash-attention 4 on an H100", rate, PUBLISHED[T], "TFLOP/s", rate / PUBLISHED[T])
        if device == "cuda":
            yield Line(f"{label}, memory, {best}", memory_ours, memory_best, "MB", memory_best / memory_ours)


def layer_step(shape: Shape, J: int, device: str) -> Line:
    """Forward and backward of one layer of the paper's model under bfloat16 autocast, SDPA as the baseline."""
    import torch

    from attention_ablation.model.attention import ScalingTensors
    from attention_ablation.model.config import ModelConfig
    from attention_ablation.model.rotary import rotation_tables
    from attention_ablation.model.transformer import Block

    G = 2 if J < 4 else 1  # GLA-2, MLRA-2, MLRA-4
    config = ModelConfig(
        vocabulary_size=1,
        layers=1,
        width=shape.width,
        heads=shape.heads,
        nope_dim=shape.nope_dim,
        rope_dim=shape.rope_dim,
        query_rank=shape.width // 3,
        kv_rank=shape.width // 6 // 4 * 4,
        groups=G,
        branches=J,
        mlp_width=shape.mlp_width,
    )
    T = shape.tokens[0]
    x = torch.randn(1, T, config.width, device=device)
    rotation = rotation_tables(T, config.rope_dim, torch.device(device))
    scaling = ScalingTensors(*torch.ones(3))
    times = {}
    for path in ("triton", "sdpa"):
        block = Block(config, attention=path).to(device)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)

        def step(block: Any = block) -> None:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = block(x, rotation, scaling).float().square().mean()
            loss.backward()

        times[path] = seconds(step, shape.repeats, device)
    name = f"step of one layer, T {T}, groups {G}, branches {J}, sdpa"
    return Line(name, times["triton"] * 1e3, times["sdpa"] * 1e3, "ms", times["sdpa"] / times["triton"])


def cost(call: Callable[[], Any], repeats: int, device: str) -> tuple[float, float]:
    """(seconds, MB at the peak beyond what was there before) of a call."""
    import torch

    taken = seconds(call, repeats, device)
    if device != "cuda":
        return taken, float("nan")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return taken, (torch.cuda.max_memory_allocated() - before) / 1e6


def seconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Median of `repeats` calls, after as many to warm up (the first compiles)."""
    import torch

    if device != "cuda":
        return timed(call)
    for _ in range(repeats):
        call()
    taken = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call on the CPU."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
