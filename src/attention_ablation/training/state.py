"""A run's private folder: its lock, its autosaves, its snapshots until they are published.

No Snakemake rule declares it, so Snakemake never deletes it. It records the run digest and the hash of the token
stream, and whatever does not belong to both is discarded, and said. Nothing in it is trusted without a
manifest of sizes and hashes, and every manifest is written last.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attention_ablation.errors import UserError
from attention_ablation.files import fsync, sha256_of, write_json

MANIFEST = "manifest.json"
KEPT_AUTOSAVES = 2

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's lock. A job whose Snakemake was killed lives on: the next one waits for it and says so."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            log.warning("waiting: %s is at work on this run", file.read().strip() or "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def keep_only_if_of(folder: Path, identity: dict[str, Any], stream_sha256: str) -> None:
    """Discard the folder's content unless it is of this run and this token stream; then record both."""
    record = folder / "identity.json"
    wanted = {"run": identity, "stream": stream_sha256}
    if record.exists():
        found = json.loads(record.read_text(encoding="utf-8"))
        if found == wanted:
            return
        different = "token stream" if found.get("run") == identity else "run identity"
        log.warning("the state in %s is of another %s: discarded", folder, different)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in ("lock", "train.log"):
            path.unlink()
    write_json(record, wanted)


# --- manifests ------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, files: Sequence[dict[str, Any]] | None = None) -> None:
    """Write the manifest of a folder's files: size and sha256 of each, beside whatever `files` says of them."""
    known = {entry["file"]: entry for entry in files or []}
    entries = []
    for path in sorted(path for path in folder.iterdir() if path.name != MANIFEST):
        fsync(path)
        facts = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        entries.append(known.get(path.name, {}) | facts)
    fsync(folder)
    write_json(folder / MANIFEST, {"files": entries})


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """The manifest's entries, each checked against its file's size and hash.

    Raises UserError that names the first file which is missing or not the one recorded.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder / MANIFEST}: no whole manifest") from error
    for entry in entries:
        path = folder / entry["file"]
        if not path.exists():
            raise UserError(f"{path}: missing, the manifest beside it names it")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise UserError(f"{path}: {size} bytes, the manifest beside it says {entry['bytes']}")
        if sha256_of(path) != entry["sha256"]:
            raise UserError(f"{path}: its content is not what the manifest beside it recorded")
    return list(entries)


# --- autosaves ------------------------------------------------------------------------------------------------


def autosaves(folder: Path) -> list[Path]:
    """Autosave folders, newest first; whole or not."""
    return sorted(folder.glob("autosave/step-*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def newest_whole_autosave(folder: Path) -> tuple[int, Path] | None:
    """Step and folder of the newest autosave whose files are all as recorded; what is not whole is said, removed."""
    for path in autosaves(folder):
        try:
            read_manifest(path)
        except UserError as error:
            log.warning("autosave %s is not whole (%s): taking the one before it", path.name, error)
            shutil.rmtree(path)
        else:
            return int(path.name.partition("-")[2]), path
    return None


def remove_autosave(path: Path) -> None:
    """Remove an autosave, its manifest first, so that half a folder is never taken for a whole one."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def drop_old_autosaves(folder: Path) -> None:
    """Keep the newest two."""
    for path in autosaves(folder)[KEPT_AUTOSAVES:]:
        remove_autosave(path)


# --- publishing -----------------------------------------------------------------------------------------------


def publish(source: Path, target: Path) -> None:
    """Hard-link a whole folder of files to `target`, replacing what is there.

    The links cost no disk, and the files outlive a Snakemake that deletes its outputs.
    """
    temporary = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in source.iterdir():
        os.link(path, temporary / path.name)
    fsync(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    fsync(target.parent)
