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
target, *branches = sys.argv[1:]
for J in branches:
    for launch in inspection.paper_launches(target, branches=int(J)):
        print(json.dumps(inspection.compile_launch(launch, target)._asdict()))
print(inspection.SHARED_MEMORY[target])
"""


def start(target: str, branches: tuple[int, ...], cache: Path) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(SOURCE), "TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, target, *map(str, branches)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def check(process: subprocess.Popen, target: str, branches: tuple[int, ...]) -> None:
    *lines, shared_memory = process.communicate()[0].splitlines()
    assert process.returncode == 0
    kernels = [json.loads(line) for line in lines]
    assert [one["kernel"] for one in kernels] == [
        "forward_kernel",
        "query_gradient_kernel",
        "key_gradient_kernel",
    ] * len(branches)
    for one in kernels:
        assert one["spilled"] == 0, one
        assert one["registers"] <= 255, one
        assert one["shared"] <= int(shared_memory), one
        assert "trap" not in one["instructions"], one
        assert one["instructions"].get(MATRIX_INSTRUCTION[target], 0) >= 10, one


def test_the_kernels_of_two_branches_do_not_compile_or_spill_on_an_h100(tmp_path):
    check(start("sm_90", (2,), tmp_path), "sm_90", (2,))


@pytest.mark.slow
def test_the_kernels_do_not_compile_or_spill_on_some_gpu(tmp_path):
    branches = (1, 2, 4)
    processes = {target: start(target, branches, tmp_path / target) for target in MATRIX_INSTRUCTION}
    for target, process in processes.items():
        check(process, target, branches)
