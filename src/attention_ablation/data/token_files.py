"""The token file (`.bin`) that the llm.c family of projects shares.

A header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then the tokens as
little-endian uint16. A vocabulary over 65,536 needs a wider format with a magic of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from attention_ablation.errors import UserError
from attention_ablation.files import replacing

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 256 * 4
TOKEN = np.dtype("<u2")


class TokenFileWriter:
    """Writes a token file a few tokens at a time: memory does not grow with the file.

    with TokenFileWriter.create(path) as writer:
        writer.write(ids)
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.tokens = 0
        self._path = path
        self._file = file

    @classmethod
    @contextmanager
    def create(cls, path: Path) -> Iterator[Self]:
        """The file appears under its name when the block ends well, and not otherwise."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(bytes(HEADER_BYTES))
            writer = cls(path, file)
            yield writer
            file.seek(0)
            file.write(_header(path, writer.tokens))

    def write(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens.

        Raises:
            UserError: an id does not fit in 16 bits.
        """
        if len(ids) == 0:
            return
        array = np.asarray(ids)
        if array.dtype.kind not in "iu":
            raise TypeError(f"token ids are integers, not {array.dtype}")
        smallest, largest = int(array.min()), int(array.max())
        if smallest < 0 or largest > np.iinfo(TOKEN).max:
            unfit = smallest if smallest < 0 else largest
            raise UserError(
                f"{self._path}: token id {unfit:,} does not fit the file's uint16 tokens, "
                f"0 to {np.iinfo(TOKEN).max:,}; use a tokenizer with a smaller vocabulary"
            )
        self._file.write(array.astype(TOKEN).tobytes())
        self.tokens += len(array)


def read_header(path: Path) -> int:
    """The number of tokens in a token file, after magic, version and size are checked.

    Raises:
        UserError: the file is missing, of another kind, or its size does not fit its count.
    """
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=256)
    except FileNotFoundError:
        raise UserError(f"{path}: no such token file; tokenize the corpus again") from None
    if len(header) < 256:
        raise UserError(f"{path}: {size} bytes, a token file's header alone has {HEADER_BYTES}; tokenize it again")
    magic, version, tokens = (int(value) for value in header[:3])
    for field, found, expected in [("magic", magic, MAGIC), ("version", version, VERSION)]:
        if found != expected:
            raise UserError(f"{path}: {field} is {found}, expected {expected}; this is another kind of token file")
    if tokens < 0 or size != HEADER_BYTES + tokens * TOKEN.itemsize:
        raise UserError(
            f"{path}: {size:,} bytes, expected {HEADER_BYTES + tokens * TOKEN.itemsize:,} "
            f"for the {tokens:,} tokens of its header; tokenize it again"
        )
    return tokens


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a file as a read-only uint16 array that stays on disk until it is read."""
    tokens = read_header(path)
    if tokens == 0:
        return np.empty(0, dtype=TOKEN)
    return np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES, shape=(tokens,))


def _header(path: Path, tokens: int) -> bytes:
    if tokens > np.iinfo("<i4").max:
        raise UserError(
            f"{path}: {tokens:,} tokens, but the header can only count {np.iinfo('<i4').max:,}; use more data.parts"
        )
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()
