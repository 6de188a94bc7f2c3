"""Small models for tests."""

import dataclasses

import torch

from attention_ablation.model.config import ModelConfig, Scaling
from attention_ablation.model.transformer import LanguageModel

SCALED = Scaling(query=True, key_value=True, output=True)
UNSCALED = Scaling(query=False, key_value=False, output=False)

BASE = ModelConfig(
    vocabulary_size=50,
    layers=2,
    width=32,
    heads=4,
    nope_dim=8,
    rope_dim=4,
    query_rank=16,
    kv_rank=16,
    groups=1,
    branches=1,
    mlp_width=40,
)
VARIANTS = {
    name: dataclasses.replace(BASE, groups=groups, branches=branches)
    for name, groups, branches in (
        ("MLA", 1, 1),
        ("GLA-2", 2, 1),
        ("GLA-4", 4, 1),
        ("MLRA-2", 2, 2),
        ("MLRA-4", 1, 4),
    )
}


def random_model(config: ModelConfig, scaling: Scaling = SCALED, *, attention: str = "sdpa") -> LanguageModel:
    """A model whose every parameter is random, output matrices and norm weights too: so all count."""
    model = LanguageModel(config, scaling, attention=attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def random_tokens(B: int, T: int, *, seed: int = 0, vocabulary: int = BASE.vocabulary_size) -> torch.Tensor:
    return torch.randint(0, vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))
