"""The yardstick of utilisation."""

import pytest
import torch

from attention_ablation.training import hardware


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_cpu_is_measured_once(precision):
    peak, source = hardware.peak_flops("cpu", precision)
    assert source.startswith(f"measured here on {torch.get_num_threads()} thread")
    assert 1e8 < peak < 1e14
    assert hardware.peak_flops("cpu", precision) == (peak, source)  # measured once


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA GH200 480GB", "bfloat16", 990e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
    ],
)
def test_a_known_gpu_is_read_from_its_data_sheet(monkeypatch, name, precision, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    peak, source = hardware.peak_flops("cuda", precision)
    assert peak == expected
    assert source.startswith("data sheet of NVIDIA ")
