"""Our model computes what the paper's own implementation computed."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from attention_ablation.model.published import from_published, load_published, to_published
from attention_ablation.model.transformer import LanguageModel
from parity.fixtures import NAMES, Fixture, load_fixture

TOLERANCE = 1e-5


def assert_agrees(model: LanguageModel, fixture: Fixture) -> None:
    logits = model(fixture.tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), fixture.targets.flatten())
    loss.backward()
    torch.testing.assert_close(logits, fixture.logits, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(loss, fixture.loss, rtol=0, atol=TOLERANCE)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = to_published(gradients, fixture.config)
    assert found.keys() == fixture.gradients.keys()
    for name, expected in fixture.gradients.items():
        limit = TOLERANCE * expected.abs().max().item()
        torch.testing.assert_close(found[name], expected, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_mathematics_departs_from_the_papers_implementation(name: str, attention: str) -> None:
    fixture = load_fixture(name)
    model = LanguageModel(fixture.config, fixture.scaling, attention=attention)
    model.load_state_dict(from_published(fixture.weights, fixture.config))
    assert sum(parameter.numel() for parameter in model.parameters()) == fixture.num_parameters
    assert_agrees(model, fixture)


def write_published(folder: Path, fixture: Fixture, form: str, embedding: tuple[str, ...]) -> None:
    """The fixture's weights as a folder of the authors, in one of the three forms that they can have."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fixture.published_config))
    weights = {name: tensor.clone() for name, tensor in fixture.weights.items()}
    tied = weights.pop("lm_head.weight")
    weights |= {name: tied.clone() for name in embedding}
    if form == "safetensors":
        save_file(weights, folder / "model.safetensors")
    elif form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        names = sorted(weights)
        files = {name: f"pytorch_model-0000{k % 3 + 1}-of-00003.bin" for k, name in enumerate(names)}
        for file in sorted(set(files.values())):
            torch.save({name: weights[name] for name in names if files[name] == file}, folder / file)
        index = {"metadata": {}, "weight_map": files}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("name", NAMES)
def test_published_folder_is_read_wrong(tmp_path: Path, name: str, form: str) -> None:
    fixture = load_fixture(name)
    embedding = {
        "safetensors": ("lm_head.weight",),
        "bin": ("transformer.wte.weight",),
        "sharded": ("lm_head.weight", "transformer.wte.weight"),
    }[form]
    write_published(tmp_path, fixture, form, embedding)
    model = load_published(tmp_path, scaled=fixture.scaling.query)
    assert model.config == fixture.config
    assert not model.training
    assert_agrees(model, fixture)
