# make train    a fresh machine with Python 3.11 or later: sets up .venv and trains the default model
# make test     sets up .venv with the development tools and runs the tests
# make check    linters and the quick tests, under 90 seconds on two idle cores: run it before every commit
# make gpu      tests and benchmarks on a CUDA device, in some minutes; skipped where torch finds none
# make lint     ruff, mypy and make audit
# make audit    looks the pinned versions up in a database of known vulnerabilities; skipped where there is no network
# make mutants  changes single operators of the code and reports which changes no test notices (an hour or two)
# make dist     builds the sdist and the wheel into dist/
# make docs     builds the documentation site into site/; broken links are errors
# make clean    removes .venv and caches
#
#   make train ARGS="--steps 50 --parallel.pipeline 4"     options for `pipeloom train`
#   make test ARGS="tests/pure -k golden"                  options for pytest
#   make test WORKERS=0                                    tests one after another, in one process
#   make audit AUDIT_ARGS="--ignore-vuln ID"             a vulnerability that has no fix yet
#   make PIP_FLAGS="--index-url URL" train                 where pip takes torch from (the CPU build is enough)
#   make gpu GPU_PYTHON=python3                            this interpreter has torch and the rest: no set-up, no network
#   make gpu GPU_ARGS="--cases split,ranks"                options for python -m benchmarks.gpu

VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?=
ARGS ?=
AUDIT_ARGS ?=
WORKERS ?= 2
# Tests on one GPU run in so many processes.
GPU_WORKERS ?= 4
GPU_ARGS ?=
GPU_PYTHON ?=
GPU_RUN := $(if $(GPU_PYTHON),PYTHONPATH=src:$$PYTHONPATH $(GPU_PYTHON),$(BIN)/python)
# 3.11 first: the constraints are tested with it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

.PHONY: train test check gpu lint style audit dist docs mutants clean

train: $(VENV)/.ready-run
	$(BIN)/pipeloom train $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: style
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "quick and not whole_grid" $(ARGS)

gpu: $(if $(GPU_PYTHON),,$(VENV)/.ready-dev)
	@found=$$($(GPU_RUN) -c 'import torch; print(torch.cuda.device_count(), torch.__version__)') || exit 1; \
	case $$found in \
	"0 "*) echo "make gpu: SKIPPED, torch $${found#* } finds no CUDA device on this machine."; exit 0 ;; \
	esac; \
	echo "torch $${found#* }, CUDA devices: $${found% *}"; \
	$(GPU_RUN) -m pytest -n $(GPU_WORKERS) --dist worksteal -rs $(ARGS) tests/gpu && $(GPU_RUN) -m benchmarks.gpu $(GPU_ARGS)

lint: style audit

style: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: $(VENV)/.ready-dev
	@$(BIN)/python -c 'import pip_audit' 2>/dev/null || $(BIN)/python -m pip install --quiet --retries 1 $(PIP_FLAGS) \
		--constraint constraints.txt --editable '.[dev,audit]' || true
	@$(BIN)/python -m tests.audit $(AUDIT_ARGS)

mutants: $(VENV)/.ready-dev
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev,mutants]'
	$(BIN)/python -m tests.mutants $(ARGS)

dist: $(VENV)/.ready-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist src/*.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or later found; install one, or name it: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-run: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing pipeloom and torch into $(VENV); this takes a minute or more, the first time only"
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.ready-dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing pipeloom, torch and the development tools into $(VENV); this takes a minute or more, the first time only"
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.ready-run

$(VENV)/.ready-docs: $(VENV)/.ready-run
	@echo "installing the documentation tools into $(VENV)"
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[docs]'
	@touch $@
