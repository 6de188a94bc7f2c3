"""Initial weights: a function of seed, parameter name and shape, and of nothing else.

So they are equal for both arms of a pair, for all devices, world sizes and orders of construction.
"""

import hashlib

import torch
from torch import nn

ZERO = ("attention.output.weight", "mlp.down.weight")


def initial_value(name: str, shape: torch.Size, *, seed: int, std: float) -> torch.Tensor:
    """The initial value of the parameter `name` of a LanguageModel, float32 on the CPU.

    Norm weights are 1, the two matrices that write into the residual stream are 0, all others N(0, std).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, device="cpu")
    if name.endswith(ZERO):
        return torch.zeros(shape, device="cpu")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * std


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, std: float) -> None:
    """Fill every parameter of a LanguageModel by `initial_value`, in place."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, seed=seed, std=std))
