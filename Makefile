# make figure: the whole study on this machine. Everything lives in .venv; nothing is asked of the user but Python.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: env figure test test-all lint format lock clean

figure: env
	snakemake figures/scale_ablation.svg

env: $(INSTALLED)

$(INSTALLED): pyproject.toml envs/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is wanted, found " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r envs/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[dev]'
	@touch $@

# Fast tests: every module, the real pipeline on a tiny study.
test: env
	pytest -n 2 -m "not slow"

# Kills, reruns and whole studies on top of it.
test-all: env
	pytest -m slow

lint: env
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	mypy
	snakemake --lint

format: env
	ruff check --fix .
	ruff format .
	snakefmt Snakefile workflow

# Pins every package but torch; wants pip-tools.
lock:
	pip-compile -q --extra dev --extra hub --extra watch --generate-hashes --strip-extras --unsafe-package torch --no-header \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host -o envs/cpu.txt pyproject.toml

# What this checkout made; `.venv` stays.
clean:
	rm -rf results figures logs .snakemake
