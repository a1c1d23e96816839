# Everything runs in .venv, which `setup` makes from PYTHON and renews when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup test test-all lint docs bench example clean
setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

test: setup
	$(PYTEST) -m "not whole"

test-all: setup
	$(PYTEST)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

docs: setup
	$(PY) -m mkdocs build --strict --quiet --site-dir build/site

bench: setup
	set -e; for file in $(filter-out %/common.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$file"; $(PY) $$file; done

example: setup
	$(PY) examples/movielens.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
