# One command each, on a machine that has Python >= 3.11 and make:
#
#   make demo    trains the vision transformer of examples/train_digits.py
#   make test    runs the tests
#   make test-changed BASE=main  runs those that the changes since a branch concern
#   make test-programs  runs those that start programs: examples, pages, devices
#   make test-distributions  runs those that compare draws with their distributions
#   make test-fused     runs the tests in the fused mode of eager operations
#   make test-opinfo-quick  runs PyTorch's own list of operators, a few inputs of each
#   make test-opinfo        runs it with many inputs and writes docs/operators.md
#   make test-bad-inputs    gives every operator bad inputs and compares the errors
#   make test-close-numbers  calls every operator with close numbers, counts programs
#   make test-models        runs real models and writes docs/models.md
#   make test-ecosystem     runs programs of libraries and users, writes docs/training-scripts.md
#   make test-ecosystem-quick  runs two of the libraries, in a few minutes
#   make test-samplers  measures the samplers and writes docs/samplers.md
#   make test-dieharder  runs dieharder on random streams, writes docs/dieharder.md
#   make test-upstream UPSTREAM=path  runs the tests of a checkout of google/torchax
#   make test-torch TORCH_TESTS=path  runs PyTorch's device tests, from a folder that has
#                them, for jax and for the CPU; writes docs/torch-tests.md
#   make fuzz SEED=0 COUNT=1000  runs random programs in every way, compares with torch
#   make soak    runs programs for an hour and looks whether the process grows
#   make test-statistics  runs the statistical ones with ten times the seeds
#   make lint    checks style, format, types and language;  make format  fixes format
#   make bench   measures beside plain JAX, writes output/benchmarks.json and the table
#                of docs/performance.md
#   make bench-accelerator  measures on the device that JAX finds, as a table
#   make test-accelerator   runs the tests of operations and programs there
#   make docs    builds the site into site/
#   make test-site  looks at the site in a browser: Chromium or Chrome, or CHROMIUM=path
#   make test-pyright  checks the types of the programs of all pages; needs Node.js
#   make tutorials  runs docs/tutorials, writes the outputs and the notebooks
#   make install makes the environment only
#   make clean   removes what was built;  make distclean  the environment as well
#
# The environment in .venv is made on first use and again when its inputs change.
# Variables: BASE (a branch or commit), UPSTREAM (a checkout of google/torchax),
# TORCH_TESTS (the folder test of PyTorch), PYTHON (interpreter), JOBS (test processes),
# CHROMIUM (a browser), PYRIGHT (a command), ARGS (passed to the program).

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
JOBS ?= 2
ARGS ?=

IS_RECENT := import sys; sys.exit(sys.version_info < (3, 11))
# The first interpreter that is recent enough; looked for only when it is needed.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c '$(IS_RECENT)' 2>/dev/null && { echo $$python; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fused test-changed test-programs test-distributions test-opinfo test-opinfo-quick test-bad-inputs test-close-numbers test-models test-samplers test-dieharder test-ecosystem test-ecosystem-quick test-statistics test-upstream test-torch test-accelerator fuzz soak bench-accelerator lint format bench docs test-site test-pyright tutorials clean distclean

help:
	@sed -n 's/^#  / /p' Makefile

