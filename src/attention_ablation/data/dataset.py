"""Step `dataset`: the description of the token stream, after its parts are checked against the corpus."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention_ablation.data.index_corpus import IndexedDocument, read_index
from attention_ablation.data.token_files import HEADER_BYTES, map_tokens
from attention_ablation.data.tokenizer import Tokenizer
from attention_ablation.errors import UserError
from attention_ablation.files import sha256_of, write_json

CHUNK_TOKENS = 4_194_304


@dataclass
class _Stream:
    """What has been read of the stream so far; `bytes` are of text."""

    digest: Any
    tokens: int = 0
    bytes: int = 0
    holdout_tokens: int = 0


def build_dataset(
    parts: list[Path],
    index: Path,
    tokenizer: Path,
    *,
    source_info: Mapping[str, Any],
    holdout_bytes: int,
    dataset_output: Path,
    stream_output: Path,
) -> None:
    """Check the parts, in stream order, and describe them in `dataset_output` and `stream_output`.

    `dataset_output` says what the dataset is made of. `stream_output` says only what training depends on, the
    length and hash of the stream, and is left untouched when it says that already.

    `holdout_tokens` are those at the start of the stream whose text lies within its first `holdout_bytes`, which
    the tokenizer never saw: a validation split must not be longer (`TokenStream.check_validation`).

    Raises:
        UserError: a part does not hold the documents of the index.
    """
    encoder = Tokenizer(tokenizer)
    token_bytes = encoder.token_bytes()
    documents = read_index(index)
    stream = _Stream(hashlib.sha256())
    described = []
    for number, part in enumerate(parts):
        members = [document for document in documents if document.part == number]
        before = stream.tokens
        digest = _read_part(part, members, stream, token_bytes, encoder.end_of_text, holdout_bytes)
        file = os.path.relpath(part, dataset_output.parent)
        described.append({"file": file, "tokens": stream.tokens - before, "sha256": digest})
    _check_stream(stream, documents, index)
    stream_sha256 = stream.digest.hexdigest()
    _write_if_different(stream_output, {"length": stream.tokens, "sha256": stream_sha256})
    write_json(
        dataset_output,
        {
            "source": dict(source_info),
            "documents": len(documents),
            "bytes": stream.bytes,
            "tokens": stream.tokens,
            "holdout_tokens": stream.holdout_tokens,
            "stream_sha256": stream_sha256,
            "tokenizer_sha256": sha256_of(tokenizer),
            "vocabulary_size": encoder.vocabulary_size,
            "end_of_text": encoder.end_of_text,
            "parts": described,
        },
    )


def _read_part(
    part: Path,
    documents: list[IndexedDocument],
    stream: _Stream,
    token_bytes: np.ndarray,
    end_of_text: int,
    holdout_bytes: int,
) -> str:
    """Take a part into the stream; the hash of its file."""
    part_tokens = map_tokens(part)
    with part.open("rb") as file:
        file_digest = hashlib.sha256(file.read(HEADER_BYTES))
    found_documents = found_bytes = 0
    for tokens in _chunks(part_tokens):
        if int(tokens.max()) >= len(token_bytes):
            raise UserError(
                f"{part}: token {int(tokens.max())} is outside the tokenizer's vocabulary "
                f"of {len(token_bytes)}; tokenize it again"
            )
        file_digest.update(tokens.data)
        stream.digest.update(tokens.data)
        lengths = token_bytes[tokens]
        covered = stream.bytes + found_bytes + np.cumsum(lengths)
        stream.holdout_tokens += int(np.searchsorted(covered, holdout_bytes, side="right"))
        stream.tokens += len(tokens)
        found_documents += int((tokens == end_of_text).sum())
        found_bytes += int(lengths.sum())
    stream.bytes += found_bytes
    expected_bytes = sum(document.bytes for document in documents)
    if (found_documents, found_bytes) != (len(documents), expected_bytes):
        raise UserError(
            f"{part}: {found_documents} documents of {found_bytes:,} bytes, "
            f"the index says {len(documents)} of {expected_bytes:,}; tokenize it again"
        )
    return file_digest.hexdigest()


def _check_stream(stream: _Stream, documents: list[IndexedDocument], index: Path) -> None:
    total = sum(document.bytes for document in documents)
    if stream.bytes != total:
        raise UserError(f"{index}: {total:,} bytes, the parts given hold {stream.bytes:,}; give every part once")


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
