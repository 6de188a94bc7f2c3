"""The study file: what is valid, what every mistake is told as."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from attention_ablation.config import Study
from attention_ablation.errors import UserError
from attention_ablation.model.config import ModelConfig
from attention_ablation.model.transformer import LanguageModel
from attention_ablation.study import load_study

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "config.yaml"
PRESETS = sorted((ROOT / "workflow" / "presets").glob("*.yaml"))


def study(**overrides) -> Study:
    return load_study([CONFIG], overrides)


@pytest.mark.parametrize("path", [CONFIG, *PRESETS], ids=lambda path: path.stem)
def test_shipped_studies_are_valid(path):
    assert load_study([path]).variants


def test_the_paper_preset_is_the_papers_training():
    paper = load_study([ROOT / "workflow/presets/paper.yaml"])
    training = paper.training
    assert training.steps == 100_000
    assert training.warmup_steps == 2_000
    assert training.checkpoint_steps == list(range(1_000, 100_001, 1_000))
    assert training.learning_rate * training.final_learning_rate_fraction == pytest.approx(1.6e-5)
    assert training.batch_tokens // paper.model.context // paper.execution.micro_batch == 8 * 60


@pytest.mark.parametrize(
    ("variant", "parameters"), [("MLA", 2_872_052_736), ("GLA-2", 2_872_630_272), ("MLRA-2", 2_872_630_272)]
)
def test_the_paper_preset_has_the_papers_parameter_counts(variant, parameters):
    paper = load_study([ROOT / "workflow/presets/paper.yaml"])
    with torch.device("meta"):
        model = LanguageModel(paper.sizes_of(variant, "scaled"), paper.scaling_of("scaled"), attention="sdpa")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_default_study_keeps_the_papers_ratios():
    default, paper = study(), load_study([ROOT / "workflow/presets/paper.yaml"])
    for variant in default.variants:
        ours, theirs = default.sizes_of(variant, "scaled"), paper.sizes_of(variant, "scaled")
        for name in ("query_rank", "kv_rank"):
            assert getattr(ours, name) / ours.width == getattr(theirs, name) / theirs.width
        assert ours.rope_dim / ours.nope_dim == theirs.rope_dim / theirs.nope_dim
        assert ours.heads * ours.nope_dim == ours.width
    assert default.training.learning_rate == pytest.approx(paper.training.learning_rate * 3072 / 192)


MISTAKES = [
    ({"trainig": {}}, "unknown key 'trainig'; did you mean 'training'?"),
    ({"training": {"learning_rat": 1}}, "training: unknown key 'learning_rat'; did you mean 'learning_rate'?"),
    ({"training": {"learning_rate": 0}}, "training.learning_rate: Input should be greater than 0 (found 0)"),
    ({"training": {"learning_rate": "nan"}}, "training.learning_rate: Input should be"),
    ({"training": {"tokens": True}}, "training.tokens: a number is wanted (found True)"),
    ({"training": {"tokens": "many"}}, "training.tokens: Input should be a valid integer"),
    ({"training": {"tokens": 1000}}, "training.tokens: 1000 is not a multiple of training.batch_tokens 2048"),
    ({"training": {"batch_tokens": 1000}}, "training.batch_tokens: 1000 is not a multiple of model.context 256"),
    ({"training": {"checkpoints": {"even": 999}}}, "training.checkpoints.even: 999 checkpoints, but only 350 steps"),
    ({"training": {"seeds": []}}, "training.seeds: List should have at least 1 item"),
    ({"training": {"seeds": [0, 0]}}, "training.seeds: every seed once"),
    ({"model": {"rope_dim": 7}}, "model.rope_dim: RoPE rotates pairs: the dim must be even, 7 is odd"),
    ({"model": {"kv_rank": 30}}, "variants.MLRA-2: groups 2 x branches 2 = 4 latents do not divide model.kv_rank 30"),
    ({"model": {"heads": 5}}, "variants.GLA-2.groups: 2 groups do not divide model.heads 5; valid are 1, 5"),
    ({"model": {"vocabulary_size": 100}}, "model.vocabulary_size: 100 is under the tokenizer's 2048"),
    ({"variants": {"MLA": {"color": "blue"}}}, 'variants.MLA.color: a colour like "#1b5e95" is wanted'),
    ({"variants": {"a/b": {}}}, "variants.a/b"),
    ({"arms": {"scaled": {"variants": ["ML"]}}}, "arms.scaled.variants: unknown variant 'ML'; did you mean 'MLA'?"),
    ({"arms": {"scaled": {"override": {"training.lerning_rate": 1}}}}, "did you mean 'training.learning_rate'?"),
    (
        {"arms": {"scaled": {"override": {"training.learning_rate": -1}}}},
        "arms.scaled.override: learning_rate: Input",
    ),
    ({"arms": {"scaled": {"override": {"training.seeds": [1]}}}}, "belongs to all arms alike"),
    ({"arms": {"scaled": {"override": {"model.initialization": 1}}}}, "is a group of leaves"),
    ({"arms": {"scaled": {"seeds": [7]}}}, "arms 'scaled' and 'unscaled' have no seed in common"),
    ({"arms": {"scaled": {"override": {"model.context": 128}}}}, "differ in context, batch or checkpoints"),
    ({"comparisons": [{"name": "a", "baseline": "scald", "treatment": "scaled"}]}, "did you mean 'scaled'?"),
    ({"comparisons": [{"name": "a", "baseline": "scaled", "treatment": "scaled"}]}, "are both 'scaled'"),
    ({"comparisons": 3}, "comparisons: Input should be a valid list"),
    ({"data": {"source": {"kind": "weel"}}}, "data.source: Input tag 'weel' found using 'kind'"),
    ({"data": {"tokenizer": {"vocabulary_size": 100}}}, "data.tokenizer.vocabulary_size: 100 is under 257"),
    ({"data": {"source": {"errors": "ignore"}}}, "data.source.wheel.errors: Input should be 'strict' or 'replace'"),
    ({"data": {"tokenizer": {"kind": "gpt3"}}}, "data.tokenizer: Input tag 'gpt3' found using 'kind'"),
    ({"data": {"validation_tokens": 1000}}, "1000 evaluated tokens make 4 windows of 256"),
    ({"evaluation": {"tokens": 99_999}}, "evaluation.tokens: 99999 is over data.validation_tokens 49152"),
    ({"execution": {"micro_batch": 3}}, "execution.micro_batch: 3 does not divide the batch of 8 sequences"),
    ({"data": {"validation_tokens": 200_000}}, "200000 tokens are more text than the 163840 of"),
    ({"training": {"seeds": [2**31]}}, "training.seeds.0: Input should be less than 2147483648"),
    ({"training": {"betas": [1, 1]}}, "training.betas.0: Input should be less than 1"),
    ({"training": {"seeds": "[0"}}, "training: not YAML: '[0'"),
    ({"training": "{seeds: [0"}, "--config: not YAML: '{seeds: [0'"),
    ({"statistics": {"blocks": 1100}}, "statistics.blocks: Input should be less than or equal to 1000"),
    ({"statistics": {"confidence": 0.96}}, "statistics.confidence: valid are 0.8, 0.9, 0.95, 0.99"),
    ({"statistics": {"blocks": 10}}, "statistics.blocks: Input should be greater than or equal to 30 (found 10)"),
    ({"figure": {"formats": ["gif"]}}, "figure.formats.0: Input should be 'svg', 'png', 'pdf' or 'html'"),
    ({"study": "a/b"}, "study: letters, digits, - and _ are wanted"),
    ({"model": "x"}, "model: a mapping of keys to values is wanted"),
]


@pytest.mark.parametrize(("overrides", "told"), MISTAKES, ids=[told[:40] for _, told in MISTAKES])
def test_a_mistake_is_told_in_one_line_with_key_and_value(overrides, told):
    with pytest.raises(UserError) as caught:
        study(**overrides)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spelling", "value"), [("1e-4", 1e-4), (0.0001, 1e-4), ("1_0e-5", 1e-4)], ids=["text", "float", "underscore"]
)
def test_spellings_of_a_number_are_the_number(spelling, value):
    assert study(training={"learning_rate": spelling}).training.learning_rate == value


@given(st.integers(1, 10**6))
def test_counts_read_back_from_every_spelling(steps):
    tokens = steps * 2048
    for spelling in (tokens, str(tokens), f"{tokens:_}", float(tokens)):
        training = study(training={"tokens": spelling, "checkpoints": {"even": 1}, "warmup_fraction": 0}).training
        assert training.tokens == tokens
        assert isinstance(training.tokens, int)


def test_overrides_arrive_as_text_as_snakemake_hands_them():
    text = study(training={"seeds": "[0, 1]", "checkpoints": "{even: 7}"}, figure="{y: symlog}")
    assert text.training.seeds == [0, 1]
    assert text.training.checkpoints.even == 7
    assert text.figure.y == "symlog"
    assert text.figure.formats == study().figure.formats


def test_overrides_keep_the_legends_order():
    assert list(study(variants={"MLRA-2": {"color": "#000000"}}).variants) == ["MLA", "GLA-2", "MLRA-2"]


def test_a_study_file_replaces_the_default_and_is_never_merged():
    smoke = load_study([ROOT / "workflow/presets/smoke.yaml"])
    assert list(smoke.variants) == ["MLA", "MLRA-2"]
    with pytest.raises(UserError, match="one study file at a time"):
        load_study([CONFIG, ROOT / "workflow/presets/smoke.yaml"])


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text(CONFIG.read_text() + "\nfigure: {}\n")
    with pytest.raises(UserError, match="key 'figure' stands twice"):
        load_study([path])


@pytest.mark.parametrize(
    ("content", "told"),
    [("a: [", "is not YAML"), ("- 1", "a mapping of keys"), ("", "a mapping"), ("study: x", "data: Field required")],
)
def test_a_file_that_is_no_study_is_told_with_its_name(tmp_path, content, told):
    path = tmp_path / "study.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=told) as caught:
        load_study([path])
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_told(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"study: \xff")
    with pytest.raises(UserError, match=r"a\.yaml: not UTF-8 at byte 7"):
        load_study([tmp_path / "a.yaml"])


def test_yaml_merge_keys_are_read(tmp_path):
    path = tmp_path / "merged.yaml"
    path.write_text(
        CONFIG.read_text()
        .replace("  scaled:\n", "  scaled: &base\n")
        .replace("  unscaled:\n", "  unscaled:\n    <<: *base\n")
    )
    assert load_study([path]) == study()


HUB = {"kind": "hugging_face", "repository": "o/r", "revision": "a" * 40, "files": ["x.parquet"]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "a$(touch b)"},
        {"path": "../.."},
        {"path": "a b"},
        {"path": "a{b}"},
        {"repository": "../.."},
        {"repository": "o/$(x)"},
        {"files": ["../x.parquet"]},
        {"files": ["x{0..2}.parquet", "x1.parquet"]},
    ],
    ids=str,
)
def test_a_name_from_the_study_never_reaches_a_shell_or_leaves_its_folder(tmp_path, wrong):
    tree = yaml.safe_load(CONFIG.read_text())
    tree["data"]["source"] = HUB | wrong
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(UserError, match=f"data.source.hugging_face.{next(iter(wrong))}"):
        load_study([path])


def test_an_absent_file_is_told(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        load_study([tmp_path / "nowhere.yaml"])


def test_a_validated_study_reads_back_as_itself(tmp_path):
    path = tmp_path / "study.json"
    path.write_text(json.dumps(study().model_dump(mode="json")))
    assert load_study([path]) == study()


@given(st.integers(1, 3000), st.integers(1, 50), st.integers(0, 8))
def test_the_checkpoint_grid_is_ascending_and_ends_with_training(steps, even, early):
    checkpoints = {"even": min(even, steps), "early": early}
    training = study(training={"tokens": steps * 2048, "warmup_fraction": 0, "checkpoints": checkpoints}).training
    grid = training.checkpoint_steps
    assert grid == sorted(set(grid))
    assert grid[-1] == training.steps == steps
    assert len(grid) <= min(even, steps) + early


def test_the_early_part_of_the_grid_starts_at_one_percent():
    grid = study().training.checkpoint_steps
    assert grid[0] == 4  # of 350 steps
    assert len(grid) == 12
    assert [b / a for a, b in itertools.pairwise(grid[:5])] == pytest.approx([1.8] * 4, abs=0.1)


def test_an_arms_overrides_reach_its_model_and_its_training():
    changed = study(arms={"unscaled": {"override": {"training.learning_rate": "1e-3", "model.layers": 2}}})
    model, training = changed.settings_of("unscaled")
    assert (training.learning_rate, model.layers) == (1e-3, 2)
    assert changed.settings_of("scaled") == (changed.model, changed.training)


def test_model_sizes_come_from_model_and_variant():
    sizes = study().sizes_of("MLRA-2", "scaled")
    assert isinstance(sizes, ModelConfig)
    assert dataclasses.asdict(sizes) | {"groups": 2, "branches": 2, "query_rank": 64} == dataclasses.asdict(sizes)
    assert (sizes.latents, sizes.latent_dim) == (4, 8)


def test_the_yaml_of_the_default_study_is_read_as_written():
    tree = yaml.safe_load(CONFIG.read_text())
    assert list(study().variants) == list(tree["variants"])
