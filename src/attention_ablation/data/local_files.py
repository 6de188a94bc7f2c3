"""Files of this machine by glob: their names, independent of where they lie, and what is in them.

The identity of a study's data is taken from here at every start of the workflow: nothing heavy is imported.
"""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_ablation.errors import UserError
from attention_ablation.files import remembered_sha256


@dataclass(frozen=True)
class LocalFile:
    """`name` is relative to the folder that all patterns share, so moving that folder changes no name."""

    name: str
    path: Path


def list_files(patterns: Sequence[str]) -> list[LocalFile]:
    """The files that match, in the order of the patterns, by name within each, every file once.

    `*` stays within one folder, `**` is any number of them; a name that begins with a dot is matched by a pattern
    that begins with one only.

    Raises:
        UserError: a pattern matches no file, or a name is not UTF-8.
    """
    base = os.path.commonpath([Path.cwd() / _fixed_folder(pattern) for pattern in patterns])
    found: dict[str, Path] = {}
    for pattern in patterns:
        paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))  # noqa: PTH207, PTH113
        if not paths:
            raise UserError(f"data.source.paths: no file matches {pattern!r} in {Path.cwd()}")
        for path in paths:
            name = Path(os.path.relpath(path, base)).as_posix()
            try:
                name.encode()
            except UnicodeEncodeError:
                raise UserError(f"data.source.paths: file name {path!r} is not UTF-8; rename it") from None
            found.setdefault(name, Path(path))
    return [LocalFile(name, path) for name, path in found.items()]


def content_of(
    files: Sequence[LocalFile], memory: Path, report: Callable[[int, int], None] | None = None
) -> list[tuple[str, str]]:
    """Name and SHA-256 of each file; `memory` and `report` as in `remembered_sha256`.

    Raises:
        UserError: a file is gone or cannot be read.
    """
    try:
        hashes = remembered_sha256([file.path for file in files], memory, report)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; bring it back, or narrow data.source.paths") from None
    return [(file.name, sha256) for file, sha256 in zip(files, hashes, strict=True)]


def _fixed_folder(pattern: str) -> str:
    """The folders of a pattern before its first wildcard."""
    folder = Path(pattern).parent
    for parent in [folder, *folder.parents]:
        if not glob.has_magic(str(parent)):
            return str(parent)
    return "."
