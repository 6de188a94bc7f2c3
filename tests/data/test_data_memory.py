"""A smaller form of benchmarks/tokenize_memory.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "tokenize_memory.py"


SLOW = [pytest.param(file_format, marks=pytest.mark.slow) for file_format in ("parquet", "txt")]


@pytest.mark.parametrize("file_format", ["jsonl", *SLOW])
def test_memory_grows_neither_with_the_corpus_nor_much_with_a_long_document(file_format):
    command = [sys.executable, str(BENCHMARK), "--json", "--megabytes", "60", "--shrink", "3", "--document", "10"]
    printed = subprocess.run([*command, "--format", file_format], capture_output=True, text=True, check=True).stdout
    peak, growth = (json.loads(line) for line in printed.splitlines())
    assert growth["ours"] < 1.1
    assert peak["ours"] < 250  # of which about 100 are the libraries and GPT-2's vocabulary
