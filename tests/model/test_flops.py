"""FLOP counts against the paper's sizes and against PyTorch's own counter."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from workflow.snakemake_runs import ROOT

from attention_ablation.model.flops import flops_per_token
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.study import load_study
from model.sizes import VARIANTS, random_model, random_tokens

# Worked out by hand from the paper's sizes: 6 N over 98.3 B tokens, and with causal attention over 2,048 tokens.
DENSE, WITH_ATTENTION = 1.694e21, {"MLA": 1.805e21, "GLA-2": 1.805e21, "MLRA-2": 1.917e21}


@pytest.mark.parametrize("variant", WITH_ATTENTION)
def test_the_papers_training_costs(variant):
    study = load_study([ROOT / "workflow" / "presets" / "paper.yaml"])
    count = flops_per_token(study.sizes_of(variant, "scaled"), study.model.context)
    assert count.dense * study.training.tokens == pytest.approx(DENSE, rel=5e-3)
    assert count.total * study.training.tokens == pytest.approx(WITH_ATTENTION[variant], rel=1e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_of_a_matrix_product_is_counted_once(variant):
    config = VARIANTS[variant]
    with torch.device("meta"):
        model = LanguageModel(config, random_model(config, attention="reference").scaling, attention="reference")
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    weights = sum(parameter.numel() for parameter in model.parameters()) - norms
    assert flops_per_token(config, 8).dense == 6 * weights


@pytest.mark.parametrize("variant", VARIANTS)
def test_pytorch_counts_the_same(variant):
    config, tokens = dataclasses.replace(VARIANTS[variant], layers=2), random_tokens(2, 8, seed=0)
    model = random_model(config, attention="reference")
    with FlopCounterMode(display=False) as counter:
        model(tokens).float().sum().backward()
    # The reference multiplies all 8 x 8 pairs of tokens, where (8 + 1) / 2 of 8 are seen, and the rope parts of
    # queries and keys, which all branches share, once.
    count = flops_per_token(config, 8)
    shared = 3 * config.layers * config.heads * (config.branches - 1) * 2 * 8 * config.rope_dim
    expected = tokens.numel() * (count.dense + count.attention * 16 / 9 - shared)
    assert counter.get_total_flops() == pytest.approx(expected)