$(STAMP): pyproject.toml constraints.txt torchax/version.py
	@python="$(PYTHON)"; test -n "$$python" && "$$python" -c '$(IS_RECENT)' || { \
	  echo "torchax needs Python 3.11 or newer, and '$$python' is not;" \
	    "name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@# torch by itself first, at its pinned version: nothing else may choose a build.
	$(PIP) install --constraint constraints.txt setuptools wheel torch
	$(PIP) install --constraint constraints.txt --no-build-isolation \
	  --editable '.[all]'
	touch $@

# The libraries of the extra that is not in 'all'; torch stays at its pinned version.
ECOSYSTEM := $(VENV)/.ecosystem
$(ECOSYSTEM): $(STAMP)
	$(PIP) install --constraint constraints.txt --no-build-isolation \
	  --editable '.[ecosystem]'
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/train_digits.py $(ARGS)

# What XLA compiles for one test is kept for the others, and for the next run.
KEPT := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/output/programs \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
PYTEST := $(KEPT) $(BIN)/python -m pytest -q --durations=10 --numprocesses=$(JOBS) --dist=worksteal

# Folders with targets of their own.
ELSEWHERE := $(addprefix --ignore=test/suites/,opinfo ecosystem models browser pyright)

test: $(STAMP)
	$(PYTEST) -m 'not programs and not distributions' $(ELSEWHERE) $(ARGS)

test-fused: $(STAMP)
	TORCHAX_EAGER=fused $(PYTEST) -m 'not programs and not distributions' $(ELSEWHERE) $(ARGS)

BASE ?= main
test-changed: $(STAMP)
	files=$$($(BIN)/python -m tools.changed_tests "$(BASE)") && \
	  $(PYTEST) -m 'not programs and not distributions' $$files $(ARGS)

test-programs: $(STAMP)
	$(PYTEST) -m programs $(ELSEWHERE) $(ARGS)

test-distributions: $(STAMP)
	$(PYTEST) -m distributions $(ELSEWHERE) $(ARGS)

test-opinfo-quick: $(STAMP)
	$(PYTEST) test/suites/opinfo $(ARGS)

test-opinfo: $(STAMP)
	mkdir -p output
	TORCHAX_OPINFO=full $(PYTEST) test/suites/opinfo --junitxml=output/opinfo.xml $(ARGS)
	$(BIN)/python -m tools.operator_coverage output/opinfo.xml docs/operators.md

test-bad-inputs: $(STAMP)
	TORCHAX_BAD_INPUTS=all $(PYTEST) test/suites/faults/test_bad_inputs.py $(ARGS)

test-close-numbers: $(STAMP)
	TORCHAX_CLOSE_NUMBERS=all $(PYTEST) test/suites/faults/test_close_numbers.py $(ARGS)

test-models: $(STAMP)
	mkdir -p output
	$(PYTEST) test/suites/models --junitxml=output/models.xml $(ARGS)
	$(BIN)/python -m tools.model_table output/models.xml docs/models.md

test-ecosystem: $(ECOSYSTEM)
	mkdir -p output
	@# The family of reports that holds what tests say of themselves.
	$(PYTEST) test/suites/ecosystem --junitxml=output/ecosystem.xml \
	  -o junit_family=xunit1 $(ARGS)
	$(BIN)/python -m tools.library_table output/ecosystem.xml docs/training-scripts.md
	$(BIN)/python -m tools.program_table output/ecosystem.xml docs/training-scripts.md

test-ecosystem-quick: $(ECOSYSTEM)
	$(PYTEST) test/suites/ecosystem/test_trainer.py test/suites/ecosystem/test_accelerate.py $(ARGS)

test-samplers: $(STAMP)
	mkdir -p output
	TORCHAX_SAMPLERS=full $(BIN)/python -m pytest -q test/rng/test_sampler_table.py \
	  --junitxml=output/samplers.xml $(ARGS)
	$(BIN)/python -m tools.sampler_table output/samplers.xml docs/samplers.md

SEED ?= 0
COUNT ?= 1000
fuzz: $(STAMP)
	$(BIN)/python -W ignore -m tools.fuzz --seed=$(SEED) --count=$(COUNT) $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m tools.soak --picture=output/soak.svg $(ARGS)

# Needs the Debian package of this name.
test-dieharder: $(STAMP)
	$(BIN)/python -m tools.dieharder_report docs/dieharder.md $(ARGS)

test-statistics: $(STAMP)
	TORCHAX_SEEDS_FACTOR=10 $(PYTEST) -m statistics --ignore=test/suites/opinfo \
	  --ignore=test/suites/ecosystem $(ARGS)

UPSTREAM ?=
test-upstream: $(STAMP)
	$(BIN)/python -m tools.upstream_tests "$(UPSTREAM)" --jobs $(JOBS) $(ARGS)

TORCH_TESTS ?=
test-torch: $(STAMP)
	$(BIN)/python -m tools.torch_tests "$(TORCH_TESTS)" --jobs $(JOBS) \
	  --page docs/torch-tests.md $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.check_words

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tools.benchmark_table output/benchmarks.json docs/performance.md)

bench-accelerator: $(STAMP)
	$(BIN)/python -m benchmarks.accelerator $(ARGS)

# One process: a second one would find the device's memory taken.
test-accelerator: $(STAMP)
	TORCHAX_ACCELERATOR=1 $(BIN)/python -m pytest -q --durations=10 \
	  -m 'not programs and not distributions' test/ops test/core test/dispatch \
	  test/tracing test/dynamo test/rng test/suites/training/test_training.py $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The library that drives a browser. It brings none.
DRIVER := $(VENV)/.driver
$(DRIVER): $(STAMP)
	$(PIP) install --constraint constraints.txt playwright
	touch $@

export CHROMIUM
test-site: $(DRIVER) docs
	$(BIN)/python -m pytest -q --numprocesses=$(JOBS) --dist=loadscope test/suites/browser $(ARGS)

PYRIGHT ?= npx --yes pyright@1.1.414
test-pyright: $(STAMP)
	PYRIGHT="$(PYRIGHT)" $(BIN)/python -m pytest -q test/suites/pyright $(ARGS)

tutorials: $(STAMP)
	for page in docs/tutorials/*.md; do \
	  $(BIN)/python -m tools.notebooks "$$page" || exit 1; done

clean:
	rm -rf build dist site output *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
