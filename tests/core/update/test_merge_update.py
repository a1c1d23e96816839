"""Engines whose owners update rows by the SparseCores' kernel, interpreted on a CPU."""

import functools
import types

import jax
import numpy as np
import pytest
from facade_cases import mesh
from jax.experimental.pallas import tpu_sc as plsc
from sparsecore_interpreter import interpreted

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.kernels import dispatch
from tpu_embed.kernels import sparsecore_rules as rules

V, D, B = 40, 20, 16
ON_THE_WAY, HALF = {"exchange_dtype": "bfloat16"}, {"dtype": "bfloat16"}
SKIP = {"on_bad_gradient": "skip"}
CASES = {
    # devices, rule, options of the table or of the engine, ids inside a jit
    "placed": (4, o.Adagrad(0.1), {}, False),
    "traced": (2, o.Momentum(0.1), {}, True),
    "one device, a step that is skipped": (1, o.RowWiseAdagrad(0.1, clipvalue=0.5), SKIP, False),
    "a table rounded at random": (4, o.Momentum(0.1), HALF | {"rounding": "stochastic"}, False),
    "bfloat16 on the way": (4, o.SGD(0.1, weight_decay_factor=0.01), ON_THE_WAY, False),
    "one device, bfloat16": (1, o.SGD(0.1), ON_THE_WAY, False),
    "a table of bfloat16, traced": (2, o.SGD(0.1), HALF, True),
    "two slots, traced, bfloat16": (2, o.Adam(0.1), ON_THE_WAY, True),
}


def choose(calls, *operands, sparse=None, **others):
    """Choose the SparseCores for what merges and updates or rounds, and for nothing else."""
    name = getattr(getattr(sparse, "func", sparse), "__qualname__", "")
    if name in KERNELS:
        calls.append(name)
        return sparse(*operands)
    return CHOOSE(*operands, sparse=sparse, **others)


ROUNDING = {"gather_sum.<locals>.in_kernel", "read_rows.<locals>.in_kernel"}
KERNELS = ROUNDING | {"_apply.<locals>.to_partials.<locals>.at_once"}


CHOOSE = dispatch.choose


@pytest.fixture
def sparse_calls(monkeypatch):
    """Pack rows for SparseCores and interpret `merge_update`; return its calls."""
    calls = []
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: "words")
    monkeypatch.setattr(dispatch, "choose", functools.partial(choose, calls))
    core = types.SimpleNamespace(num_lanes=8, num_cores=1, num_subcores=4)
    monkeypatch.setattr(plsc, "get_sparse_core_info", lambda: core)
    with interpreted(late=True):
        yield calls


def trained(devices, rule, options, traced):
    """Return the table and its slots after two steps, and what is looked up in it then."""
    rng = np.random.default_rng(0)
    options = dict(options)
    of_table = {name: options.pop(name) for name in ("dtype", "rounding") if name in options}
    table = TableConfig(V, D, combiner="sum", name="items", **of_table)
    features = {"a": FeatureConfig(table), "b": FeatureConfig(table)}
    engine = EmbeddingEngine(features, rule, mesh=mesh(devices), **options)
    state = engine.init(jax.random.key(0))
    update = jax.jit(engine.update) if traced else engine.update
    for step in range(2):
        bags = [rng.integers(0, V, rng.integers(0, 4)) for _ in range(B)]
        ids = {"a": rng.integers(-1, V, (B, 3)), "b": RaggedIds.from_lists(bags)}
        if traced:
            ids["b"] = rng.integers(-1, 3, (B, 2))  # rows that nearly all examples have
        gradients = {n: rng.normal(size=(B, D)).astype(np.float32) for n in ids}
        if step == 1 and "on_bad_gradient" in options:
            gradients["a"][3, 1] = np.nan
        state = update(state, ids if traced else engine.place(ids), gradients)
    activations = engine.lookup(state, ids if traced else engine.place(ids))
    return engine.tables(state)["items"], engine.slots(state)["items"], activations


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick(1)
def test_an_engine_has_the_rows_and_slots_of_plain_tables(name, request):
    devices, rule, options, traced = CASES[name]
    expected, slots, activations = jax.device_get(trained(devices, rule, options, traced))
    calls = request.getfixturevalue("sparse_calls")
    found, others, rounded = jax.device_get(trained(devices, rule, options, traced))
    assert set(calls) == (KERNELS if "exchange_dtype" in options else KERNELS - ROUNDING)
    jax.tree.map(np.testing.assert_array_equal, others, slots)
    if type(rule).__name__ in ("SGD", "Momentum"):
        np.testing.assert_array_equal(found, expected)
        jax.tree.map(np.testing.assert_array_equal, rounded, activations)
    else:
        # Two steps, each below 1, and their roundings.
        np.testing.assert_allclose(found, expected, rtol=2.0**-22, atol=2 * rules.STEP_ERROR)
