"""What makes two results the same result: digests of data, code and runs, and the names that carry them.

A run's digest covers all that defines it, the code of its training step included, so two configurations or two
versions of the code never share a folder and no edit ever overwrites a finished training. Execution (device,
threads, micro-batch, ...) is not identity: it is written beside the run.
"""

import ast
import functools
import hashlib
import io
import json
import tokenize
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grimp

from attention_ablation.config import (
    FilesSource,
    FileTokenizer,
    Gpt2Tokenizer,
    HuggingFaceSource,
    Study,
    TokenShardsSource,
)
from attention_ablation.data.local_files import content_of, list_files
from attention_ablation.errors import UserError
from attention_ablation.files import remembered_sha256
from attention_ablation.model.config import width_preserving_std
from attention_ablation.progress import Progress
from attention_ablation.training.plan import TrainingPlan

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent.parent  # the checkout

# The modules that each step runs; a step's code is their import closure inside the package.
STEPS: dict[str, tuple[str, ...]] = {
    "data": (
        "attention_ablation.data.index_corpus",
        "attention_ablation.data.train_tokenizer",
        "attention_ablation.data.tokenize",
        "attention_ablation.data.dataset",
    ),
    "train": ("attention_ablation.training.train",),
    "evaluate": ("attention_ablation.evaluation",),
    "loss_deltas": ("attention_ablation.aggregation",),
    "figure": ("attention_ablation.figures", "attention_ablation.figure_tables"),
}
SQL = ROOT / "workflow" / "sql"
HASHES = Path("results/.state/hashes")  # of files, remembered by their size and time of change


def digest(value: Any) -> str:
    """12 hex digits of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- code -----------------------------------------------------------------------------------------------------


def code_of(step: str) -> dict[str, str]:
    """Source files of a step (relative to the checkout) and the hash of each, without comments and docstrings."""
    graph = _import_graph()
    modules: set[str] = set()
    for module in STEPS[step]:
        modules |= {module, *graph.find_upstream_modules(module)}
    # A package's __init__ holds nothing but a docstring (the top one: late exports), which a test asserts.
    paths = [_source(module) for module in modules if _source(module).name != "__init__.py"]
    if step == "loss_deltas":
        paths += [path for path in SQL.iterdir() if path.suffix in (".sql", ".csv")]
    if step == "figure":
        paths += [PACKAGE / "published_curve.csv"]
    return {str(path.relative_to(ROOT)): _code_hash(path) for path in sorted(paths)}


def code_digest(step: str) -> str:
    """Digest of all source files of a step."""
    return digest(code_of(step))


@functools.cache
def _import_graph() -> grimp.ImportGraph:
    # Without its cache on disk, which would appear as a folder wherever a command is run.
    return grimp.build_graph("attention_ablation", cache_dir=None)


def _source(module: str) -> Path:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"


@functools.cache
def _code_hash(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = without_comments(text)
    elif path.suffix == ".sql":
        text = "\n".join(line.partition("--")[0].rstrip() for line in text.splitlines())
    lines = [line for line in text.splitlines() if line.strip()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def without_comments(source: str) -> str:
    """Python source with comments and docstrings taken out.

    Works on positions in the text, not on a dump of the syntax tree: a dump changes between Python versions.
    """
    lines = source.splitlines()
    encoded = [line.encode() for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start[0] - 1, token.start[1]
            encoded[row] = lines[row][:column].rstrip().encode()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is None:
            continue
        string = node.body[0]
        assert string.end_lineno is not None and string.end_col_offset is not None
        first, last = string.lineno - 1, string.end_lineno - 1
        tail = encoded[last][string.end_col_offset :]
        encoded[first] = encoded[first][: string.col_offset] + (tail if first == last else b"")
        for row in range(first + 1, last + 1):
            encoded[row] = tail if row == last else b""
    return "\n".join(line.decode().rstrip() for line in encoded)


# --- data -----------------------------------------------------------------------------------------------------


def corpus_name(study: Study) -> str:
    """Folder of the corpus as fetched: `<name>-<digest>`. Two studies of files of one commit share it."""
    source = study.data.source
    kept = {"repository", "revision"} if isinstance(source, HuggingFaceSource) else {"package", "version", "sha256"}
    return f"{source.label}-{digest(source.model_dump(include={'kind', *kept}))}"


def data_digest(study: Study) -> str:
    """Digest of all that decides the stream of tokens; the number of parts does not, nor where files lie.

    Raises UserError when a file of the corpus is not there.
    """
    return digest(
        {
            "source": _source_identity(study),
            "order": study.data.order,
            "tokenizer": _tokenizer_identity(study),
            "code": code_digest("data"),
        }
    )


def _source_identity(study: Study) -> dict[str, Any]:
    source = study.data.source
    if isinstance(source, FilesSource | TokenShardsSource):
        memory = HASHES / f"{source.label}-{digest(source.paths)}.json"
        files = list_files(source.paths)
        content = content_of(files, memory, Progress(f"hashing {source.label}", "bytes").update)
        return source.model_dump(exclude={"license", "paths"}) | {"files": content}
    if isinstance(source, HuggingFaceSource):
        return source.model_dump(exclude={"license", "path", "files"}) | {"files": source.file_names}
    return source.model_dump(exclude={"license"})


def _tokenizer_identity(study: Study) -> dict[str, Any]:
    tokenizer = study.data.tokenizer
    if isinstance(tokenizer, Gpt2Tokenizer):
        return {"kind": tokenizer.kind}  # its files are known to the byte, wherever they come from
    if isinstance(tokenizer, FileTokenizer):
        path = Path(tokenizer.path)
        try:
            sha256 = remembered_sha256([path], HASHES / f"tokenizer-{digest(tokenizer.path)}.json")[0]
        except OSError as error:
            raise UserError(f"data.tokenizer.path: {path}: {error.strerror}") from None
        return tokenizer.model_dump(exclude={"path"}) | {"sha256": sha256}
    return tokenizer.model_dump()


def data_name(study: Study) -> str:
    """Folder of the token stream: `<name>-<digest>`."""
    return f"{study.data.source.label}-{data_digest(study)}"


# --- runs -----------------------------------------------------------------------------------------------------


def training_code(study: Study) -> str:
    """Digest of the training step's code, or the older one that the study pins."""
    return code_digest("train") if study.training.code == "current" else study.training.code


