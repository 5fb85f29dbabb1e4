# `make table` and `make test` set up .venv on first use. On a host whose Python already has torch:
# make test PYTHON=/path/to/python VENV=
PYTHON ?= python3
VENV ?= .venv

ifeq ($(VENV),)
RUN := $(PYTHON)
READY := installed
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

PYTEST := $(RUN) -m pytest -q

.PHONY: installed table test lint test-cpu test-interpret test-aot test-compile test-gpu bench clean

table: $(READY) ## the CTA bandwidth table: measured on a GPU, upper bounds by a model without one
	$(RUN) -m perf cta

test: lint test-gpu test-interpret test-aot test-cpu ## every check that this machine can run

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Interpreted kernels cannot be compiled and compiled ones not interpreted: a process for each.
test-cpu: $(READY)
	$(PYTEST) -m "not interpret and not aot and not full and not gpu"

test-interpret: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) -m "interpret and not full"

test-aot: $(READY)
	$(PYTEST) -m "aot and not full"

test-gpu: $(READY)
	$(PYTEST) -m gpu

test-compile: $(READY) ## the full matrix of compiled variants, half an hour to an hour
	$(PYTEST) -m full

bench: $(READY) ## benchmarks of planning, descriptors and look-ups on this CPU
	$(PYTEST) perf --benchmark-only

# torch first and alone: where an index offers a CPU build of this very version, it is taken, and the
# range in pyproject.toml keeps it.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet --editable ".[dev,plot]"
	touch $@

# Without a virtual environment: a sentence where the Python that is to be used lacks a package.
NEEDS := torch triton pytest pytest_benchmark hypothesis ruff mypy
table: NEEDS := torch triton

installed:
	@$(PYTHON) -c "$$LACKS" $(NEEDS)

define LACKS
import importlib.util, sys
lacks = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if lacks:
    sys.exit(
        f"{sys.executable} has no {', '.join(lacks)}; run {sys.executable} -m pip install "
        "-e '.[dev]', or leave VENV= out, and make installs what it needs in .venv"
    )
endef
export LACKS

TORCH ?= torch==2.13.0

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
