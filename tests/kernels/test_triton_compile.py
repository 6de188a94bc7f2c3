"""What real compilers make of the kernels, ahead of time and without a GPU, each target in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
# The architecture's own instruction for matrix products: without it, a kernel runs at a fraction of the device.
MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
COMPILE = """
import json, sys
from attention_ablation.kernels import inspection
target, *shapes = sys.argv[1:]
for shape in map(json.loads, shapes):
    for launch in inspection.launches(target, **shape):
        print(json.dumps(inspection.compile_launch(launch, target)._asdict()))
print(inspection.SHARED_MEMORY[target])
"""


def start(target: str, shapes: list[dict], cache: Path) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(SOURCE), "TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, target, *map(json.dumps, shapes)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def check(
    process: subprocess.Popen,
    shapes: list[dict],
    matrix_instruction: str,
    at_least: int = 10,
    most_spilled: int = 0,
) -> None:
    *lines, shared_memory = process.communicate()[0].splitlines()
    assert process.returncode == 0
    kernels = [json.loads(line) for line in lines]
    assert [one["kernel"] for one in kernels] == [
        "forward_kernel",
        "query_gradient_kernel",
        "key_gradient_kernel",
    ] * len(shapes)
    for one in kernels:
        assert one["spilled"] <= most_spilled, one
        assert one["registers"] <= 255, one
        assert one["shared"] <= int(shared_memory), one
        assert "trap" not in one["instructions"], one
        assert one["instructions"].get(matrix_instruction, 0) >= at_least, one


def test_the_kernels_of_two_branches_do_not_compile_or_spill_on_an_h100(tmp_path):
    check(start("sm_90", [{"branches": 2}], tmp_path), [{"branches": 2}], MATRIX_INSTRUCTION["sm_90"])


def test_shapes_that_only_a_compiler_refuses(tmp_path):
    # Numbers that are 1 become constants of the kernel; odd head dims need masks and padding to what a dot takes.
    shapes = [
        {"branches": 1, "tokens": 1, "heads": 1, "dims": (4, 4)},
        {"branches": 3, "tokens": 65, "heads": 3, "dims": (33, 7)},
    ]
    check(start("sm_80", shapes, tmp_path), shapes, "mma.sync", at_least=1, most_spilled=32)


@pytest.mark.slow
def test_the_kernels_do_not_compile_or_spill_on_some_gpu(tmp_path):
    shapes = [{"branches": branches} for branches in (1, 2, 4)]
    processes = {target: start(target, shapes, tmp_path / target) for target in MATRIX_INSTRUCTION}
    for target, process in processes.items():
        check(process, shapes, MATRIX_INSTRUCTION[target])
