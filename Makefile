# Everything runs in .venv, which is made from PYTHON and renewed when pyproject.toml changes: the
# package and what it needs, and for each target the extra of pyproject.toml that it needs besides.
# pip is not to compile what is installed: Python does it when it first imports a file.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
INSTALL := PIP_COMPILE=0 $(PY) -m pip install --quiet --disable-pip-version-check
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup setup-newest environments test test-all test-shard test-newest test-newest-quick test-tpu-compile sanitize lint docs accessibility wheel bench example multihost clean
setup: $(VENV)/.with-dev

$(STAMP): pyproject.toml setup.py $(wildcard tpu_embed/kernels/native/*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) jax  # its headers are there for the build, then, which fetches it again otherwise
	@echo "compiling the kernels: a minute or two"
	$(INSTALL) --editable .
	touch $@

# The package is installed already, so pip adds what the extra asks for, and compiles nothing.
$(VENV)/.with-%: $(STAMP)
	$(INSTALL) "tpu-embed[$*]"
	touch $@

# Everything runs on the compiled kernels, where they could be built; the engine's tests then run
# in XLA's operations too (test-all: everything does).
ENGINE_TESTS := $(patsubst %,tests/core/%.py, lookup/test_lookup update/test_occurrences update/test_sums)

# libtpu, which compiles for TPUs on any x86-64 Linux machine, stays out of .venv: where it is
# installed, JAX looks for a TPU first.
LIBTPU := build/libtpu
TPU_PYTEST := PYTHONPATH=$(LIBTPU) JAX_PLATFORMS=cpu JAX_ENABLE_COMPILATION_CACHE=false $(PYTEST)

$(LIBTPU)/.installed: $(STAMP)
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  $(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(LIBTPU) \
	    "$$($(PY) -c 'import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"; \
	else echo "libtpu is for x86-64 Linux: tests/tpu will be skipped"; mkdir -p $(LIBTPU); fi
	touch $@

environments: setup setup-newest $(LIBTPU)/.installed

test: setup $(LIBTPU)/.installed
	$(PYTEST) -m "not whole" --ignore tests/tpu
	$(TPU_PYTEST) -m "not whole" tests/tpu
	TPU_EMBED_KERNELS=reference $(PYTEST) -m "not whole" $(ENGINE_TESTS)

test-all: setup test-tpu-compile
	$(PYTEST) --ignore tests/tpu
	TPU_EMBED_KERNELS=reference $(PYTEST) --ignore tests/tpu

# What `make test` leaves to `make test-all`, in parts: `make test-shard SHARD=3/20`, or the one that
# the commit chooses, so that all of it runs every few dozen commits.
SHARDS := 20
SHARD = $(shell expr $$(printf %d 0x$$(git rev-parse --short=6 HEAD)) % $(SHARDS))/$(SHARDS)
test-shard: setup
	$(PYTEST) -m whole --ignore tests/tpu --shard $(SHARD)

# The newest JAX of the index asks for a newer Python than the oldest JAX that works, so it has an
# environment of its own. Where no such Python is found, that is said, and nothing is tested.
NEWEST := build/newest
NEWEST_PYTHON = $(shell for each in python3.13 python3.12 $(foreach n,3.13 3.12,$(wildcard $(HOME)/.pyenv/versions/$(n).*/bin/python3)); do \
  $$each -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && echo $$each && break; done)
NEWEST_TESTS := -m "not whole" --ignore tests/tpu
# The corners that a new JAX breaks first: programs that are walked, shard_map, both APIs, layers,
# compiled kernels, files. Products of input forms are left out: they cost more than they tell.
NEWEST_QUICK := -m "not whole" $(patsubst %,tests/%.py, core/test_engine core/update/test_in_place \
  sparse/test_sparse_grad training/autodiff/test_tags training/autodiff/test_compute_gradients \
  nn/test_embedding kernels/test_dispatch io/checkpoint/test_checkpoint_forms) -k \
  "not every and not bad_ids and not integers and not tabulated and not sequences and not quantized and not float64 and not refused[8]"

