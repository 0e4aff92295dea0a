# `make demo` and `make test` need nothing but make, bash and Python >= 3.11: each makes .venv and installs into it.
#
#   PYTHON=python3.12   the interpreter to make .venv with (default: the first of the usual names that is new enough)
#   TORCH=2.13.0        the version of torch to install (the pin of this project: see CONTRIBUTING.md)
#   TORCH_INDEX=URL     the wheel index to take torch from, for instance PyTorch's CPU or CUDA 12 wheel index
#   GPU=auto            auto, none, cuda12 or cuda13: which GPU packages to install
#   VENV=.venv          where the environment lies
#   TESTS="..."         arguments of pytest for `make test`

PYTHON ?=
TORCH ?= 2.13.0
TORCH_INDEX ?=
GPU ?= auto
VENV ?= .venv
TESTS ?= -n auto

SHELL := bash
BIN := $(VENV)/bin
SETUP := PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" GPU="$(GPU)" VENV="$(VENV)" tools/setup_env.sh

.PHONY: help demo test lint format docs clean
.DEFAULT_GOAL := help

help: ## Show these lines
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-run ## Make clips, train a small video model on them, leave pictures and a report in demo_out/
	$(BIN)/gpupipe demo

test: lint $(VENV)/.ready-test ## Lint, types, and all tests
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.ready-dev ## Lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev ## Format the code and mend what the linter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready-dev ## Build the documentation into build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist demo_out .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.ready-run: pyproject.toml tools/setup_env.sh
	$(SETUP)
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-run
	$(SETUP) dev,docs
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-dev
	$(SETUP) dev,docs,integrations
	@touch $@
