"""Published checkpoints: names map both ways, and what is wrong with a folder is said with file and tensor.

That the numbers are right is shown in test_parity.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention_ablation.errors import UserError
from attention_ablation.model.published import from_published, load_published, to_published
from model.sizes import VARIANTS, random_model, random_tokens

CONFIG = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "intermediate_size": 40,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "block_size": 64,
    "vocab_size": 50,
}


def published_weights(variant: str) -> dict[str, torch.Tensor]:
    config = VARIANTS[variant]
    weights = to_published(random_model(config).state_dict(), config)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """MLRA-2 in one safetensors file."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(published_weights("MLRA-2"), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_lose_a_tensor_there_and_back(variant: str) -> None:
    config = VARIANTS[variant]
    ours = random_model(config).state_dict()
    back = from_published(to_published(ours, config), config)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_is_taken_for_another(folder: Path, variant: str, scaled: bool) -> None:
    save_file(published_weights(variant), folder / "model.safetensors")
    model = load_published(folder, scaled=scaled)
    assert model.config == VARIANTS[variant]
    assert model.scaling.query == model.scaling.key_value == model.scaling.output == scaled
    tokens = random_tokens(2, 5)
    expected = random_model(model.config, model.scaling)(tokens)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def test_half_precision_weights_stay_half(folder: Path) -> None:
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in published_weights("MLA").items()}
    save_file(weights, folder / "model.safetensors")
    model = load_published(folder, scaled=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_untied_embeddings_are_loaded(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.wte.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    load_published(folder, scaled=True)
    weights["transformer.wte.weight"][3, 4] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model\.safetensors.*'lm_head\.weight' and 'transformer\.wte\.weight' differ"
    ):
        load_published(folder, scaled=True)


UP = "transformer.h.0.attn.kv_b_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("lm_head.weight"), r"'lm_head\.weight' is missing, expected shape \(50, 32\)"),
        (
            lambda w: w.pop("transformer.h.1.mlp.c_fc1.weight"),
            r"'transformer\.h\.1\.mlp\.c_fc1\.weight' is missing",
        ),
        (
            lambda w: w.update({"layernorm.weight": torch.ones(31)}),
            r"'layernorm\.weight': found shape \(31,\), expected",
        ),
        (
            lambda w: w.update({"transformer.h.2.x": torch.ones(1)}),
            r"unexpected tensor 'transformer\.h\.2\.x'",
        ),
        (lambda w: w.pop(UP), r"found none of .*kv_b_proj"),
        (lambda w: w.update({UP: torch.ones(4, 4, 7)}), r"kv_b_proj': found shape \(4, 4, 7\)"),
        (lambda w: w.update({UP: torch.ones(4, 4)}), r"kv_b_proj': found shape \(4, 4\)"),
        (lambda w: w.update({UP: torch.ones(3, 4, 32)}), r"kv_b_proj': found shape \(3, 4, 32\)"),
    ],
)
def test_wrong_weights_are_loaded(folder: Path, change: Callable[[Any], Any], message: str) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=message) as caught:
        load_published(folder, scaled=True)
    assert str(folder / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("key", sorted(CONFIG.keys() - {"block_size"}))
def test_absent_config_key_gets_a_default(folder: Path, key: str) -> None:
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    with pytest.raises(UserError, match=rf"config\.json: key '{key}' is missing"):
        load_published(folder, scaled=True)


@pytest.mark.parametrize("value", [0, -2, 2.5, "2", True, None])
def test_impossible_config_value_is_taken(folder: Path, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"n_layer": value}))
    with pytest.raises(UserError, match=r"config\.json: key 'n_layer': found"):
        load_published(folder, scaled=True)


def test_config_that_does_not_fit_the_groups_is_a_traceback(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"kv_lora_rank": 18}))
    with pytest.raises(UserError, match=r"config\.json: key 'kv_lora_rank': found 18, expected a multiple of 4"):
        load_published(folder, scaled=True)


def test_absent_or_damaged_files_are_a_traceback(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole"):
        load_published(folder, scaled=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected model\.safetensors, pytorch_model\.bin or"):
        load_published(folder, scaled=True)
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: not a whole"):
        load_published(folder, scaled=True)
    torch.save(published_weights("MLA"), folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not JSON"):
        load_published(folder, scaled=True)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json: the file is missing"):
        load_published(folder, scaled=True)


class Payload:
    """An object whose unpickling would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickle_in_a_checkpoint_runs_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(folder / "written")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        load_published(folder, scaled=True)
    assert not (folder / "written").exists()


def test_missing_shard_or_tensor_of_a_shard_is_a_traceback(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    files = {name: first if "h.0" in name else second for name in weights}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    torch.save({name: weights[name] for name in weights if files[name] == first}, folder / first)
    with pytest.raises(UserError, match=rf"{second}: the shard is missing; .* has 'layernorm\.weight' in it"):
        load_published(folder, scaled=True)
    torch.save({name: weights[name] for name in weights if name.startswith("transformer.h.1")}, folder / second)
    with pytest.raises(UserError, match=rf"{second}: tensor 'l.*weight' is missing"):
        load_published(folder, scaled=True)
    torch.save({name: weights[name] for name in weights if files[name] == second}, folder / second)
    load_published(folder, scaled=True)
    index.write_text(json.dumps({"weight_map": files | {"layernorm.weight": "../" + second}}))
    with pytest.raises(UserError, match="expected a file beside the index"):
        load_published(folder, scaled=True)
    index.write_text("{}")
    with pytest.raises(UserError, match="'weight_map' is missing"):
        load_published(folder, scaled=True)
