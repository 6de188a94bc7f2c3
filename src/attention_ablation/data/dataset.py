"""Step `dataset`: the description of the token stream, after its parts are checked."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attention_ablation.data.token_files import HEADER_BYTES, TokenFormat, map_tokens, read_header
from attention_ablation.data.tokenizer import Tokenizer
from attention_ablation.errors import UserError
from attention_ablation.files import sha256_of, write_json

CHUNK_TOKENS = 4_194_304

Report = Callable[[int, int], None]  # tokens read, tokens in all


@dataclass
class _Stream:
    """What has been read of the stream so far; `bytes` are of text."""

    end_of_text: int
    vocabulary_size: int
    token_bytes: np.ndarray | None
    holdout_bytes: int | None
    digest: Any = field(default_factory=hashlib.sha256)
    tokens: int = 0
    bytes: int = 0
    documents: int = 0
    document_begins: int = 0  # token at which the document at hand began
    longest_document: int = 0  # tokens, the end of text before it included
    holdout_tokens: int = 0

    def take(self, tokens: np.ndarray) -> None:
        """Count the next tokens."""
        self.digest.update(tokens.data)
        marks = self.tokens + np.flatnonzero(tokens == self.end_of_text)
        if len(marks):
            lengths = np.diff(marks, prepend=self.document_begins)
            self.longest_document = max(self.longest_document, int(lengths.max()))
            self.document_begins = int(marks[-1])
        self.documents += len(marks)
        if self.token_bytes is not None:
            lengths = self.token_bytes[tokens]
            if self.holdout_bytes is not None and self.bytes <= self.holdout_bytes:
                covered = self.bytes + np.cumsum(lengths)
                self.holdout_tokens += int(np.searchsorted(covered, self.holdout_bytes, side="right"))
            self.bytes += int(lengths.sum())
        self.tokens += len(tokens)

    def finish(self) -> None:
        """Count what the end of the stream ends."""
        self.longest_document = max(self.longest_document, self.tokens - self.document_begins)
        if self.holdout_bytes is None:  # the tokenizer was not trained on this corpus
            self.holdout_tokens = self.tokens


def build_dataset(
    parts: Sequence[Path],
    tokenizer_file: Path,
    tokenizer: Tokenizer,
    *,
    counts: Sequence[Path] | None,
    source_info: Mapping[str, Any],
    holdout_bytes: int | None,
    dataset_output: Path,
    stream_output: Path,
    report: Report | None = None,
) -> None:
    """Check the parts, in stream order, and describe them in `dataset_output` and `stream_output`.

    `counts` are those that `tokenize_part` wrote, one a part; None for shards that exist already. `dataset_output`
    says what the dataset is made of. `stream_output` says only what training depends on, the length and hash of the
    stream, and is left untouched when it says that already.

    `holdout_tokens` are those at the start of the stream whose text lies within its first `holdout_bytes`, which
    the tokenizer never saw: a validation split must not be longer (`TokenStream.check_validation`); None: all.

    Raises:
        UserError: a part is damaged, holds other than was counted, or an id beyond the vocabulary; or all are empty.
    """
    stream = _Stream(tokenizer.end_of_text, tokenizer.vocabulary_size, tokenizer.token_bytes(), holdout_bytes)
    headers = [read_header(part) for part in parts]
    _check_formats(parts, [header.format for header in headers])
    total = sum(header.tokens for header in headers)
    described = []
    null_rows = longest_bytes = 0
    for number, part in enumerate(parts):
        before = stream.documents, stream.bytes, stream.tokens
        digest = _read_part(part, stream, total, report)
        here = stream.documents - before[0], stream.bytes - before[1], stream.tokens - before[2]
        if counts is not None:
            counted = _read_counts(counts[number])
            _check_counts(part, here, counted, bytes_known=stream.token_bytes is not None)
            null_rows += counted["null_rows"]
            longest_bytes = max(longest_bytes, counted["longest_document_bytes"])
            if stream.token_bytes is None:
                stream.bytes += counted["bytes"]
        described.append({"file": _reference(part, dataset_output), "tokens": here[2], "sha256": digest})
    stream.finish()
    if stream.tokens == stream.documents:
        raise UserError(
            f"{dataset_output}: the corpus is empty, {stream.documents:,} documents without text; check data.source"
        )
    stream_sha256 = stream.digest.hexdigest()
    _write_if_different(stream_output, {"length": stream.tokens, "sha256": stream_sha256})
    write_json(
        dataset_output,
        {
            "source": dict(source_info),
            "documents": stream.documents,
            "bytes": stream.bytes if counts is not None or stream.token_bytes is not None else None,
            "tokens": stream.tokens,
            "longest_document_tokens": stream.longest_document,
            "longest_document_bytes": longest_bytes if counts is not None else None,
            "null_rows": null_rows,
            "holdout_tokens": stream.holdout_tokens,
            "stream_sha256": stream_sha256,
            "tokenizer_sha256": sha256_of(tokenizer_file),
            "vocabulary_size": tokenizer.vocabulary_size,
            "end_of_text": tokenizer.end_of_text,
            "parts": described,
        },
    )


def _check_formats(parts: Sequence[Path], formats: Sequence[TokenFormat]) -> None:
    for part, found in zip(parts, formats, strict=True):
        if found != formats[0]:
            raise UserError(
                f"{part}: {found.token.name} tokens, {parts[0]} has {formats[0].token.name}; one stream has one kind"
            )


def _read_part(part: Path, stream: _Stream, total: int, report: Report | None) -> str:
    """Take a part into the stream; the hash of its file."""
    part_tokens = map_tokens(part)
    with part.open("rb") as file:
        file_digest = hashlib.sha256(file.read(HEADER_BYTES))
    for tokens in _chunks(part_tokens):
        largest = int(tokens.max())
        if largest >= stream.vocabulary_size:
            raise UserError(
                f"{part}: token {largest} is outside the tokenizer's vocabulary of {stream.vocabulary_size}; "
                "tokenize it again, or name the tokenizer that made it in data.tokenizer"
            )
        file_digest.update(tokens.data)
        stream.take(tokens)
        if report is not None:
            report(stream.tokens, total)
    return file_digest.hexdigest()


def _read_counts(path: Path) -> dict[str, int]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not the counts of a part ({error!r}); tokenize the part again") from None


def _check_counts(part: Path, found: tuple[int, int, int], counted: dict[str, int], *, bytes_known: bool) -> None:
    expected = counted["documents"], counted["bytes"] if bytes_known else 0, counted["tokens"]
    if found != expected:
        raise UserError(
            f"{part}: {found[0]:,} documents of {found[1]:,} bytes in {found[2]:,} tokens, when it was written there "
            f"were {expected[0]:,} of {expected[1]:,} in {expected[2]:,}; tokenize it again"
        )


def _reference(part: Path, dataset: Path) -> str:
    """How the description names a part: relative to itself, or as given where that was an absolute path."""
    return str(part) if part.is_absolute() and not dataset.is_absolute() else os.path.relpath(part, dataset.parent)


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield np.array(tokens[start : start + CHUNK_TOKENS])


def _write_if_different(path: Path, value: dict[str, Any]) -> None:
    try:
        written = json.loads(path.read_bytes())
    except (OSError, ValueError):
        written = None
    if written != value:
        write_json(path, value)
