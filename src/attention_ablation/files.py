"""Files that are either whole or absent, and their hashes."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
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


# A file that changed this shortly ago could change again within the same tick of its file system's clock.
SETTLED_NANOSECONDS = 2_000_000_000


def remembered_sha256(
    files: Sequence[Path], memory: Path, report: Callable[[int, int], None] | None = None
) -> list[str]:
    """SHA-256 of each file; one whose size and time of change are those in `memory` is not read again.

    `memory` is a JSON file of this function's own. It may be deleted at any time, and two processes may use it at
    once: the worst is a file hashed twice. `report` hears of the bytes hashed, of those to hash, where any are.
    """
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        known = {}
    stats = [file.stat() for file in files]
    keys = [os.fspath(file) for file in files]
    entries = {key: [stat.st_size, stat.st_mtime_ns] for key, stat in zip(keys, stats, strict=True)}
    total = sum(size for key, (size, changed) in entries.items() if known.get(key, [])[:2] != [size, changed])
    done, kept = 0, {}
    for key, entry in entries.items():
        remembered = known.get(key, [])
        if remembered[:2] == entry:
            kept[key] = remembered
            continue
        kept[key] = [*entry, sha256_of(Path(key))]
        done += entry[0]
        if report is not None:
            report(done, total)
    settled = {key: entry for key, entry in kept.items() if time.time_ns() - entry[1] > SETTLED_NANOSECONDS}
    if settled != known:
        write_text(memory, json.dumps(settled))
    return [kept[key][2] for key in keys]
