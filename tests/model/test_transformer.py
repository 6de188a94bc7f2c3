"""The language model: its size, its scaling, and what may influence what."""

import csv
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_ablation.errors import UserError
from attention_ablation.model.attention import LatentAttention, ScalingTensors
from attention_ablation.model.config import ModelConfig, Scaling, scaling_factors
from attention_ablation.model.initialization import initialize
from attention_ablation.model.rotary import rotation_tables
from attention_ablation.model.transformer import LanguageModel
from model.sizes import SCALED, UNSCALED, VARIANTS, random_model, random_tokens

GROUPS_AND_BRANCHES = {"MLA": (1, 1), "GLA-2": (2, 1), "GLA-4": (4, 1), "MLRA-2": (2, 2), "MLRA-4": (1, 4)}

with (Path(__file__).parent / "parameter_counts.csv").open() as file:
    PAPER = {row["variant"]: {k: int(v) for k, v in row.items() if k != "variant"} for row in csv.DictReader(file)}


def paper_config(variant: str) -> ModelConfig:
    row = PAPER[variant]
    groups, branches = GROUPS_AND_BRANCHES[variant]
    return ModelConfig(
        vocabulary_size=row["vocab_size"],
        layers=row["n_layer"],
        width=row["d_model"],
        heads=row["n_head"],
        nope_dim=row["nope_head_dim"],
        rope_dim=row["rope_head_dim"],
        query_rank=row["q_latent_rank"],
        kv_rank=row["kv_latent_rank"],
        groups=groups,
        branches=branches,
        mlp_width=row["mlp_width"],
    )


@pytest.mark.parametrize("variant", sorted(PAPER))
def test_parameter_count_departs_from_the_papers(variant: str) -> None:
    with torch.device("meta"):
        model = LanguageModel(paper_config(variant), SCALED, attention="sdpa")
    assert sum(parameter.numel() for parameter in model.parameters()) == PAPER[variant]["parameters"]


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("MLA", (1.4142, 2.4495, 1.0)),
        ("GLA-2", (1.7321, 3.4641, 1.0)),
        ("MLRA-2", (1.7321, 4.8990, 0.7071)),
        ("MLRA-4", (1.7321, 4.8990, 0.5)),
    ],
)
def test_scaling_factors_depart_from_the_worked_example(variant: str, expected: tuple[float, float, float]) -> None:
    config = paper_config(variant)
    assert scaling_factors(config, SCALED) == pytest.approx(expected, abs=5e-5)
    assert scaling_factors(config, UNSCALED) == (1.0, 1.0, 1.0)
    with torch.device("meta"):
        model = LanguageModel(config, SCALED, attention="sdpa")
    buffers = [model.alpha_query.item(), model.alpha_key_value.item(), model.alpha_output.item()]
    assert buffers == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_arms_differ_in_more_than_the_alphas(variant: str) -> None:
    config = VARIANTS[variant]
    scaled, unscaled = random_model(config, SCALED), random_model(config, UNSCALED)
    tokens = random_tokens(2, 11)
    assert not torch.allclose(scaled(tokens), unscaled(tokens), atol=1e-3)
    alpha_q = math.sqrt(config.width / config.query_rank)
    alpha_kv = math.sqrt(config.width * config.groups * config.branches / config.kv_rank)
    with torch.no_grad():
        for block in unscaled.blocks:
            block.attention.query_norm.weight *= alpha_q
            block.attention.latent_norm.weight *= alpha_kv
            block.attention.output.weight /= math.sqrt(config.branches)
    torch.testing.assert_close(unscaled(tokens), scaled(tokens), rtol=1e-4, atol=1e-4)


