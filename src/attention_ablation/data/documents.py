"""Documents out of files: plain text, JSON lines, Parquet, the first two also compressed.

Every reader yields one document at a time and long documents in chunks, so memory depends on neither the size of a
file nor, but for the line of JSON or the value of Parquet that holds it, on the size of a document. A null stands
for a row without text: it is yielded as None, so that it is counted and not lost.
"""

import codecs
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq

from attention_ablation.data.json_text import find_string, string_chunks
from attention_ablation.errors import UserError

BLOCK_BYTES = 1_048_576
# A longer line of JSON is not made into one Python object: its text is cut out of it chunk by chunk.
LONG_LINE_BYTES = 8_388_608
# One by one costs 3 us a row more than sixteen at once, and holds no second long row.
ROWS_AT_ONCE = 1

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = {
    ".txt": "text", ".text": "text", ".md": "text", ".markdown": "text", ".rst": "text", "": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".parquet": "parquet",
}  # fmt: skip
BYTE_ORDER_MARK = "\ufeff"

Errors = Literal["strict", "replace"]


@dataclass(frozen=True)
class Document:
    """One document; `chunks` are its text in order, to be read once, before the next document is asked for."""

    where: str  # file, and line or row
    chunks: Iterable[str]


def format_of(path: Path) -> tuple[str, str | None]:
    """The format of a file, text, jsonl or parquet, and its compression, if any, by its name.

    Raises:
        UserError: the name tells none.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    kind = FORMATS.get(suffix)
    if kind is None or (kind == "parquet" and compression):
        raise UserError(
            f"{path}: {''.join(path.suffixes[-2:])} is no known format; "
            f"known are {', '.join(known for known in FORMATS if known)}, all but Parquet also .gz or .zst: "
            "rename the file or narrow data.source.paths"
        )
    return kind, compression


def decoded(blocks: Iterable[bytes | memoryview], where: str, errors: Errors) -> Iterator[str]:
    """UTF-8 text of a document's bytes; raises UserError with the offset of a byte that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0  # of the first byte that the decoder has not turned into text
    for block in _with_last(blocks):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block or b"", final=block is None)
        except UnicodeDecodeError as error:
            raise UserError(_not_utf8(where, offset - pending + error.start, error)) from None
        offset += len(block or b"")
        if text:
            yield text


def _with_last(blocks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview | None]:
    yield from blocks
    yield None


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> str:
    return (
        f"{where}: not UTF-8 at byte {offset} ({error.reason}); convert it, leave it out, "
        "or set data.source.errors: replace"
    )


def without_mark(chunks: Iterable[str]) -> Iterator[str]:
    """A file's text without the byte order mark at its start, which is no text."""
    first = True
    for chunk in chunks:
        yield chunk.removeprefix(BYTE_ORDER_MARK) if first else chunk
        first = False


@contextmanager
def telling_what_is_wrong(path: Path, compression: str | None = None) -> Iterator[None]:
    """Turn what goes wrong in reading a file into a UserError with its name."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: the file is gone; bring it back, or start the workflow again without it") from None
    except OSError as error:
        if compression is None:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        raise UserError(
            f"{path}: the {compression} file ends early or is damaged ({error}); make or copy it again"
        ) from None


@contextmanager
def opened(path: Path, compression: str | None = None) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed."""
    with telling_what_is_wrong(path, compression):
        if compression is None:
            with path.open("rb") as file:
                yield file
        else:
            with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, compression) as stream:
                yield cast(BinaryIO, _Buffered(stream))


class _Buffered:
    """`read` and `readline` of a decompressed stream."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._buffer = b""
        self._position = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end."""
        if self._position < len(self._buffer):
            found = self._buffer[self._position : self._position + size]
            self._position += len(found)
            return found
        return self._stream.read(size)

    def readline(self, limit: int = -1) -> bytes:
        """Up to and including the next newline, or the end, or `limit` bytes."""
        found = []
        length = 0
        while True:
            if self._position == len(self._buffer):
                self._buffer, self._position = self._stream.read(BLOCK_BYTES), 0
            end = self._buffer.find(b"\n", self._position) + 1 or len(self._buffer)
            if 0 <= limit - length < end - self._position:
                end = self._position + limit - length
            found.append(self._buffer[self._position : end])
            length += end - self._position
            self._position = end
            if not self._buffer or found[-1].endswith(b"\n") or length == limit:
                return b"".join(found)


