"""Read a study file: one file, the `--config` values laid over it, validated, or one line that says what is wrong.

`load_study` is the only way in, for the Snakefile and for every command.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from attention_ablation.config import (
    COLOR,
    NAME,
    BpeTokenizer,
    Comparison,
    Execution,
    Study,
    TokenShardsSource,
    nearest,
    read_yaml,
)
from attention_ablation.errors import UserError

DEFAULT_STUDY = Path("config.yaml")
FORMS = {  # of text, in words instead of a pattern
    COLOR: 'a colour like "#1b5e95" is wanted, in quotes',
    NAME: "letters, digits, - and _ are wanted, a letter or digit first",
}


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice, where plain YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f"key {key!r} stands twice in one mapping{node.start_mark}")
        return super().construct_mapping(node, deep)


def load_study(configfiles: Sequence[str | Path] = (), overrides: Mapping[str, Any] | None = None) -> Study:
    """The study of one file (default: config.yaml here) with `overrides` laid over its leaves.

    Raises UserError with one line for the first mistake.
    """
    if len(configfiles) > 1:
        names = ", ".join(str(path) for path in configfiles)
        raise UserError(f"one study file at a time, found {names}: a study file is whole and is never merged")
    path = Path(configfiles[0]) if configfiles else DEFAULT_STUDY
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise UserError(f"study file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"study file {path}: not UTF-8 at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise UserError(f"study file {path} is not YAML: {' '.join(str(error).split())}") from error
    except UserError as error:
        raise UserError(f"study file {path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"study file {path}: a mapping of keys to values is wanted, found {type(tree).__name__}")
    try:
        study = Study.model_validate(_merged(tree, overrides or {}))
    except ValidationError as error:
        raise UserError(f"study file {path}: {_first_line(error)}") from error
    except ValueError as error:
        raise UserError(f"--config: {error}") from error
    for problem in _problems(study):
        raise UserError(f"study file {path}: {problem}")
    return study


def _merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`, leaf by leaf; the order of `base` is kept (it is the legend's)."""
    if isinstance(over, str) and isinstance(base, Mapping):
        over = read_yaml(over)
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    added = {key: value for key, value in over.items() if key not in base}
    return {key: _merged(value, over[key]) if key in over else value for key, value in base.items()} | added


