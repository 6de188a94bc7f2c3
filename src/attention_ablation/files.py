"""Files that are either whole or absent, and their hashes."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Force a file's or a folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well, it takes `path`'s name at once.

    A block that raises, or a process that dies, leaves `path` as it was. The temporary name starts with a dot
    and ends with `path`'s own suffix, since some writers choose the format by it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.uname().nodename}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # some writers make files that only their owner may read
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, keys in the order given, whole or not at all."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