# --- text -----------------------------------------------------------------------------------------------------


def _blocks_of(file: BinaryIO, path: Path, compression: str | None) -> Iterator[bytes]:
    while True:
        with telling_what_is_wrong(path, compression):
            block = file.read(BLOCK_BYTES)
        if not block:
            return
        yield block


def read_text(path: Path, compression: str | None, errors: Errors) -> Iterator[Document]:
    """A text file, which is one document."""
    with opened(path, compression) as file:
        blocks = _blocks_of(file, path, compression)
        yield Document(str(path), without_mark(decoded(blocks, str(path), errors)))


def read_separated_text(
    path: Path, compression: str | None, start: int, stop: int | None, *, separator: str, errors: Errors
) -> Iterator[Document]:
    """The documents of a text file that begin at bytes `start` to `stop`; lines that read `separator` stand between.

    Any ranges that cover the file give each of its documents once. Several separators in a row are one.
    """
    mark = separator.encode()
    # Far enough back to see a separator that ends at `start`, whatever its line's end is.
    begin = max(0, start - len(mark) - 3)
    open_at: int | None = 0 if start == 0 else None  # where the document at hand began, if it is this range's
    lines: list[bytes] = []
    for offset, line in _lines(path, compression, begin, None):
        if line.removesuffix(b"\n").removesuffix(b"\r") == mark:
            if open_at is not None and lines:
                yield _joined(path, open_at, lines, errors)
            following = offset + len(line)
            if stop is not None and following >= stop:
                return
            open_at, lines = (following if following >= start else None), []
        elif open_at is not None:
            lines.append(line)
        elif stop is not None and offset >= stop:
            return
    if open_at is not None and lines:
        yield _joined(path, open_at, lines, errors)


def _joined(path: Path, offset: int, lines: list[bytes], errors: Errors) -> Document:
    where = f"{path}: document at byte {offset}"
    chunks = decoded(_in_blocks(lines), where, errors)
    return Document(where, without_mark(chunks) if offset == 0 else chunks)


def _in_blocks(lines: list[bytes]) -> Iterator[bytes]:
    block: list[bytes] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield b"".join(block)
            block, size = [], 0
    yield b"".join(block)