def _first_line(error: ValidationError) -> str:
    """The first mistake as `key: value: reason`."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "string_pattern_mismatch":
        reason = FORMS.get(first["ctx"]["pattern"], reason)
    value = first.get("input")
    found = "" if isinstance(value, Mapping | BaseModel) or first["type"] == "missing" else f" (found {value!r})"
    return f"{where}: {reason}{found}" if where else f"{reason}{found}"


# --- what no single key can see ---


def _problems(study: Study) -> Iterator[str]:
    """What no single key can see; the first is told."""
    for name, arm in study.arms.items():
        for variant in arm.variants or []:
            if variant not in study.variants:
                yield f"arms.{name}.variants: unknown variant {variant!r}{nearest(variant, study.variants)}"
        yield from _problems_of_settings(study, name)
    names = [comparison.name for comparison in study.comparisons]
    if len(set(names)) < len(names):
        yield f"comparisons: every name once, found {', '.join(names)}"
    for comparison in study.comparisons:
        yield from _problems_of_comparison(study, comparison)
    tokenizer, validation = study.data.tokenizer, study.data.validation_tokens
    if isinstance(tokenizer, BpeTokenizer):
        if tokenizer.vocabulary_size < 257:
            yield f"data.tokenizer.vocabulary_size: {tokenizer.vocabulary_size} is under 257 (256 bytes, end-of-text)"
        if validation > tokenizer.holdout_bytes:
            yield (
                f"data.validation_tokens: {validation} tokens are more text than the {tokenizer.holdout_bytes} of "
                "data.tokenizer.holdout_bytes"
            )
        if isinstance(study.data.source, TokenShardsSource):
            yield "data.tokenizer: kind bpe wants text to train on, token_shards have none; name their own"


def _problems_of_settings(study: Study, arm: str) -> Iterator[str]:
    try:
        model, training = study.settings_of(arm)
    except ValidationError as error:
        yield f"arms.{arm}.override: {_first_line(error)}"
        return
    except ValueError as error:
        yield f"arms.{arm}.{error}"
        return
    for variant in study.variants_of(arm):
        v, where = study.variants[variant], f"variants.{variant}"
        if model.heads % v.groups:
            valid = ", ".join(str(n) for n in range(1, model.heads + 1) if model.heads % n == 0)
            yield f"{where}.groups: {v.groups} groups do not divide model.heads {model.heads}; valid are {valid}"
        if model.kv_rank % (v.groups * v.branches):
            yield (
                f"{where}: groups {v.groups} x branches {v.branches} = {v.groups * v.branches} latents do not divide "
                f"model.kv_rank {model.kv_rank}"
            )
    rows = study.data.tokenizer.vocabulary_size
    if model.vocabulary_size != "auto" and model.vocabulary_size < rows:
        yield f"model.vocabulary_size: {model.vocabulary_size} is under the tokenizer's {rows}"
    if training.batch_tokens % model.context:
        yield (
            f"training.batch_tokens: {training.batch_tokens} is not a multiple of model.context {model.context}; "
            f"the next below is {training.batch_tokens // model.context * model.context}"
        )
    if training.tokens % training.batch_tokens:
        yield (
            f"training.tokens: {training.tokens} is not a multiple of training.batch_tokens {training.batch_tokens}; "
            f"the nearest is {max(1, round(training.tokens / training.batch_tokens)) * training.batch_tokens}"
        )
    if training.checkpoints.even > training.steps:
        yield f"training.checkpoints.even: {training.checkpoints.even} checkpoints, but only {training.steps} steps"
    if training.warmup_steps >= training.steps:
        yield f"training.warmup_fraction: {training.warmup_fraction} leaves no step after the warm-up"
    yield from _problems_of_the_split(study.execution, training.batch_tokens // model.context)
    used = study.data.validation_tokens if study.evaluation.tokens == "all" else study.evaluation.tokens
    if used > study.data.validation_tokens:
        yield f"evaluation.tokens: {used} is over data.validation_tokens {study.data.validation_tokens}"
    windows = -(-(used - 1) // model.context)
    if windows < study.statistics.blocks:
        yield (
            f"data.validation_tokens: {used} evaluated tokens make {windows} windows of {model.context}, but "
            f"statistics.blocks asks for {study.statistics.blocks} blocks of at least one; "
            f"use {study.statistics.blocks * model.context} tokens or more"
        )


def _problems_of_the_split(execution: Execution, sequences: int) -> Iterator[str]:
    """Whether a batch of `sequences` can be shared out among processes and micro-batches."""
    processes, micro_batch = execution.processes, execution.micro_batch
    if sequences % processes:
        valid = ", ".join(str(n) for n in range(1, min(sequences, 64) + 1) if sequences % n == 0)
        yield (
            f"execution.processes: {processes} do not divide the batch of {sequences} sequences "
            f"(training.batch_tokens / model.context); valid are {valid}"
        )
    elif micro_batch != "auto" and sequences // processes % micro_batch:
        share = "" if processes == 1 else f", {sequences // processes} a process,"
        yield f"execution.micro_batch: {micro_batch} does not divide the batch of {sequences} sequences{share}"


def _problems_of_comparison(study: Study, comparison: Comparison) -> Iterator[str]:
    where = f"comparisons.{comparison.name}"
    for role in ("baseline", "treatment"):
        arm = getattr(comparison, role)
        if arm not in study.arms:
            yield f"{where}.{role}: unknown arm {arm!r}{nearest(arm, study.arms)}"
            return
    arms = comparison.baseline, comparison.treatment
    if arms[0] == arms[1]:
        yield f"{where}: baseline and treatment are both {arms[0]!r}"
    if not set(study.variants_of(arms[0])) & set(study.variants_of(arms[1])):
        yield f"{where}: no variant has both arms {arms[0]!r} and {arms[1]!r}"
    if not set(study.seeds_of(arms[0])) & set(study.seeds_of(arms[1])):
        yield f"{where}: arms {arms[0]!r} and {arms[1]!r} have no seed in common"
    grids = []
    for arm in arms:
        model, training = study.settings_of(arm)
        grids.append((model.context, training.batch_tokens, training.checkpoint_steps))
    if grids[0] != grids[1]:
        yield f"{where}: arms {arms[0]!r} and {arms[1]!r} differ in context, batch or checkpoints: nothing to pair"
