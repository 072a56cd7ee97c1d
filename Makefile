PYTHON ?= python3
BIN := .venv/bin
# Three processes keep two cores busy, and a test that crashes its process fails alone.
PARALLEL := -n 3 --dist worksteal
PIP_INSTALL := -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: help demo docs test test-all lint wheel format clean clean-venv
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

test: lint ## linters, types, tests and doctests
	$(BIN)/pytest -q $(PARALLEL)

test-all: lint wheel .venv/.docs ## the same with the slow tests and the wheel check
	$(BIN)/pytest -q $(PARALLEL) -m ""

docs: .venv/.docs ## build the documentation site, build/docs/index.html
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs

lint: .venv/.ready ## linters and types only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

wheel: .venv/.ready ## build the wheel and try it in an empty environment
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist . > /dev/null
	$(PYTHON) -m venv build/venv
	build/venv/bin/python $(PIP_INSTALL) dist/*.whl
	build/venv/bin/python -c "import pufferfish; print('pufferfish', pufferfish.__version__)"
	build/venv/bin/pufferfish plan resnet18

format: .venv/.ready ## rewrite the sources in the house format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what was built, but not the environment
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

clean-venv: ## remove the environment
	rm -rf .venv
