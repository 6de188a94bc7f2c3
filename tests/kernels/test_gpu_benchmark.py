"""The GPU script runs from a checkout, here at a tiny shape in the interpreter."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
# What the machine with the GPU need not have.
WITHOUT = ["deepspeed", "snakemake", "pyarrow", "duckdb", "altair", "pydantic", "safetensors", "tokenizers", "grimp"]


def test_the_gpu_script_breaks_or_wants_more_than_torch_and_triton(tmp_path):
    code = (
        f"import runpy, sys; sys.modules |= dict.fromkeys({WITHOUT!r})\n"
        f"sys.argv = ['gpu.py', '--tiny', '--json']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    assert all(set(line) == {"name", "ours", "baseline", "unit", "ratio"} for line in lines)
    errors = {line["name"]: line["ours"] for line in lines if line["name"].startswith("error of ")}
    assert len(errors) == 12
    assert max(errors.values()) < 2e-6
    for start in ("forward, T 20, J 2", "forward+backward, T 20, J 1", "step of one layer, T 20"):
        assert any(line["name"].startswith(start) for line in lines), start


def test_without_a_gpu_the_script_says_so():
    import torch

    if torch.cuda.is_available():
        return
    said = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert said.returncode == 1
    assert said.stderr.strip().splitlines()[-1].startswith("error: no GPU here")
