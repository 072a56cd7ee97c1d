PYTHON ?= python3
BIN := .venv/bin
# Three processes keep two cores busy, and a test that crashes its process fails alone.
PARALLEL := -n 3 --dist worksteal
# The library's quick tests. A file whose tests start processes is left out, by a marker that conftest.py sets.
FAST := -m "not slow and not processes" --ignore tests/lowrank/test_export.py \
	$(addprefix tests/,layers planning optim lowrank compression switching checkpoint local measure cli)
PIP_INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt

# A pipeline fails when one of its commands does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

.PHONY: help demo docs test test-fast test-all lint wheel pythons format clean clean-venv
.DELETE_ON_ERROR:

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# PyPI's torch for Linux brings CUDA. To stay on the CPU, point PIP_FIND_LINKS or PIP_INDEX_URL at a CPU build.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -e '.[dev,lab]'
	@touch $@

.venv/.docs: .venv/.ready
	$(BIN)/python $(PIP_INSTALL) -e '.[docs]'
	@touch $@

demo: .venv/.ready ## the whole story in a few minutes
	$(BIN)/pufferfish demo

test: lint ## linters, types, tests and doctests; the slowest 50 are in build/test.txt
	mkdir -p build
	$(BIN)/pytest -q $(PARALLEL) --durations=50 | tee build/test.txt

test-fast: .venv/.ready ## only quick tests of the library, in less than a minute
	$(BIN)/pytest -q $(PARALLEL) $(FAST)

test-all: lint wheel pythons .venv/.docs ## the same with the slow tests, the wheel, other Pythons and mutants
	$(BIN)/pytest -q $(PARALLEL) -m ""
	$(BIN)/python tests/mutants.py

docs: .venv/.docs ## build the documentation site, build/docs/index.html
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs

lint: .venv/.ready ## linters and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

wheel: .venv/.ready ## build the sdist, the wheel from it, and try that in an empty environment
	rm -rf build dist
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/python -m zipfile -e dist/*.whl build/wheel
	diff -r -x __pycache__ src/pufferfish build/wheel/pufferfish
	$(PYTHON) -m venv build/venv
	build/venv/bin/python $(PIP_INSTALL) dist/*.whl
	build/venv/bin/pufferfish --version
	build/venv/bin/pufferfish plan resnet18

# Without torch: for most Pythons it would bring gigabytes of CUDA packages.
pythons: ## byte-compile, and run the bare command, with each Python from 3.10 to 3.13 that is there
	@export PYTHONPATH=src PYTHONPYCACHEPREFIX=build/pycache; for v in 3.10 3.11 3.12 3.13; do \
	  python$$v -c "" 2> /dev/null || { echo "python$$v: not there, skipped"; continue; }; \
	  python$$v -W error -m compileall -q src tests benchmarks examples && \
	  python$$v -m pufferfish --help > /dev/null && \
	  echo "python$$v: $$(python$$v -m pufferfish --version)" || exit 1; \
	done

format: .venv/.ready ## rewrite the sources in the house format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what was built, but not the environment
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

clean-venv: ## remove the environment
	rm -rf .venv