def _lines(path: Path, compression: str | None, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines that begin at bytes `start` to `stop`, each with its offset; a range that begins within a line
    leaves it to the range before."""
    with opened(path, compression) as file:
        offset = start
        if start > 0:
            file.seek(start - 1)
            offset -= 1
            while True:
                skipped = file.readline(BLOCK_BYTES)
                offset += len(skipped)
                if not skipped or skipped.endswith(b"\n"):
                    break
        while stop is None or offset < stop:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


# --- JSON lines -----------------------------------------------------------------------------------------------


def read_json_lines(
    path: Path, compression: str | None, start: int, stop: int | None, *, field: str, errors: Errors
) -> Iterator[Document | None]:
    """The documents of the lines that begin at bytes `start` to `stop`; blank lines hold none."""
    for offset, line in _lines(path, compression, start, stop):
        if offset == 0:
            line = line.removeprefix(BYTE_ORDER_MARK.encode())
        if line.isspace():
            continue
        try:
            yield _json_document(path, line, field, errors)
        except UnicodeDecodeError as error:
            where = f"{path}: line {_line_number(path, compression, offset)}"
            raise UserError(_not_utf8(where, offset + error.start, error)) from None
        except (ValueError, RecursionError) as error:
            where = f"{path}: line {_line_number(path, compression, offset)}"
            raise UserError(f"{where}: {error}") from None


def _json_document(path: Path, line: bytes, field: str, errors: Errors) -> Document | None:
    if len(line) > LONG_LINE_BYTES:
        return _long_json_document(path, line, field, errors)
    value = _field_of(line.decode("utf-8", errors), field)
    if value is None:
        return None
    return Document(str(path), [_without_surrogates(value, errors)])


def _long_json_document(path: Path, line: bytes, field: str, errors: Errors) -> Document | None:
    """Like the short one, but the text is decoded chunk by chunk while it is read."""
    found = find_string(line, field)
    if found is None:  # no text, or no JSON: the message is the short one's
        value = _field_of(line.decode("utf-8", errors), field)
        return None if value is None else Document(str(path), [_without_surrogates(value, errors)])
    start, stop = found
    if _field_of((line[:start] + line[stop:]).decode("utf-8", errors), field) is None:  # the rest is JSON too
        return None

    def chunks() -> Iterator[str]:
        for chunk in string_chunks(line, start, stop, errors):
            yield _without_surrogates(chunk, errors)

    for _ in chunks():  # what is wrong with it is told before any of it is used
        pass
    return Document(str(path), chunks())


def _field_of(text: str, field: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); mend the line or leave the file out") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is wanted, found {type(value).__name__}; mend the line")
    if field not in value:
        raise ValueError(f"no field {field!r}; it has {', '.join(value)}: set data.source.text_field")
    text_or_null = value[field]
    if not isinstance(text_or_null, str | None):
        raise ValueError(
            f"field {field!r} is of type {type(text_or_null).__name__}, text is wanted: set data.source.text_field"
        )
    return text_or_null


def _without_surrogates(text: str, errors: Errors) -> str:
    """JSON can write half a character (`"\\ud800"`), which no UTF-8 text holds."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if errors == "strict":
            raise ValueError(
                f"character {error.start} of the text is half of one (a lone surrogate); mend the line, "
                "or set data.source.errors: replace"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _line_number(path: Path, compression: str | None, offset: int) -> int:
    """Of the line that begins at `offset`, from 1; only wanted for a message."""
    number = 1
    with opened(path, compression) as file:
        while offset > 0:
            block = file.read(min(BLOCK_BYTES, offset))
            number += block.count(b"\n")
            offset -= len(block)
    return number


# --- Parquet --------------------------------------------------------------------------------------------------


@contextmanager
def _parquet(path: Path, column: str) -> Iterator[tuple[pq.ParquetFile, int]]:
    """The file, and the number of the leaf column that holds the text."""
    try:
        # Read as a stream: else a whole column of a row group is held at once.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(
                    f"{path}: no column {column!r}; it has {', '.join(names)}: set data.source.text_field"
                )
            if not _is_text(file.schema_arrow.field(column).type):
                found = file.schema_arrow.field(column).type
                raise UserError(f"{path}: column {column!r} is of type {found}, text is wanted")
            leaves = [file.metadata.schema.column(leaf).path for leaf in range(file.metadata.num_columns)]
            yield file, leaves.index(column)
    except FileNotFoundError:
        raise UserError(f"{path}: the file is gone; bring it back, or start the workflow again without it") from None
    except (pa.ArrowException, OSError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"{path}: not a whole Parquet file ({line}); make or copy it again") from None


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
        pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def row_group_bytes(path: Path, column: str) -> list[int]:
    """Uncompressed bytes of the text in each row group of a Parquet file."""
    with _parquet(path, column) as (file, leaf):
        groups = range(file.num_row_groups)
        return [file.metadata.row_group(group).column(leaf).total_uncompressed_size for group in groups]


def read_row_groups(path: Path, start: int, stop: int, *, column: str, errors: Errors) -> Iterator[Document | None]:
    """The documents of the row groups `start` to `stop`; a null is None."""
    with _parquet(path, column) as (file, _):
        row = sum(file.metadata.row_group(group).num_rows for group in range(start))
        for group in range(start, stop):
            if file.metadata.row_group(group).num_rows == 0:
                continue
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[column], use_threads=False):
                for value in _values(batch.column(0)):
                    if value is None:
                        yield None
                    else:
                        where = f"{path}: row {row} (the first is 0)"
                        yield Document(where, decoded(_blocks_of_value(value), where, errors))
                    row += 1


def _values(column: pa.Array) -> Iterator[memoryview | None]:
    """Each row's bytes, where they lie: a scalar of Arrow's would be a copy."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(pa.large_binary())
    _, offsets, data = column.buffers()
    edges = memoryview(offsets).cast("q")[column.offset : column.offset + len(column) + 1]
    content = memoryview(data if data is not None else b"")
    for i, valid in enumerate(column.is_valid()):
        yield content[edges[i] : edges[i + 1]] if valid.as_py() else None


def _blocks_of_value(value: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(value), BLOCK_BYTES):
        yield value[start : start + BLOCK_BYTES]


def size_of(path: Path) -> int:
    """Bytes of a file; raises UserError when it is gone."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; bring it back, or narrow data.source.paths") from None
