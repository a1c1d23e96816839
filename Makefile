# Everything runs in .venv, which `setup` makes from PYTHON and renews when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup test test-all sanitize lint docs bench example clean
setup: $(STAMP)

$(STAMP): pyproject.toml setup.py $(wildcard tpu_embed/kernels/native/*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

# Everything runs on the compiled kernels, where they could be built; the engine's tests then run
# in XLA's operations too (test-all: everything does).
ENGINE_TESTS := $(patsubst %,tests/core/test_%.py, combine dedup engine lookup occurrences route sums)

test: setup
	$(PYTEST) -m "not whole"
	TPU_EMBED_KERNELS=reference $(PYTEST) -m "not whole" $(ENGINE_TESTS)

test-all: setup
	$(PYTEST)
	TPU_EMBED_KERNELS=reference $(PYTEST)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

docs: setup
	$(PY) -m mkdocs build --strict --quiet --site-dir build/site

bench: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[bench,examples]"
	set -e; for name in embedding scaling small place vocabulary sparse_grad flax_layers; do \
	  echo "== $$name"; $(PY) benchmarks/$$name.py; done

# The C++ kernels under the address and undefined-behaviour sanitizers, on random input.
sanitize: setup
	$(PY) tests/kernels/sanitize.py

example: setup
	$(PY) examples/movielens.py

clean:
	rm -rf $(VENV) build *.egg-info tpu_embed/kernels/_native* .pytest_cache .ruff_cache
