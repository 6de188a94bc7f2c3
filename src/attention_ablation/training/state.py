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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from attention_ablation.errors import UserError
from attention_ablation.files import fsync, sha256_of, write_json

MANIFEST = "manifest.json"
FAILURE = "failed.json"  # why the run failed by its own nature
SNAPSHOTS = "snapshots"  # folder of the finished ones
RECORD = "snapshots.json"  # beside it: what each was when it was saved
KEPT_AUTOSAVES = 2

log = logging.getLogger(__name__)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's lock. A job whose Snakemake was killed lives on: the next one waits for it and says so.

    The kernel drops the lock with its process, however that ends; a name found in a lock that nobody holds is that
    of a process which was killed, and is said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting: %s is at work on this run", _owner(file) or "another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        if left := _owner(file):
            log.warning("%s had this run and was killed: going on from what it saved", left)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _owner(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip()


def keep_only_if_of(folder: Path, identity: dict[str, Any], stream_sha256: str) -> None:
    """Discard the folder's content unless it is of this run and this token stream; then record both.

    A finished run is never discarded: raises UserError when the token stream under its name is another one.
    """
    record = folder / "identity.json"
    wanted = {"run": identity, "stream": stream_sha256}
    found = read_json(record)
    if found == wanted:
        return
    if found is not None:
        same_run = isinstance(found, dict) and found.get("run") == identity
        if same_run and (folder / SNAPSHOTS / MANIFEST).exists():
            raise UserError(
                f"{folder}: the finished run was trained on token stream {found.get('stream')}, but the data of the "
                f"same name is now {stream_sha256}: restore the data, or remove this folder to train again"
            )
        log.warning(
            "the state in %s is of another %s: discarded", folder, "token stream" if same_run else "run identity"
        )
    elif record.exists():
        log.warning("%s is damaged: the state is discarded", record)
    elif autosaves(folder) or (folder / SNAPSHOTS).exists():
        log.warning("%s is missing: the state beside it is discarded", record)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock" and not path.name.startswith("train.log"):
            path.unlink()
    write_json(record, wanted)


# --- failures by the run's own nature ---------------------------------------------------------------------------


def record_failure(folder: Path, error: str) -> None:
    """Remember that the run fails by its own nature, so that a retry does not burn the hours again."""
    write_json(folder / FAILURE, {"error": error})


def failure_of(folder: Path) -> str | None:
    """Why the run failed by its own nature, as it was told the first time, or None."""
    if not (folder / FAILURE).exists():
        return None
    found = read_json(folder / FAILURE)
    return str(found.get("error")) if isinstance(found, dict) else f"{folder / FAILURE}: the run failed before"


def check_not_failed(folder: Path) -> None:
    """Raise the recorded failure again."""
    if error := failure_of(folder):
        raise UserError(error)


def forget_failure(folder: Path) -> str | None:
    """Let the run be tried again; returns the failure that was recorded, or None."""
    error = failure_of(folder)
    (folder / FAILURE).unlink(missing_ok=True)
    return error


def read_json(path: Path) -> Any:
    """The value of a JSON file of ours, or None where there is no whole one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# --- manifests ------------------------------------------------------------------------------------------------


def facts_of(path: Path) -> dict[str, Any]:
    """Name, size and sha256 of a file, once it is on disk."""
    fsync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write_manifest(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Write the folder's manifest, last of all: from then on the folder counts as whole."""
    fsync(folder)
    write_json(folder / MANIFEST, {"files": list(entries)})


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """The manifest's entries, each checked against its file's size and hash.

    Raises UserError that names the first file which is missing or not the one recorded.
    """
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or "files" not in manifest:
        raise UserError(f"{folder / MANIFEST}: no whole manifest")
    for entry in manifest["files"]:
        check_file(folder, entry)
    return list(manifest["files"])


def check_file(folder: Path, entry: dict[str, Any]) -> None:
    """Raise UserError unless the file that `entry` describes is there, as recorded."""
    path = folder / entry["file"]
    if not path.exists():
        raise UserError(f"{path}: missing, though it was recorded")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(f"{path}: {size} bytes, recorded were {entry['bytes']}")
    if sha256_of(path) != entry["sha256"]:
        raise UserError(f"{path}: its content is not what was recorded")


# --- autosaves ------------------------------------------------------------------------------------------------


def autosaves(folder: Path) -> list[Path]:
    """Autosave folders, newest first; whole or not."""
    return sorted(folder.glob("autosave/step-*"), key=lambda path: int(path.name.partition("-")[2]), reverse=True)


def newest_whole_autosave(folder: Path, missing_up_to: Callable[[int], str | None]) -> tuple[int, Path] | None:
    """Step and folder of the newest autosave that a run can go on from; what is passed over is said and removed.

    Its files are all as recorded, and `missing_up_to(step)`, asked for what else the run would lack, says nothing.
    """
    for path in autosaves(folder):
        step = int(path.name.partition("-")[2])
        try:
            read_manifest(path)
            missing = missing_up_to(step)
        except UserError as error:
            missing = str(error)
        if missing is None:
            return step, path
        log.warning("autosave %s is not whole (%s): taking the one before it", path.name, missing)
        remove_autosave(path)
    return None


def begin_autosave(folder: Path, step: int) -> Path:
    """An empty folder to write an autosave of `step` to."""
    path = folder / "autosave" / f"step-{step}"
    if path.exists():
        remove_autosave(path)
    path.mkdir(parents=True)
    return path


def finish_autosave(folder: Path, path: Path) -> None:
    """Make what was written to `path` an autosave, and keep the newest two."""
    write_manifest(path, [facts_of(file) for file in sorted(path.iterdir())])
    for old in autosaves(folder)[KEPT_AUTOSAVES:]:
        remove_autosave(old)


def remove_autosave(path: Path) -> None:
    """Remove an autosave, its manifest first, so that half a folder is never taken for a whole one."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


# --- snapshots ------------------------------------------------------------------------------------------------


def record_snapshot(folder: Path, path: Path, entry: dict[str, Any]) -> None:
    """Remember a snapshot that was just saved, so that it can be checked before it is declared whole.

    `entry` tells its `step`, and what else the manifest shall say of it.
    """
    entries = [before for before in recorded_snapshots(folder) if before["step"] < entry["step"]]
    write_json(folder / RECORD, [*entries, entry | facts_of(path)])


def recorded_snapshots(folder: Path) -> list[dict[str, Any]]:
    """What was recorded of the run's snapshots, by step."""
    return read_json(folder / RECORD) or []


def keep_snapshots_up_to(folder: Path, step: int) -> None:
    """Remove every file among the snapshots that a run at `step` has not made: later ones, half-written ones."""
    entries = [entry for entry in recorded_snapshots(folder) if entry["step"] <= step]
    kept = {entry["file"] for entry in entries}
    snapshots = folder / SNAPSHOTS
    snapshots.mkdir(exist_ok=True)
    for path in snapshots.iterdir():
        if path.name not in kept:
            path.unlink()
    write_json(folder / RECORD, entries)


# --- publishing -----------------------------------------------------------------------------------------------


def publish(source: Path, target: Path) -> None:
    """Hard-link the files of a folder's manifest to `target`, replacing what is there.

    The links cost no disk, and the files outlive a Snakemake that deletes its outputs. Under the run's lock: what
    an earlier publication left half done is removed.
    """
    for left in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left)
    temporary = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")
    temporary.mkdir(parents=True)
    for name in (*(entry["file"] for entry in read_manifest(source)), MANIFEST):
        os.link(source / name, temporary / name)
    fsync(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    fsync(target.parent)
