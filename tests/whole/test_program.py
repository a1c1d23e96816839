"""The compiled step, read in its HLO: in place, no full-table pass, one kernel per stack."""

import collections
import functools
import re

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, optimizers
from tpu_embed.kernels import cpu, dispatch
from tpu_embed.planning.compiled import abstract_state

BATCH = 16
REFERENCE = pytest.param("reference", marks=pytest.mark.whole)
PATHS = ["reference"] if cpu.load().path is None else ["native", REFERENCE]
SMALL, LARGE = 4096, 409_600
"""Vocabulary sizes; both have more rows a shard than a batch has ids."""


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Run a test with the kernels of each path; return which."""
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    return request.param


def make_engine(declared, optimizer, devices):
    features = {name: FeatureConfig(table) for name, table in declared.items()}
    return EmbeddingEngine(features, optimizer, mesh=mesh(devices))


def compiled_step(engine, ids):
    """Return the compiled training step of a linear model, state donated; nothing is allocated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, features):
        activations = engine.lookup(state, features)
        return engine.update(state, features, activations)

    return step.lower(abstract_state(engine), ids).compile()


def ids_of(engine, width=4):
    return {path: np.zeros((BATCH, width), np.int32) for path in engine.describe()["features"]}


RULES = [
    (optimizers.Adagrad(0.1), "bfloat16"),
    (optimizers.RowWiseAdagrad(0.1), "float32"),
    (optimizers.Adam(0.1), "float32"),
    (optimizers.SGD(0.1, use_gradient_accumulation=False), "bfloat16"),
]


@pytest.mark.parametrize(("rule", "dtype"), RULES)
@pytest.mark.quick(1)
def test_temporaries_do_not_grow_with_the_vocabulary(path, rule, dtype):
    temporaries = []
    for size in (SMALL, LARGE):
        engine = make_engine({"x": TableConfig(size, 16, dtype=dtype)}, rule, 1)
        compiled = compiled_step(engine, ids_of(engine))
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    # Less than a byte for each row more; XLA's buffers differ by some hundred bytes.
    assert abs(temporaries[1] - temporaries[0]) < LARGE - SMALL


def kernels(engine):
    """Return how often each operation that reads or moves rows occurs, custom calls by target."""
    hlo = compiled_step(engine, ids_of(engine, width=2)).as_text()
    names = ("gather", "scatter", "sort", "all-to-all", "while", "custom-call")
    counts = {name: len(re.findall(rf" {name}\(", hlo)) for name in names}
    return counts | collections.Counter(re.findall(r'custom_call_target="(\w+)"', hlo))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.whole
def test_kernels_grow_with_stacks_not_with_tables(path, devices):
    def declared(count):
        return {f"f{i:02d}": TableConfig(100 + i, (4, 8, 16)[i % 3]) for i in range(count)}

    few = kernels(make_engine(declared(3), optimizers.Adagrad(0.1), devices))
    many = kernels(make_engine(declared(26), optimizers.Adagrad(0.1), devices))
    assert few == many
    assert few.get("tpu_embed_update", 0) == (3 if path == "native" else 0)
    assert few["sort"] or path == "native"


def test_one_transfer_a_batch():
    tables = {f"f{i}": TableConfig(100, (4, 8)[i % 2]) for i in range(5)}
    engine = make_engine(tables, optimizers.SGD(0.1), 8)
    features = ids_of(engine)
    features["f0"] = RaggedIds.from_lists([[1, 2]] * BATCH)
    assert len(jax.tree.leaves(engine.place(features))) == 1


@pytest.mark.skipif(cpu.load().path is None, reason="compiled library: not built")
def test_jagged_gradients_are_summed_by_the_update_kernel(monkeypatch):
    """On one device no partial sums are made before it, and gradients are not put together."""
    monkeypatch.setenv(dispatch.VARIABLE, "native")
    feature = FeatureConfig(TableConfig(23, 8, name="item"), jagged=True)
    engine = EmbeddingEngine([feature, feature], optimizers.Adagrad(0.1), mesh=mesh(1))
    ids = np.random.default_rng(0).integers(0, 23, (2, BATCH, 30)).astype(np.int32)
    batch = engine.place(list(ids))
    compiled = compiled_step(engine, batch)
    kernels = re.findall(r'custom_call_target="tpu_embed_(\w+)"', compiled.as_text())
    assert sorted(kernels) == ["gather_sum", "update"]
    values = sum(shape.capacity for shape in batch.spec.feature_shapes) * 8 * 4
    assert values < compiled.memory_analysis().temp_size_in_bytes < 1.5 * values
