# make demo: sets up everything and runs the main job on the embedded engine.
# make test: sets up everything and passes all tests, real vLLM on CPU included.
# Both make .venv themselves; a second call reuses it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := bus sidecar trainer_agent tests examples
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check lint types layers test-fast test-vllm clean

demo: $(VENV)/.demo
	$(BIN)/wavebus demo

test: $(VENV)/.vllm check
	$(BIN)/python -m pytest -q

# Without vLLM, a few minutes.
test-fast: $(VENV)/.test check
	$(BIN)/python -m pytest -q -m "not vllm"

check: $(VENV)/.test lint types layers

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.test
	$(BIN)/mypy

layers: $(VENV)/.test
	$(BIN)/lint-imports

$(VENV)/.demo $(VENV)/.test $(VENV)/.vllm: pyproject.toml .ci/setup
	PYTHON=$(PYTHON) .ci/setup $(patsubst .%,%,$(notdir $@))

clean:
	rm -rf $(VENV) build *.egg-info
