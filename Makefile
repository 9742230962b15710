# make demo: sets up everything and runs the main job on the embedded engine.
# make test: sets up everything and passes the tests, real vLLM on CPU included.
# Both make .venv themselves; a second call reuses it. What takes longer: slow, mutants, chaos, soak.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEXT := .venv-next
DOCS := .venv-docs
SOURCES := bus sidecar trainer_agent lab tests examples
# What `make test` and `make test-fast` run. CI runs a third of those marked ci beside them:
# WAVEBUS_SAMPLE=COMMIT make test TESTS='not slow'
TESTS := not slow and not ci
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder
export OMP_NUM_THREADS ?= 1
# Hundreds of processes import the same modules: each is compiled once, whatever is set outside.
export PYTHONDONTWRITEBYTECODE :=
slow chaos soak bench: export PYTEST_TIMEOUT := 7200

.PHONY: demo test test-next test-fast check lint types layers slow mutants chaos soak bench docs clean \
	ci-next

demo: $(VENV)/.demo
	@echo "demo: trains a small transformer with GRPO on two engines, for some minutes; draws demo.png" >&2
	$(BIN)/wavebus demo

# Two files at a time, long ones first (tests/vllm/conftest.py); data-parallel engines take all
# processors by themselves. The contract of engines is run over HTTP; in process, `make ci-next` runs
# it on the newest vLLM.
test: $(VENV)/.vllm test-fast
	$(BIN)/python -m pytest -q -m '$(TESTS)' $(TWO_FILES) --ignore-glob='*/test_dp_*' \
		--ignore=tests/vllm/test_engine_inprocess.py tests/vllm
	$(BIN)/python -m pytest -q -m '$(TESTS)' tests/vllm/test_dp_*.py

# The tests of real vLLM under the newest release (.ci/setup says how it runs without a GPU).
test-next: $(NEXT)/.vllm-next
	$(NEXT)/bin/python -m pytest -q -m 'not slow' $(TWO_FILES) --ignore-glob='*/test_dp_*' tests/vllm
	$(NEXT)/bin/python -m pytest -q -m 'not slow or own_coordinator' tests/vllm/test_dp_*.py

# What CI runs a part of; all of it if an adapter to vLLM has changed: staged, also in lockstep, in process, and vLLM's trainer engines. The
# rest is in `make slow`.
ci-next: export WAVEBUS_SAMPLE_ALL := 1
ci-next: $(NEXT)/.vllm-next
	$(NEXT)/bin/python -m pytest -q -m 'not slow' $(TWO_FILES) tests/vllm/test_engine_inprocess.py \
		tests/vllm/test_vllm_sources.py tests/vllm/test_trainer_engine.py \
		tests/unit/sidecar/vllm/plugin/test_patches.py tests/unit/trainer_agent/vllm/test_registry.py
	$(NEXT)/bin/python -m pytest -q -m 'not slow' tests/vllm/test_dp_staged.py

# Without vLLM: some minutes. Half of these wait for timers, so there is one more than processors,
# and mypy runs beside them. Models play a fifth of their schedules, `make mutants` twice as many and
# `make slow` all.
test-fast: $(VENV)/.test lint layers
	$(BIN)/mypy & types=$$!; \
	WAVEBUS_MODEL_SHARE=$${WAVEBUS_MODEL_SHARE:-0.2} $(BIN)/python -m pytest -q -m '$(TESTS)' -n 3 --dist worksteal \
		--ignore=tests/vllm --ignore=tests/mutants --ignore=tests/slow; tests=$$?; \
	wait $$types && exit $$tests

# What takes minutes and tells little more than the others do when all is well; on both vLLMs.
# Demos run alone: how many of their updates find a request in flight depends on what else the
# processors do.
slow: $(VENV)/.vllm $(NEXT)/.vllm-next
	$(BIN)/python -m pytest -q -m 'slow or ci' -n 3 --dist loadfile --ignore=tests/vllm -k 'not demo' tests
	WAVEBUS_CHAOS_FRAMES=20000 WAVEBUS_CHAOS_CONNECTIONS=300 \
		$(BIN)/python -m pytest -q -m 'not slow' -n 3 --dist worksteal tests/model tests/chaos
	$(BIN)/python -m pytest -q -m 'slow or ci' --ignore=tests/vllm -k demo tests
	$(BIN)/python -m pytest -q -m 'not slow' tests/vllm/test_engine_inprocess.py
	$(BIN)/python -m pytest -q -m 'slow or ci' $(TWO_FILES) --ignore-glob='*/test_dp_*' tests/vllm
	$(BIN)/python -m pytest -q -m 'slow or ci' tests/vllm/test_dp_*.py
	$(MAKE) test-next
	$(NEXT)/bin/python -m pytest -q -m slow $(TWO_FILES) --ignore-glob='*/test_dp_*' tests/vllm
	$(NEXT)/bin/python -m pytest -q -m 'slow and not own_coordinator' tests/vllm/test_dp_*.py

# Tests of the tests: each guarantee, broken on purpose, must make its suite fail.
mutants: $(VENV)/.test
	$(BIN)/python -m pytest -q tests/mutants

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

$(DOCS)/.docs: pyproject.toml .ci/setup
	PYTHON=$(PYTHON) .ci/setup docs

$(NEXT)/.vllm-next: $(VENV)/.vllm .ci/setup
	PYTHON=$(PYTHON) .ci/setup vllm-next

# 10,000 schedules of bad networks and dying processes, on all cores; 300 rounds where
# `make test` has some, a million fuzzed frames, 10,000 bad connections; and every cell of the fault
# matrix (docs/faults.md), with those on real vLLM.
chaos: $(VENV)/.vllm
	WAVEBUS_CHAOS_SCHEDULES=10000 $(BIN)/python -m pytest -q tests/chaos/test_schedules.py
	WAVEBUS_CHAOS_ROUNDS=300 WAVEBUS_CHAOS_FRAMES=1000000 WAVEBUS_CHAOS_CONNECTIONS=10000 \
		$(BIN)/python -m pytest -q --ignore=tests/chaos/test_schedules.py tests/chaos
	WAVEBUS_CHAOS_FAULTS=all $(BIN)/python -m pytest -q -n 2 --dist load tests/faults
	WAVEBUS_CHAOS_FAULTS=all $(BIN)/python -m pytest -q tests/vllm/test_faults.py \
		tests/vllm/test_dp_faults.py

# 16 engines, 5,000 updates, a fault every 20; 200 staged updates back to back.
soak: $(VENV)/.test
	WAVEBUS_SOAK_ENGINES=16 WAVEBUS_SOAK_UPDATES=5000 WAVEBUS_SOAK_STAGED=200 \
		$(BIN)/python -m pytest -q tests/soak

bench: $(VENV)/.vllm
	$(BIN)/python -m pytest -q tests/slow
	$(BIN)/wavebus bench control --engines 64
	$(BIN)/wavebus bench control --engines 256
	$(BIN)/wavebus bench pause
	$(BIN)/wavebus bench gap

# The site, in site/; any warning is a failure. `.venv-docs/bin/mkdocs serve` shows pages while you write.
docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(DOCS)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) $(NEXT) $(DOCS) build site *.egg-info
