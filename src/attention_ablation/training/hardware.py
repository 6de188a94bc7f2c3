"""What a device can do at most: the yardstick of model FLOP utilisation."""

import functools
import time
from typing import Literal

import torch

TERA = 1e12
# Dense figures of NVIDIA's data sheets, FLOP/s: bfloat16 on tensor cores, float32 without TF32 (PyTorch's default).
# The first name that the device's name contains counts, so the longer ones come first.
DATA_SHEETS: dict[str, tuple[float, float]] = {
    "GB200": (2500 * TERA, 80 * TERA),
    "B200": (2250 * TERA, 75 * TERA),
    "GH200": (990 * TERA, 67 * TERA),
    "H200": (989 * TERA, 67 * TERA),
    "H100 PCIe": (756 * TERA, 51 * TERA),
    "H100 NVL": (835 * TERA, 60 * TERA),
    "H100": (989 * TERA, 67 * TERA),
    "A100": (312 * TERA, 19.5 * TERA),
    "A40": (149.7 * TERA, 37.4 * TERA),
    "A30": (165 * TERA, 10.3 * TERA),
    "A10": (125 * TERA, 31.2 * TERA),
    "L40S": (362 * TERA, 91.6 * TERA),
    "L40": (181 * TERA, 90.5 * TERA),
    "L4": (121 * TERA, 30.3 * TERA),
}
SIDE, SECONDS = 2_048, 0.5  # of the measured product's square matrices, and how long it is repeated


def peak_flops(device: str, precision: Literal["float32", "bfloat16"]) -> tuple[float, str]:
    """FLOP/s of matrix products that this process's device does at most, and where the number is from."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        for known, figures in DATA_SHEETS.items():
            if known in name:
                return figures[precision == "float32"], f"data sheet of NVIDIA {known}, dense {precision}"
    return _measured(device, precision, torch.get_num_threads())


@functools.cache  # by all that decides it
def _measured(device: str, precision: str, threads: int) -> tuple[float, str]:
    """The fastest of the products of half a second, after one to warm up."""
    side = SIDE if precision == "float32" or device == "cuda" else SIDE // 4  # bfloat16 is slow on older CPUs
    matrix = torch.ones(side, side, device=device, dtype=getattr(torch, precision))
    best, started = float("inf"), time.perf_counter()
    torch.mm(matrix, matrix)
    while best == float("inf") or time.perf_counter() - started < SECONDS:
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    where = "here" if device == "cuda" else f"here on {threads} thread{'s' if threads > 1 else ''}"
    return 2 * side**3 / best, f"measured {where}: {precision} products of {side:,} x {side:,}"
