"""Tiny corpora: wheels written on the spot, and the whole way from a wheel to a dataset."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from attention_ablation.data.dataset import build_dataset
from attention_ablation.data.index_corpus import index_corpus
from attention_ablation.data.sources import WheelSource
from attention_ablation.data.tokenize import tokenize_part
from attention_ablation.data.train_tokenizer import train_tokenizer

SOURCE = WheelSource("tiny", "1.0", "0" * 64, "texts/*.md")
PROSE = "The quick brown fox — naïve, 日本 — jumps over the lazy dog's back.\nIt isn't <|endoftext|> yet.\n\n" * 40


@dataclass(frozen=True)
class Made:
    """The files that the steps made of a corpus."""

    corpus: Path
    index: Path
    tokenizer: Path
    parts: list[Path]
    dataset: Path
    stream: Path


def write_wheel(path: Path, members: Sequence[tuple[str | zipfile.ZipInfo, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members:
            wheel.writestr(name, content)
    return path


def make_dataset(
    folder: Path,
    texts: Sequence[str],
    tokenizer: Path,
    *,
    parts: int = 1,
    holdout_bytes: int = 0,
) -> Made:
    members = [(f"texts/{number}.md", text.encode()) for number, text in enumerate(texts)]
    corpus = write_wheel(folder / "corpus.whl", members)
    index = folder / "index.json"
    index_corpus(SOURCE, corpus, order="shuffled", parts=parts, output=index)
    files = [folder / str(parts) / f"part-{part:05d}.bin" for part in range(parts)]
    for part, file in enumerate(files):
        tokenize_part(SOURCE, corpus, index, tokenizer, part=part, output=file)
    dataset, stream = folder / str(parts) / "dataset.json", folder / "stream.json"
    build_dataset(
        files,
        index,
        tokenizer,
        source_info={"name": "tiny"},
        holdout_bytes=holdout_bytes,
        dataset_output=dataset,
        stream_output=stream,
    )
    return Made(corpus, index, tokenizer, files, dataset, stream)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus = write_wheel(folder / "corpus.whl", [("texts/prose.md", PROSE.encode())])
    index_corpus(SOURCE, corpus, order="listed", parts=1, output=folder / "index.json")
    output = folder / "tokenizer.json"
    train_tokenizer(SOURCE, corpus, folder / "index.json", vocabulary_size=300, holdout_bytes=0, output=output)
    return output


@pytest.fixture(scope="session")
def make(tokenizer_file: Path) -> Callable[..., Made]:
    """`make_dataset` with the small tokenizer."""

    def made(folder: Path, texts: Sequence[str], **options: int) -> Made:
        return make_dataset(folder, texts, tokenizer_file, **options)

    return made


@pytest.fixture
def wheel() -> Callable[..., Path]:
    return write_wheel


@pytest.fixture
def source() -> WheelSource:
    return SOURCE


@pytest.fixture
def prose() -> str:
    return PROSE