# Only what the package requires is installed there: the tests import it from here. So nothing is
# written beside `setup`, which may run at the same time (`make -j 2 environments`).
NEWEST_EXTRAS := test examples export tensorboard
$(NEWEST)/.installed: pyproject.toml setup.py $(wildcard tpu_embed/kernels/native/*)
	test -x $(NEWEST)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -c 'import sys, tomllib; \
	  project = tomllib.load(open("pyproject.toml", "rb")); \
	  extras = [project["project"]["optional-dependencies"][name] for name in sys.argv[1:]]; \
	  print(*sum(extras, project["build-system"]["requires"] + project["project"]["dependencies"]), sep="\n")' \
	  $(NEWEST_EXTRAS) > $(NEWEST)/requirements.txt
	PIP_COMPILE=0 $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python setup.py --quiet build_ext --inplace
	touch $@

setup-newest:
	@if [ -z "$(NEWEST_PYTHON)" ]; then echo "no Python 3.12 or 3.13 here: nothing is tested with the newest JAX"; \
	else $(MAKE) $(NEWEST)/.installed; fi

test-newest: setup-newest
	@if [ -z "$(NEWEST_PYTHON)" ]; then exit; fi; \
	$(NEWEST)/bin/python setup.py --quiet egg_info && \
	$(NEWEST)/bin/python -c "import jax, sys; print('JAX', jax.__version__, 'on Python', sys.version)" && \
	$(NEWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(NEWEST_TESTS)

test-newest-quick:
	$(MAKE) test-newest NEWEST_TESTS='$(NEWEST_QUICK)'

# Training steps of both APIs for v4, v5e, v5p, v6e, tpu7x, and DLRM-DCNv2 whole: half an hour.
test-tpu-compile: setup $(LIBTPU)/.installed
	$(TPU_PYTEST) tests/tpu

# The schemas come with the tool; nothing is fetched.
SCHEMA := $(VENV)/bin/check-jsonschema --builtin-schema
lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff

# Nothing that a page needs comes from another site.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --site-dir build/site
	! grep -rnoE --include=*.html '(<link[^>]*(stylesheet|icon|preload|preconnect)|<script|<img|<source|<iframe)[^>]*(src|href|srcset)="?(https?:)?//' build/site

# Every page in Chromium, which has to be there: contrast, names, focus, requests that leave the site.
accessibility: docs $(VENV)/.with-accessibility
	$(PY) tests/repo/accessibility.py

# The sdist, the wheel made from it, and both tried: installed where the source tree is not.
WHEEL := build/wheel
wheel: $(VENV)/.with-wheel
	rm -rf dist $(WHEEL)
	$(PY) -m build --outdir dist
	$(PYTHON) -m venv $(WHEEL)
	PIP_COMPILE=0 $(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cp examples/quickstart.py $(WHEEL)
	cd $(WHEEL) && bin/python -m tpu_embed check --no-speed && bin/python quickstart.py

bench: setup $(VENV)/.with-bench
	set -e; for name in embedding scaling small place pipeline outlier vocabulary vocabulary_map living in_place jagged hstu parts sparse_grad flax_layers checkpoint delta rows_at_home retrieval; do \
	  echo "== $$name"; $(PY) benchmarks/$$name.py; done

# The C++ kernels under the address and undefined-behaviour sanitizers, on random input.
sanitize: setup
	$(PY) tests/kernels/sanitize.py

example: $(VENV)/.with-examples
	$(PY) examples/movielens.py

# Two processes with four CPU devices each.
multihost: $(STAMP)
	$(PY) examples/multihost.py --local 2 --devices 4

clean:
	rm -rf $(VENV) build dist *.egg-info tpu_embed/kernels/_native* .pytest_cache .ruff_cache
