"""Initial weights depend on seed, name and shape only."""

import math

import pytest
import torch

from attention_ablation.model.config import width_preserving_std
from attention_ablation.model.initialization import initial_value, initialize
from attention_ablation.model.transformer import LanguageModel
from model.sizes import SCALED, UNSCALED, VARIANTS


def initialized(variant: str, *, seed: int = 0, scaling: object = SCALED) -> dict[str, torch.Tensor]:
    model = LanguageModel(VARIANTS[variant], scaling, attention="sdpa")
    initialize(model, seed=seed, std=0.1)
    return model.state_dict()


@pytest.mark.parametrize("variant", VARIANTS)
def test_arms_start_from_different_weights(variant: str) -> None:
    a, b = initialized(variant, scaling=SCALED), initialized(variant, scaling=UNSCALED)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_weights_depend_on_the_global_generator_or_on_what_was_drawn_before() -> None:
    torch.manual_seed(1)
    first = initialized("MLRA-2")
    state = torch.get_rng_state()
    torch.manual_seed(2)
    initialized("MLA")
    again = initialized("MLRA-2")
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in sorted(first, reverse=True):
        assert torch.equal(initial_value(name, first[name].shape, seed=0, std=0.1), first[name])
    torch.manual_seed(1)
    initialized("MLRA-2")
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_change_with_the_version_of_the_code() -> None:
    """A pinned value: another hash or draw would break every comparison with earlier runs."""
    found = initial_value("embedding.weight", torch.Size([4, 8]), seed=0, std=1.0)
    torch.testing.assert_close(found[0, :3], torch.tensor([-1.0695528, 0.0763087, -0.6373613]), rtol=0, atol=1e-6)


def test_two_parameters_or_two_seeds_share_a_draw() -> None:
    weights = initialized("MLRA-2")
    draws = [w.flatten()[:20] for w in weights.values() if w.std() > 0]
    draws += [w.flatten()[:20] for w in initialized("MLRA-2", seed=1).values() if w.std() > 0]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws) > 20


def test_a_kind_of_parameter_starts_wrong() -> None:
    for name, value in initialized("MLRA-2").items():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
        elif name.endswith(("attention.output.weight", "mlp.down.weight")):
            assert (value == 0).all(), name
        else:
            assert value.std().item() == pytest.approx(0.1, rel=6 / math.sqrt(2 * value.numel())), name
            assert abs(value.mean().item()) < 6 * 0.1 / math.sqrt(value.numel()), name


def test_small_width_loses_the_papers_balance() -> None:
    assert width_preserving_std(3072, std=0.02, reference_width=3072) == 0.02
    assert width_preserving_std(192, std=0.02, reference_width=3072) == pytest.approx(0.08)
    assert 192 * width_preserving_std(192, std=0.02, reference_width=3072) ** 2 == pytest.approx(1.2288)
