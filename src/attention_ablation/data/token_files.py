"""Token files (`.bin`) as the llm.c family of projects has them.

A header of 256 little-endian int32 (magic, version, number of tokens, zeros), then the tokens, little-endian. The
magic tells how wide a token is: uint16 for GPT-2's vocabulary and every smaller one, uint32 where ids pass 65,535.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from attention_ablation.errors import UserError
from attention_ablation.files import replacing

HEADER_BYTES = 256 * 4


@dataclass(frozen=True)
class TokenFormat:
    """One kind of token file."""

    magic: int
    version: int
    token: np.dtype

    @property
    def largest_id(self) -> int:
        """The largest id that a token can have."""
        return int(np.iinfo(self.token).max)


NARROW = TokenFormat(20240520, 1, np.dtype("<u2"))
WIDE = TokenFormat(20240801, 7, np.dtype("<u4"))
FORMATS = {token_format.magic: token_format for token_format in (NARROW, WIDE)}


def format_for(vocabulary_size: int) -> TokenFormat:
    """The narrowest format that holds every id of a vocabulary."""
    return NARROW if vocabulary_size <= NARROW.largest_id + 1 else WIDE


@dataclass(frozen=True)
class Header:
    """What the header of a token file says."""

    tokens: int
    format: TokenFormat


class TokenFileWriter:
    """Writes a token file a few tokens at a time: memory does not grow with the file.

    with TokenFileWriter.create(path) as writer:
        writer.write(ids)
    """

    def __init__(self, path: Path, file: BinaryIO, token_format: TokenFormat) -> None:
        self.tokens = 0
        self._path = path
        self._file = file
        self._format = token_format

    @classmethod
    @contextmanager
    def create(cls, path: Path, token_format: TokenFormat = NARROW) -> Iterator[Self]:
        """The file appears under its name when the block ends well, and not otherwise."""
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                file.write(bytes(HEADER_BYTES))
                writer = cls(path, file, token_format)
                yield writer
                file.seek(0)
                file.write(_header(path, writer.tokens, token_format))
        except OSError as error:
            raise UserError(
                f"{path}: could not be written ({error.strerror or error}); free some space, then start again"
            ) from None

    def write(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens.

        Raises:
            UserError: an id does not fit in the format's tokens.
        """
        if len(ids) == 0:
            return
        array = np.asarray(ids)
        if array.dtype.kind not in "iu":
            raise TypeError(f"token ids are integers, not {array.dtype}")
        smallest, largest = int(array.min()), int(array.max())
        if smallest < 0 or largest > self._format.largest_id:
            unfit = smallest if smallest < 0 else largest
            raise UserError(
                f"{self._path}: token id {unfit:,} does not fit the file's {self._format.token.name} tokens, "
                f"0 to {self._format.largest_id:,}; the tokenizer's vocabulary is larger than it says"
            )
        self._file.write(array.astype(self._format.token).tobytes())
        self.tokens += len(array)


def read_header(path: Path) -> Header:
    """The header of a token file, after magic, version and size are checked.

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
    token_format = FORMATS.get(magic)
    if token_format is None:
        known = " or ".join(f"{known.magic} ({known.token.name})" for known in FORMATS.values())
        raise UserError(f"{path}: magic is {magic}, expected {known}; this is another kind of token file")
    if version != token_format.version:
        raise UserError(
            f"{path}: version is {version}, expected {token_format.version}; this is another kind of token file"
        )
    expected = HEADER_BYTES + tokens * token_format.token.itemsize
    if tokens < 0 or size != expected:
        raise UserError(
            f"{path}: {size:,} bytes, expected {expected:,} for the {tokens:,} tokens of its header; "
            "it was cut or damaged: make or copy it again"
        )
    return Header(tokens, token_format)


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a file as a read-only array, uint16 or uint32, that stays on disk until it is read."""
    header = read_header(path)
    if header.tokens == 0:
        return np.empty(0, dtype=header.format.token)
    return np.memmap(path, dtype=header.format.token, mode="r", offset=HEADER_BYTES, shape=(header.tokens,))


def _header(path: Path, tokens: int, token_format: TokenFormat) -> bytes:
    if tokens > np.iinfo("<i4").max:
        raise UserError(
            f"{path}: {tokens:,} tokens, but the header can only count {np.iinfo('<i4').max:,}; use more data.parts"
        )
    header = np.zeros(256, dtype="<i4")
    header[:3] = token_format.magic, token_format.version, tokens
    return header.tobytes()
