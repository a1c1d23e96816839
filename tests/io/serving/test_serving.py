"""Lookups in plain arrays give the bits of the engine, and agree with the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pandas as pd
import pyarrow as pa
import pytest
import serving_cases
from facade_cases import mesh
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec
from kernel_cases import assert_same_bits

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.core.ids import structure
from tpu_embed.io import QuantizedTable, quantize_rows, serving_lookup
from tpu_embed.io.serving import lookup as serving

ROWS, DIM = serving_cases.ROWS, serving_cases.DIM
TABLE = np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)


def trained(forms, devices):
    """Return features, ids, weights, tables and activations of an engine on so many devices."""
    features, ids, weights = serving_cases.declared(forms)
    engine = EmbeddingEngine(features, mesh=mesh(devices))
    state = engine.init(jax.random.key(3))
    activations = engine.lookup(state, engine.place(ids, weights))
    return features, ids, weights, engine.tables(state), activations


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.whole), 8])
def model(request):
    return trained(serving_cases.DENSE | serving_cases.HOST, request.param)


@pytest.mark.parametrize("kind", [dict, serving_cases.as_numpy])
@pytest.mark.quick(1)
def test_every_form_has_the_bits_of_the_engine(model, kind):
    features, ids, weights, tables, activations = model
    found = serving_lookup(kind(tables), ids, features, weights)
    assert_same_bits(found, activations)


def test_every_form_is_what_the_oracle_says(model):
    features, ids, weights, tables, _ = model
    found = serving_lookup(tables, ids, features, weights)
    for path, feature in features.items():
        table = np.asarray(tables[path.split(":")[0]]).astype(np.float64)
        expected = oracle.lookup(table, feature, ids[path], weights[path])
        # A handful of float32 sums and one division; negative weights make small denominators.
        np.testing.assert_allclose(found[path], expected, rtol=2e-5, atol=2e-6, err_msg=path)


# -- where tables are ------------------------------------------------------------------------------

FILMS = TableConfig(ROWS, DIM, combiner="sum", name="films")
BAGS = np.array([[0, 3, -1], [12, 12, 1]])
SUMS = TABLE[BAGS].astype(np.float64)
SUMS[0, 2] = 0
EXPECTED = sum(np.float32(SUMS[:, at]) for at in range(3))


def over_all_devices(*axes):
    table = np.concatenate([TABLE, np.zeros((16 - ROWS, DIM), np.float32)])
    return jax.device_put(table, NamedSharding(mesh(8), PartitionSpec(*axes)))


PLACES = {
    "one device": lambda: jax.device_put(TABLE, jax.devices()[5]),
    "copies": lambda: over_all_devices(),
    "shards": lambda: over_all_devices("d"),
    "columns": lambda: np.asfortranarray(TABLE),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.quick(2)
def test_a_table_may_be_anywhere(place):
    table = PLACES[place]()
    config = TableConfig(len(table), DIM, combiner="sum")
    found = serving_lookup({config: table}, BAGS, FeatureConfig(config))
    assert_same_bits(np.asarray(found), EXPECTED)


def test_tables_are_keyed_by_config_or_by_name():
    feature = FeatureConfig(FILMS)
    for key in (FILMS, "films"):
        assert_same_bits(np.asarray(serving_lookup({key: TABLE}, BAGS, feature)), EXPECTED)
    unnamed = TableConfig(ROWS, DIM, combiner="sum", placement="auto", optimizer="not looked at")
    found = serving_lookup({"table_0": TABLE}, BAGS, FeatureConfig(unnamed))
    assert_same_bits(np.asarray(found), EXPECTED)


def test_only_rows_that_are_asked_for_are_read_on_the_host():
    size = 2**30  # 20 GB and 5 GB, of which there is one row
    big = TableConfig(size, DIM, combiner="sum", name="big")
    ids = np.array([[0, size - 1], [7, -1]])
    table = np.broadcast_to(TABLE[2], (size, DIM))
    found = serving_lookup({"big": table}, ids, FeatureConfig(big))
    np.testing.assert_array_equal(found, [TABLE[2] + TABLE[2], TABLE[2]])
    one = quantize_rows(TABLE[2:3])
    scale, offset = np.broadcast_to(one.scale, size), np.broadcast_to(one.offset, size)
    quantized = QuantizedTable(np.broadcast_to(one.values[0], (size, DIM)), scale, offset)
    row = np.asarray(one.dequantized())[0]
    found = serving_lookup({"big": quantized}, ids, FeatureConfig(big))
    np.testing.assert_array_equal(found, [row + row, row])


def test_programs_are_as_few_as_powers_of_two():
    feature = FeatureConfig(FILMS)
    for lengths in ([4, 1], [3, 3], [0, 8]):
        bags = RaggedIds.from_lists([[1] * n for n in lengths])
        serving_lookup({"films": jnp.asarray(TABLE)}, bags, feature)
    server = serving.server_of(structure.flatten(feature))
    assert server._program._cache_size() == 1


# -- quantized tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["host", "device", "jit"])
@pytest.mark.quick(2)
def test_quantized_rows_are_served_as_they_dequantize(where, dtype):
    config = TableConfig(ROWS, DIM, combiner="sqrtn", name="t", dtype=dtype)
    feature, plain = FeatureConfig(config), FeatureConfig(TableConfig(ROWS, DIM, combiner="sqrtn"))
    quantized = quantize_rows(TABLE)
    expected = serving_lookup({"table_0": quantized.dequantized()}, BAGS, plain)
    if where == "jit":
        run = jax.jit(lambda table, ids: serving_lookup({"t": table}, ids, feature))
        found = run(quantized, BAGS)
    else:
        table = quantized if where == "host" else jax.device_put(quantized)
        found = serving_lookup({"t": table}, BAGS, feature)
    assert_same_bits(found, expected)


# -- inside a jit ----------------------------------------------------------------------------------


def test_bad_ids_raise_on_the_host_and_are_dropped_and_reported_in_a_jit():
    feature, ids = FeatureConfig(FILMS), np.array([[0, ROWS], [-2, 1]])
    with pytest.raises(ValueError, match=r"feature 'feature'.*id 13 at example 0.*and 1 more"):
        serving_lookup({"films": TABLE}, ids, feature)

    def run(ids):
        return serving_lookup({"films": TABLE}, ids, feature)

    np.testing.assert_array_equal(jax.jit(run)(ids), TABLE[:2])
    error, _ = checkify.checkify(jax.jit(run))(ids)
    with pytest.raises(Exception, match=r"2 id\(s\) outside \[0, 13\) of table 'films'"):
        error.throw()


def test_weights_have_gradients_and_tables_do_not():
    feature = FeatureConfig(TableConfig(ROWS, DIM, name="t"))
    weights = np.float32([[1, 2, 3], [0.5, -2, 4]])

    def total(table, weights):
        return jnp.sum(serving_lookup({"t": table}, jnp.asarray(BAGS), feature, weights) ** 2)

    found = jax.jit(jax.grad(total, argnums=1))(TABLE, weights)

    def plain(weights):
        kept = jnp.where(BAGS < 0, 0, weights)
        means = jnp.einsum("bh,bhd->bd", kept, TABLE[BAGS]) / kept.sum(1)[:, None]
        return jnp.sum(means**2)

    # Both are sums of some ten products in float32.
    np.testing.assert_allclose(found, jax.jit(jax.grad(plain))(weights), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="sparse_value_and_grad"):
        jax.grad(total)(TABLE, weights)


def test_only_dense_ids_go_into_a_jit():
    features = {"a": FeatureConfig(FILMS), "b": FeatureConfig(FILMS)}

    @jax.jit
    def run(ids):
        bags = RaggedIds.from_lists([[1], [2]])
        return serving_lookup({"films": TABLE}, {"a": ids, "b": bags}, features)

    with pytest.raises(ValueError, match=r"feature 'b': expected dense arrays.*padded with -1"):
        run(BAGS)


# -- errors ----------------------------------------------------------------------------------------

OTHER = TableConfig(ROWS, DIM, name="other")
WRONG = QuantizedTable(TABLE.astype(np.int8), TABLE[:, :1], TABLE[:, 0])
ERRORS = {
    "missing": ({}, r"films missing: expected exactly \['films'\], got \[\]; key them by"),
    "extra": ({FILMS: TABLE, "x": TABLE}, r"x not declared: .* got \['films', 'x'\]"),
    "another config": ({FILMS: TABLE, OTHER: TABLE}, "other.* not declared"),
    "twice": ({FILMS: TABLE, "films": TABLE}, "films: expected each table once"),
    "shape": ({"films": TABLE[1:]}, r"'films': expected float32 of shape \(13, 5\), got .*12, 5"),
    "dtype": ({"films": TABLE.astype(np.float64)}, "expected float32 .* got float64 .* cast it"),
    "list": ({"films": TABLE.tolist()}, "'films': expected float32 .* got list"),
    "scale": ({"films": WRONG}, r"'films': scale: expected .* \(13,\), got .* \(13, 1\)"),
    "int8": ({"films": TABLE.astype(np.int8)}, "expected float32 .* got int8"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_table_expected_got_and_remedy(case):
    tables, text = ERRORS[case]
    with pytest.raises(ValueError, match=text):
        serving_lookup(tables, BAGS, FeatureConfig(FILMS))


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table, pa.RecordBatch.from_pydict])
def test_a_frame_may_leave_out_features(make):
    """Columns of other names are no features: a frame has what its columns have."""
    items = FeatureConfig(TableConfig(ROWS, DIM, name="items"))
    features = {"user": FeatureConfig(TableConfig(ROWS, DIM, name="users")), "item": items}
    ids = np.arange(3)
    found = serving_lookup({"items": TABLE}, make({"item": ids, "label": ids * 0.5}), features)
    assert set(found) == {"item"}
    np.testing.assert_array_equal(found["item"], TABLE[:3])
    with pytest.raises(ValueError, match="features: item is missing"):
        serving_lookup({"users": TABLE, "items": TABLE}, make({"label": ids}), features)


def test_one_user_and_many_items_in_one_call():
    """Each feature has its own batch size; features and tables that are left out do not matter."""
    users, items = (FeatureConfig(TableConfig(ROWS, DIM, name=name)) for name in ("users", "items"))
    features = {"user": users, "items": items, "context": {"seen": items, "page": users}}
    tables = {"users": TABLE, "items": TABLE[::-1]}
    ids = {"user": np.array([[4, 5]]), "items": np.arange(500) % ROWS}
    for found in (
        serving_lookup(tables, ids, features),
        jax.jit(lambda ids: serving_lookup(tables, ids, features))(ids),
    ):
        assert set(found) == {"user", "items"}
        np.testing.assert_array_equal(found["items"], TABLE[::-1][ids["items"]])
        np.testing.assert_array_equal(found["user"][0], (TABLE[4] + TABLE[5]) / 2)
    found = serving_lookup({"items": TABLE}, {"context": {"seen": ids["items"]}}, features)
    np.testing.assert_array_equal(found["context"]["seen"], TABLE[ids["items"]])
    with pytest.raises(ValueError, match="tables: users missing"):
        serving_lookup({"items": TABLE}, ids, features)
    with pytest.raises(ValueError, match=r"context is missing: .* got 1 entries \(other\)"):
        serving_lookup(tables, {"other": ids["items"]}, features)
