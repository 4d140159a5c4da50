# The verbs of this project: the same for a person and for CI (`.ci/run`). Every verb that needs Python packages sets the
# machine up by itself; once `.venv` is there and pyproject.toml unchanged, that costs a fraction of a second.

ENGINE ?= cpu
PYTHON ?=
ARGS ?=
BIN := .venv/bin

# One BLAS thread a process: two ranks and a server share the cores, and equal bits need one thread (vLLM on CPU).
export OMP_NUM_THREADS ?= 1
# A mistyped path must fail at once, not be asked for at a model hub for a minute.
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow matrix chaos check bench-store bench-export bench-reload format build clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything in it (ENGINE=cpu|gpu, PYTHON=/path/to/python3.11)
	@command -v python3 >/dev/null || { echo "setup: python3 is not on PATH; install Python 3.11 to 3.13" >&2; exit 1; }
	@python3 .ci/set_up.py --engine "$(ENGINE)" --python "$(PYTHON)"

demo: setup ## train, publish, hot-reload and answer on this machine, live (ARGS="--help" for more)
	@$(BIN)/weightferry demo $(ARGS)

test: setup ## the tests, without the slow ones (ARGS="-k words" to choose)
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: setup ## the tests that take minutes each
	@$(BIN)/python -m pytest -m slow $(ARGS)

matrix: setup ## every adapter variant x sharding x family, published and compared; writes docs/matrix.md (half an hour)
	@$(BIN)/python tests/matrix.py $(ARGS)

chaos: setup ## thousands of seeded faults on exchanges, and a table of outcomes (ARGS="--rounds 5000 --seed 7")
	@$(BIN)/python tests/chaos.py $(ARGS)

check: setup ## formatting, lint and types
	@$(BIN)/ruff format --check --quiet . || { echo "check: run \`make format\`" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@rm -rf build
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/types .
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench-store: setup ## publish and read through a bucket, beside the store's own client (ARGS="--help" for more)
	@PYTHONPATH=tests $(BIN)/python benchmarks/bench_store.py $(ARGS)

bench-export: setup ## publish from two FSDP2 ranks: memory by depth, time beside raw writing (ARGS="--help" for more)
	@PYTHONPATH=tests $(BIN)/python benchmarks/bench_export.py $(ARGS)

bench-reload: setup ## new versions for a server that answers: pause and latency beside memcpy (ARGS="--help" for more)
	@PYTHONPATH=tests $(BIN)/python benchmarks/bench_reload.py $(ARGS)

format: setup ## format and mend what ruff can mend
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

build: setup ## source distribution and wheel, in dist/
	@rm -rf build dist
	@$(BIN)/python -m build --quiet --no-isolation && ls dist

clean: ## remove everything that the verbs made, except .venv
	@rm -rf build dist .demo *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
