"""Triton's interpreter for the tests of this folder.

Triton reads TRITON_INTERPRET where it decorates, its own language included: so the kernels are imported here, before
any test can have imported Triton, and are the interpreter's in this process for good. Whether the operator launches
them for CPU tensors is decided at each call: only in tests that take the fixture `interpreter`.
"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
from attention_ablation.kernels import triton_kernels, triton_launch

del os.environ["TRITON_INTERPRET"]
if type(triton_kernels.forward_kernel).__name__ != "InterpretedFunction":
    raise RuntimeError("Triton was imported before tests/kernels/conftest.py, without TRITON_INTERPRET=1")


@pytest.fixture
def interpreter(monkeypatch):
    """The Triton kernels for CPU tensors."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def launched(monkeypatch, interpreter):
    """Names of the kernels that were launched, in order."""
    names = []
    run = triton_launch.Launch.run

    def recorded(launch):
        names.append(launch.kernel.fn.__name__)
        run(launch)

    monkeypatch.setattr(triton_launch.Launch, "run", recorded)
    return names