def test_one_factor_of_the_scaling_switches_another() -> None:
    config, tokens = VARIANTS["MLRA-2"], random_tokens(1, 7)
    arms = [Scaling(query=q, key_value=k, output=o) for q in (0, 1) for k in (0, 1) for o in (0, 1)]
    logits = [random_model(config, arm)(tokens) for arm in arms]
    for i, a in enumerate(logits):
        for b in logits[:i]:
            assert not torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_arms_differ_before_the_first_update(variant: str) -> None:
    tokens = random_tokens(2, 9)
    logits = []
    for scaling in (SCALED, UNSCALED):
        model = LanguageModel(VARIANTS[variant], scaling, attention="sdpa")
        initialize(model, seed=3, std=0.2)
        logits.append(model(tokens))
    assert torch.equal(*logits)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@settings(deadline=None, max_examples=15)
@given(variant=st.sampled_from(sorted(VARIANTS)), T=st.integers(2, 40), data=st.data())
def test_future_tokens_change_past_logits(attention: str, variant: str, T: int, data: st.DataObject) -> None:
    model = random_model(VARIANTS[variant], attention=attention)
    cut = data.draw(st.integers(1, T - 1))
    a, b = random_tokens(2, T, seed=1), random_tokens(2, T, seed=2)
    b[:, :cut] = a[:, :cut]
    with torch.no_grad():
        torch.testing.assert_close(model(a)[:, :cut], model(b)[:, :cut], rtol=1e-4, atol=1e-4)
        # A shorter input is the longer one cut off: the tables do not depend on the length.
        torch.testing.assert_close(model(a)[:, :cut], model(a[:, :cut]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_depends_on_the_others_of_its_batch(variant: str) -> None:
    model = random_model(VARIANTS[variant])
    tokens = random_tokens(5, 13)
    with torch.no_grad():
        together = model(tokens)
        alone = torch.cat([model(row[None]) for row in tokens])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_latent_is_read_by_the_wrong_heads_or_branch(variant: str) -> None:
    config = VARIANTS[variant]
    attention = random_model(config).blocks[0].attention
    assert isinstance(attention, LatentAttention)
    x = torch.randn(2, 6, config.width, generator=torch.Generator().manual_seed(0))
    one = torch.tensor(1.0)
    rotation, scaling = rotation_tables(6, config.rope_dim, x.device), ScalingTensors(one, one, one)
    heads_of_group = config.heads // config.groups
    for latent in range(config.latents):
        k_before, rope_before, v_before = attention.keys_and_values(x, rotation, scaling)
        with torch.no_grad():
            attention.latent_norm.weight[latent] += 1.0
        k_after, rope_after, v_after = attention.keys_and_values(x, rotation, scaling)
        assert torch.equal(rope_before, rope_after)
        readers = torch.zeros(config.branches, config.heads, dtype=torch.bool)
        branch, group = divmod(latent, config.groups)
        readers[branch, group * heads_of_group : (group + 1) * heads_of_group] = True
        for before, after in ((k_before, k_after), (v_before, v_after)):
            changed_JH = (before != after).any(dim=-1).any(dim=2).any(dim=1)  # before: (J, B, T, H, Dn)
            assert torch.equal(changed_JH, readers)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_autocast_breaks_norms_or_types(variant: str, attention: str) -> None:
    model, tokens = random_model(VARIANTS[variant], attention=attention), random_tokens(2, 17)
    expected = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
        found.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 0.05, error


def test_both_arms_compile_to_different_graphs() -> None:
    graphs = []

    def recording_backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        graphs.append((graph.code, [tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor)]))
        return graph.forward

    tokens = random_tokens(2, 8)
    for scaling in (SCALED, UNSCALED):
        torch._dynamo.reset()
        model = random_model(VARIANTS["MLRA-2"], scaling)
        compiled = torch.compile(model, backend=recording_backend, fullgraph=True)
        torch.testing.assert_close(compiled(tokens), model(tokens))
    torch._dynamo.reset()
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]
    assert graphs[0][1].count(()) == 3  # the alphas come in as inputs


def test_unresolved_attention_path_is_found_only_in_the_first_forward() -> None:
    with pytest.raises(UserError, match="'auto'"):
        LanguageModel(VARIANTS["MLA"], SCALED, attention="auto")


def test_state_dict_holds_what_is_no_weight() -> None:
    model = random_model(VARIANTS["MLRA-2"])
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()