def training_plan(study: Study, arm: str, seed: int) -> TrainingPlan:
    """The numbers of one run's training, resolved."""
    model, training = study.settings_of(arm)
    std = model.initialization.std
    if model.initialization.kind == "width_preserving":
        std = width_preserving_std(model.width, std=std, reference_width=model.initialization.reference_width)
    return TrainingPlan(
        seed=seed,
        initialization_std=std,
        context=model.context,
        steps=training.steps,
        batch_tokens=training.batch_tokens,
        learning_rate=training.learning_rate,
        final_learning_rate=training.learning_rate * training.final_learning_rate_fraction,
        warmup_steps=training.warmup_steps,
        betas=training.betas,
        epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        gradient_clip=training.gradient_clip,
        precision=training.precision,
        checkpoint_steps=tuple(training.checkpoint_steps),
        validation_tokens=study.data.validation_tokens,
    )


def runs(study: Study) -> dict[str, dict[str, Any]]:
    """Every run of the study by name, `<variant>.<arm>.seed<k>-<digest>`, with its identity as JSON values."""
    data, code = data_digest(study), training_code(study)
    found = {}
    for variant in study.variants:
        for arm in study.arms:
            if variant not in study.variants_of(arm):
                continue
            for seed in study.seeds_of(arm):
                identity = {
                    "variant": variant,
                    "arm": arm,
                    "data": data,
                    "model": asdict(study.sizes_of(variant, arm)),
                    "scaling": asdict(study.scaling_of(arm)),
                    "training": asdict(training_plan(study, arm, seed)),
                    "code": code,
                }
                identity = json.loads(json.dumps(identity))  # tuples become lists, as they will be read back
                found[f"{variant}.{arm}.seed{seed}-{digest(identity)}"] = identity
    return found


def evaluation_digest(study: Study) -> str:
    """Digest of how snapshots are scored; the batch changes nothing."""
    return digest({"tokens": study.evaluation.tokens, "precision": study.evaluation.precision})


# --- what the last steps depend on ----------------------------------------------------------------------------


def aggregation_settings(study: Study) -> str:
    """All that the deltas depend on beside the evaluations and the code, as JSON text."""
    settings = {
        "runs": list(runs(study)),
        "evaluation": evaluation_digest(study),
        "comparisons": [comparison.model_dump() for comparison in study.comparisons],
        "statistics": study.statistics.model_dump(),
    }
    return json.dumps(settings)


def figure_settings(study: Study) -> str:
    """All that the figure depends on beside the deltas and the code, as JSON text."""
    settings = {
        "deltas": aggregation_settings(study),
        "variants": {name: variant.color for name, variant in study.variants.items()},
        "figure": study.figure.model_dump(),
        "notes": notes(study),
    }
    return json.dumps(settings)


def notes(study: Study) -> list[str]:
    """What a reader of the tables must know beside the numbers."""
    code = training_code(study)
    if code == code_digest("train"):
        return []
    return [f"The runs were trained by an older code, which the study pins: training.code {code}."]
