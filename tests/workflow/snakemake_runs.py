"""Run the real workflow in a folder of its own, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
SNAKEMAKE = Path(sys.executable).parent / "snakemake"
SMOKE = ROOT / "workflow" / "presets" / "smoke.yaml"


def command(directory: Path, *arguments: str) -> list[str]:
    """`snakemake ARGUMENTS` on this checkout's workflow, with its results in `directory`."""
    return [str(SNAKEMAKE), *arguments, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(directory)]


def snakemake(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr together in `stdout`."""
    return subprocess.run(
        command(directory, *arguments),
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def planned(directory: Path, *arguments: str, **environment: str) -> dict[str, int]:
    """Jobs by rule that a dry run would do; `all` is left out."""
    result = snakemake(directory, "--dry-run", *arguments, **environment)
    assert result.returncode == 0, result.stdout
    if "Nothing to be done" in result.stdout:
        return {}
    table = result.stdout.partition("Job stats:")[2].lstrip("\n").partition("\n\n")[0]
    rows = [line.split() for line in table.splitlines()]
    jobs = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
    return {rule: count for rule, count in jobs.items() if rule not in ("total", "all")}


def write_study(path: Path, **changes) -> Path:
    """The smoke study with some of its sections changed, key by key."""
    study = yaml.safe_load(SMOKE.read_text())
    for section, values in changes.items():
        if isinstance(values, dict):
            study.setdefault(section, {})
            for key, value in values.items():
                study[section][key] = value
        else:
            study[section] = values
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path
