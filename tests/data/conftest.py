"""Tiny corpora: wheels written on the spot, and the whole way from a corpus to a dataset."""

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from attention_ablation.data.dataset import build_dataset
from attention_ablation.data.index_corpus import index_corpus
from attention_ablation.data.sources import Corpus, WheelSource, open_corpus
from attention_ablation.data.tokenize import tokenize_part
from attention_ablation.data.tokenizer import load_tokenizer
from attention_ablation.data.train_tokenizer import train_bpe

SOURCE = WheelSource("tiny", "1.0", "0" * 64, "texts/*.md")
PROSE = "The quick brown fox — naïve, 日本 — jumps over the lazy dog's back.\nIt isn't <|endoftext|> yet.\n\n" * 40


@dataclass(frozen=True)
class Made:
    """The files that the steps made of a corpus."""

    corpus: Corpus
    index: Path
    tokenizer: Path
    parts: list[Path]
    counts: list[Path]
    dataset: Path
    stream: Path


def write_wheel(path: Path, members: Sequence[tuple[str | zipfile.ZipInfo, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members:
            wheel.writestr(name, content)
    return path


def dataset_of(
    corpus: Corpus,
    folder: Path,
    tokenizer: Path,
    *,
    parts: int = 1,
    holdout_bytes: int | None = 0,
    order: str = "shuffled",
    kind: str = "bpe",
    threads: int = 1,
    batch_bytes: int = 262_144,
) -> Made:
    """All steps after the tokenizer."""
    index = folder / str(parts) / "index.json"
    index_corpus(corpus, order=order, parts=parts, output=index)
    files = [folder / str(parts) / f"part-{part:05d}.bin" for part in range(parts)]
    counts = [file.with_suffix(".json") for file in files]
    encoder = load_tokenizer(tokenizer, kind)
    for part, file in enumerate(files):
        tokenize_part(
            corpus, index, encoder, part=part, output=file, counts_output=counts[part], threads=threads,
            batch_bytes=batch_bytes,
        )  # fmt: skip
    dataset, stream = folder / str(parts) / "dataset.json", folder / "stream.json"
    build_dataset(
        files,
        tokenizer,
        encoder,
        counts=counts,
        source_info={"kind": "tiny", "license": "none"},
        holdout_bytes=holdout_bytes,
        dataset_output=dataset,
        stream_output=stream,
    )
    return Made(corpus, index, tokenizer, files, counts, dataset, stream)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    wheel = write_wheel(folder / "corpus.whl", [("texts/prose.md", PROSE.encode())])
    corpus = open_corpus(SOURCE, [wheel])
    index_corpus(corpus, order="listed", parts=1, output=folder / "index.json")
    output = folder / "tokenizer.json"
    train_bpe(corpus, folder / "index.json", vocabulary_size=300, holdout_bytes=0, sample_bytes=10**9, output=output)
    return output


@pytest.fixture(scope="session")
def make(tokenizer_file: Path) -> Callable[..., Made]:
    """A dataset of a wheel of texts, with the small tokenizer."""

    def made(folder: Path, texts: Sequence[str], **options: int) -> Made:
        members = [(f"texts/{number}.md", text.encode()) for number, text in enumerate(texts)]
        corpus = open_corpus(SOURCE, [write_wheel(folder / "corpus.whl", members)])
        return dataset_of(corpus, folder, tokenizer_file, **options)

    return made


@pytest.fixture(scope="session")
def make_of(tokenizer_file: Path) -> Callable[..., Made]:
    """A dataset of any corpus, with the small tokenizer."""

    def made(corpus: Corpus, folder: Path, **options: int) -> Made:
        return dataset_of(corpus, folder, tokenizer_file, **options)

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
