# Every target works as the first command on a fresh clone: .ci/setup names what the machine lacks
# and fills .venv; a second run installs nothing. `make PYTHON=python3.12 ...` chooses the Python.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST := .venv-oldest
PYTHON ?=
JOBS ?= 2

# The root on sys.path would let our kernels/ shadow the package of that name that vLLM imports.
export PYTHONSAFEPATH := 1

.PHONY: help setup demo test check aot test-gpu test-kernels-oldest vllm-next chromium clean

help:
	@echo "make demo      set up everything and serve a real model from the host cache"
	@echo "make test      set up everything and run all tests"
	@echo "make check     lint, format, types, import direction"
	@echo "make aot       compile every kernel for every target, and look at what came out"
	@echo "make test-gpu  the tests that need an NVIDIA GPU"
	@echo "make test-kernels-oldest"
	@echo "               the kernels' tests on the oldest torch and Triton"
	@echo "make vllm-next fetch the sources of the next vLLM, to compare interfaces with"
	@echo "make chromium  install Chromium, in which a test opens a benchmark's report"
	@echo "make clean     remove everything that was set up or built here"

setup: $(READY)

$(READY): pyproject.toml .ci/setup
	@.ci/setup "$(VENV)" "$(PYTHON)"

demo: export KVFERRY_CACHE ?= $(CURDIR)/.cache
# Threads that spin while they wait take the processor from transfers, and from each other.
demo: export OMP_WAIT_POLICY ?= PASSIVE
demo: $(READY)
	$(BIN)/kvferry demo $(ARGS)

# A file's tests stay together: they share models and engines. Threads that spin while they wait
# take the processor from the other half.
test: export OMP_WAIT_POLICY ?= PASSIVE
test: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/packaging

# Compiles for GPUs that need not be here, and fails where a kernel spills or moves bytes too narrowly.
aot: $(READY)
	$(BIN)/kvferry aot $(ARGS)

# The sources of the vLLM release after the installed one, for the tests that compare interfaces.
vllm-next: $(READY)
	.ci/vllm-next $(VENV) 0.33.0 .cache/vllm-0.33.0

chromium:
	@.ci/chromium

# A GPU machine may have no network: where nothing is set up, or PYTHON is given, another Python runs
# the checkout (typings/kvferry links the folders together as the installed package would). What is
# set up before there was a GPU has a torch without CUDA: with it this fails, and does not pass by
# skipping.
test-gpu:
	@command -v nvidia-smi >/dev/null && nvidia-smi -L | grep -q GPU || \
	  { echo "make test-gpu: no NVIDIA GPU here (nvidia-smi finds none); run it where there is one" >&2; exit 1; }
	@export KVFERRY_REQUIRE_GPU=1; \
	if [ -e $(READY) ] && [ -z "$(PYTHON)" ]; then $(BIN)/pytest tests/gpu $(ARGS); \
	else PYTHONPATH=typings $(or $(PYTHON),python3) -m pytest tests/gpu $(ARGS); fi

# The oldest pair that installs side by side. This torch has only a CUDA build on the package index,
# which does not import without all that it brings; the interpreter of this Triton needs numpy < 2.4.
$(OLDEST)/.ready: pyproject.toml | $(READY)
	$(BIN)/python -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q torch==2.11.0 triton==3.6.0 "numpy<2.4" nvtx \
	  pytest pytest-timeout hypothesis "setuptools>=77"
	$(OLDEST)/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@

test-kernels-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest tests/kernels $(ARGS)

clean:
	rm -rf .venv .venv-* .cache build dist *.egg-info src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
