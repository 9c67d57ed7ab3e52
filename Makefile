# Each target fills .venv first if it must. PYTHON=… makes it with that interpreter (3.11 or 3.12), EXTRAS=gpu,dev is
# for a machine with an NVIDIA GPU.

PYTHON ?=
EXTRAS ?= cpu,dev
BIN := .venv/bin
FILLED := .venv/filled

.PHONY: demo test test-fast lint soak

demo: $(FILLED)
	$(BIN)/rlenv demo

test: $(FILLED)
	$(BIN)/python -m pytest

test-fast: $(FILLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal -m "not engine and not slow"

lint: $(FILLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(FILLED)
	$(BIN)/python -m benchmarks.soak --out benchmarks/results/soak.json

$(FILLED): pyproject.toml
	@bash .ci/fill-venv "$(EXTRAS)" "$(PYTHON)"
	@touch $@
