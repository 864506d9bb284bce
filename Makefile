# Two commands bring everything up on a machine that has Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p --version >/dev/null 2>&1 && echo $$p && break; done)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests that take no times and hold no cores run two at once; the others have the machine to themselves, also those
# whose workers wait for each other all the time. The longest come first: a worker that has nothing left to do takes
# tests over from the other, but cannot cut one in two.
SHARED := $(addprefix tests/,cli run/test_train_cli.py share/test_second_process.py share/test_feeding.py sweeping fusion \
	model plan report share/test_budget.py share/test_budget_odd_foregrounds.py share/test_gpu_jitter.py \
	share/test_gpu_loop.py share/test_capabilities.py share/test_kept.py share/test_pieces.py share/test_prices.py share/test_rehearsal.py \
	share/test_room.py share/test_share_on_gpu.py share/test_sharing_benchmark.py share/test_undo.py share/test_width.py \
	cluster/test_catalogue.py cluster/test_cluster_spec.py profiling/test_estimate.py profiling/test_importers.py \
	profiling/test_profile.py run/test_data_order.py run/test_reshard.py run/test_substitutes.py \
	test_artifact.py test_data.py test_job.py) \
	$(filter-out tests/schedule/test_simulate_speed.py,$(wildcard tests/schedule/test_*.py))
# Kernels for GPUs are tested in Triton's interpreter, which lies apart: nothing else is to see it. It is Linux's.
INTERPRETER := $(if $(filter Linux,$(shell uname -s)),$(VENV)/triton)
INTERPRETED := TRITON_INTERPRET=1 PYTHONPATH=$(INTERPRETER)
define run_tests
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(SHARED)
	$(if $(INTERPRETER),$(INTERPRETED) $(BIN)/python -m pytest --numprocesses 2 --dist worksteal tests/kernels)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(SHARED) tests/kernels)
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
