# `make` lists what there is. Every target first makes sure of .venv, which takes no time when nothing changed.
# Tests run on JOBS processes, two unless told otherwise.

VENV ?= .venv
export VENV
BIN := $(VENV)/bin
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test short-tests test-all bootstrap lint types slurm-installed slurm gpu lock docs clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

demo: bootstrap ## Train a toy model on this machine at tp=1 and tp=2, stock and invariant, and compare bit by bit
	@PATH="$(abspath $(BIN)):$$PATH" scripts/demo

test: bootstrap ## What CI runs: lint and types, beside them all tests but those marked release
	@$(MAKE) --no-print-directory -j2 short-tests lint types

short-tests: slurm-installed
	$(BIN)/pytest -n $(JOBS) -m "not release" --hypothesis-profile=same-examples

test-all: lint types slurm-installed ## The same with every test: before a release, and when docs/testing.md says so
	$(BIN)/pytest -n $(JOBS)
	scripts/try-verl
	scripts/try-clients
	.ci/instructions

bootstrap: ## Make .venv from the locks
	@scripts/bootstrap

lint: bootstrap ## ruff, rules and format; the order of imports; shellcheck
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache
	$(firstword $(wildcard $(BIN)/shellcheck) shellcheck) $(shell grep -lsE '^#!.*sh$$' scripts/* .ci/*)

types: bootstrap ## mypy
	$(BIN)/mypy

slurm-installed: bootstrap
	@scripts/slurm-cluster install || echo 'so there will be no tests on SLURM' >&2

slurm: bootstrap ## All tests on real SLURM and no others, none skipped (docs/install.md)
	scripts/slurm-cluster install
	TPI_SLURM_TESTS=required $(BIN)/pytest -n $(JOBS) tests/slurm

gpu: ## Build the GPU kernels into .venv, then run the GPU tests
	@scripts/bootstrap --gpu
	$(BIN)/pytest tests/gpu

lock: bootstrap ## Look up the hashes of the versions in scripts/lock
	$(BIN)/python scripts/relock

docs: bootstrap ## Build the pages and the API reference as a site in build/site, links checked
	$(BIN)/mkdocs build --strict

clean: ## Remove .venv and all that tools leave behind
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
