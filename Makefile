# Two commands bring everything up on a machine that has Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p --version >/dev/null 2>&1 && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests run two at once, but for those of GPUs and those marked `alone`.
ALONE := tests/gpu $(sort $(shell grep -rl --include='test_*.py' 'mark\.alone' tests))
# Kernels for GPUs are tested in Triton's interpreter, which lies apart: nothing else is to see it. It is Linux's.
INTERPRETER := $(if $(filter Linux,$(shell uname -s)),$(VENV)/triton)
INTERPRETED := TRITON_INTERPRET=1 PYTHONPATH=$(INTERPRETER)
define run_tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m 'not alone' --ignore tests/gpu --ignore tests/kernels
	$(if $(INTERPRETER),$(INTERPRETED) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/kernels)
	$(BIN)/python -m pytest -m 'alone or gpu' $(ALONE)
endef

.PHONY: demo test check format clean

demo: $(READY)  ## the story so far on this machine
	$(BIN)/burstpool demo

test: $(READY) $(INTERPRETER)  ## all tests that need no GPU
	$(run_tests)

check: $(READY) $(INTERPRETER)  ## format, lint, types, import rules and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(run_tests)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/triton: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ triton==3.9.0
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
