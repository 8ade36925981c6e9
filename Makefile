# Everything a person or a CI machine runs. Needs Python 3.11 or newer, make and the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check docs bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

# The stamp is written last: an interrupted set-up starts again.
$(STAMP): pyproject.toml constraints.txt
	@echo "installing the environment, about 2.5 GB: some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[dev]"
	touch $(STAMP)

setup: $(STAMP)  ## environment with everything the tests and commands need, sample models included
	$(BIN)/qkform samples

demo: setup  ## scan two real models, train two small ones (two to three minutes), and write qkform-demo.html
	$(BIN)/qkform demo

test: setup  ## the tests (at most 12 minutes on two cores)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow"

test-all: setup  ## every test
	$(BIN)/python -m pytest -n $(JOBS)

check: $(STAMP) docs  ## style, types, and the documentation built strictly
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)  ## the documentation as a site, docs/_build/html/index.html; a link or name that leads nowhere is an error
	$(BIN)/python -m sphinx -b html -n -W --keep-going --quiet docs docs/_build/html

bench: setup  ## benchmarks, as ratios within one run (half an hour on a quiet machine)
	$(BIN)/python benchmarks/scan.py --save benchmarks/results
	$(BIN)/python benchmarks/attention.py --save benchmarks/results
	$(BIN)/python benchmarks/tracker.py --save benchmarks/results
	$(BIN)/python benchmarks/step.py --save benchmarks/results

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) build dist docs/_build .mypy_cache .pytest_cache .ruff_cache
