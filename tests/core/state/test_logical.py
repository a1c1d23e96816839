"""Rows, tables and slots are set, loaded and read, for every placement and dtype."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from facade_cases import assert_same, mesh

import tpu_embed
from tpu_embed import optimizers as o

SIZES = {"mod": 11, "small": 3, "div": 11, "replicated": 5}


def _features(**options):
    """Return one of each placement, two of them in one stack, and one with a global slot."""
    placed = {name: "mod" if name == "small" else name for name in SIZES}
    tables = [
        tpu_embed.TableConfig(size, 2, name=name, placement=placed[name], **options)
        for name, size in SIZES.items()
    ]
    tables.append(tpu_embed.TableConfig(7, 2, name="optax", optimizer=optax.adam(0.1)))
    return [tpu_embed.FeatureConfig(table) for table in tables]


@functools.cache
def _engine(devices, dtype="float32"):
    rule = o.RowWiseAdagrad(0.5)
    engine = tpu_embed.EmbeddingEngine(_features(dtype=dtype), rule, mesh=mesh(devices))
    return engine, engine.init(jax.random.key(0))


def _host(engine, state):
    return jax.tree.map(np.asarray, (engine.tables(state), engine.slots(state)))


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (8, "bfloat16")])
@pytest.mark.quick(1)
def test_rows_are_set_and_loaded(devices, dtype):
    engine, state = _engine(devices, dtype)
    before = _host(engine, state)
    tables, slots = jax.tree.map(np.copy, before)
    rng, first = np.random.default_rng(0), state
    for name, size in SIZES.items():
        rows, values = np.array([size - 1, 0]), np.array([[1.001, 2], [3, 4]], np.float32)
        state = engine.set_rows(state, name, rows, values)
        state = engine.set_rows(state, name, [1], [7], slot="accumulators")
        tables[name][rows], slots[name]["accumulators"][1] = values, 7
    assert_same(_host(engine, state), (tables, slots))
    for name in ("mod", "div", "small"):  # in blocks
        new = rng.normal(size=tables[name].shape).astype(np.float32)
        state = engine.load(state, name, iter(np.array_split(new, [1, 2, 2])))
        tables[name] = new.astype(tables[name].dtype)
    sums = slots["div"]["accumulators"] = rng.random(SIZES["div"], np.float32)
    state = engine.load(state, "div", np.split(sums, [4]), slot="accumulators")
    assert_same(_host(engine, state), (tables, slots))
    given = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(np.float32), before)
    given[1]["optax"]["count"] = np.asarray(5, np.int32)
    loaded = engine.load_arrays(first, *given)
    expected = jax.tree.map(lambda new, old: new.astype(old.dtype), given, before)
    assert_same(_host(engine, loaded), expected)
    assert_same(_host(engine, first), before)
    assert loaded.step is first.step


def test_bfloat16_rounds_to_nearest_even():
    engine, state = _engine(8, "bfloat16")
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8], [1 + 2**-8 + 2**-12, -1 - 2**-8]], np.float32)
    state = engine.set_rows(state, "mod", [3, 9], values)
    found = np.asarray(engine.tables(state)["mod"])[[3, 9]]
    assert found.dtype == ml_dtypes.bfloat16
    assert found.astype(np.float32).tolist() == [[1.0, 1 + 2 * 2**-7], [1 + 2**-7, -1.0]]


def test_rows_set_inside_a_jit_are_written_where_they_exist():
    engine, state = _engine(1)
    before = engine.tables(state)

    write = jax.jit(lambda state, *given: engine.set_rows(state, "mod", *given))
    # row 11 would be the first of the next table in the stack
    new = engine.tables(write(state, np.array([2, 11, -1]), np.full((3, 2), 9, np.float32)))
    expected = np.array(before["mod"])
    expected[2] = 9
    assert_same(new, {**before, "mod": expected})


def test_a_loaded_global_slot_is_the_callers_own():
    """The state is donated by the next update; what it was loaded from is not."""
    table = tpu_embed.TableConfig(7, 2, name="optax", optimizer=optax.adam(0.1))
    engine = tpu_embed.EmbeddingEngine(tpu_embed.FeatureConfig(table), mesh=mesh(2))
    state = engine.init(jax.random.key(0))
    count = jnp.copy(engine.slots(state)["optax"]["count"])
    state = engine.load_arrays(state, {}, {"optax": {"count": count}})
    engine.update_in_place(state, engine.place(np.arange(2)), np.ones((2, 2), np.float32))
    assert int(count) == 0


def test_what_is_retrieved_is_the_callers_own():
    embedding = tpu_embed.TPUEmbedding(_features(), o.RowWiseAdagrad(0.5), mesh=mesh(1))
    found = embedding.retrieve()
    before = jax.tree.map(np.copy, found)
    for array in jax.tree.leaves(found):
        array[...] = 0
    assert_same(embedding.retrieve(), before)


ROWS = np.array([0, 2])
VALUES = np.zeros((2, 2), np.float32)

WRONG_ROWS = [
    (("mine", ROWS, VALUES), {}, r"table: expected one of \['div', .*'small'\], got 'mine'"),
    (("mod", ROWS, VALUES), {"slot": "mine"}, r"table 'mod': slot: .*\['accumulators'\], got 'mi"),
    (("mod", ROWS[:, None], VALUES), {}, r"rows: expected integers of shape \(n,\), got int64 of"),
    (("mod", [0.0, 2.0], VALUES), {}, r"rows: expected integers of shape \(n,\), got float64 of"),
    (("mod", ROWS, VALUES[:1]), {}, r"'mod': values: expected shape \(2, 2\), got \(1, 2\)"),
    (("mod", ROWS, VALUES), {"slot": "accumulators"}, r"'accumulators': values: expected shape"),
    (("mod", ROWS, VALUES * 1j), {}, "'mod': values: expected real numbers, got dtype complex64"),
    (("small", [0, 3], VALUES), {}, r"'small': rows: expected rows in \[0, 3\), got row 3"),
    (("small", [-1, 0], VALUES), {}, r"'small': rows: expected rows in \[0, 3\), got row -1"),
    (("mod", [4, 4], VALUES), {}, "'mod': rows: expected each row once, got row 4 2 times"),
    (("optax", ROWS, VALUES), {"slot": "count"}, r"one array that the whole stack.*load_arrays"),
]


@pytest.mark.parametrize(("given", "options", "said"), WRONG_ROWS)
def test_wrong_rows(given, options, said):
    engine, state = _engine(1)
    with pytest.raises(ValueError, match=said):
        engine.set_rows(state, *given, **options)


WRONG_BLOCKS = [
    ([VALUES], r"table 'mod': expected 11 rows in all, got 2"),
    ([VALUES] * 6, r"'mod': expected blocks .*\(n, 2\) that have 11 rows .*\(2, 2\) from row 10"),
    ([VALUES[:, :1]], r"'mod': expected blocks of shape \(n, 2\)"),
    ([np.float32(0)], r"'mod': expected blocks of shape \(n, 2\).* got shape \(\) from row 0"),
    ([np.full((11, 2), "a")], r"'mod': expected real numbers, got dtype <U1"),
]


@pytest.mark.parametrize(("blocks", "said"), WRONG_BLOCKS)
def test_wrong_blocks(blocks, said, refused):
    engine, state = _engine(1)
    refused(said, engine.load, state, "mod", blocks)
    refused("one array that the whole stack shares", engine.load, state, "optax", [], slot="count")


def test_what_is_no_mapping(refused):
    engine, state = _engine(1)
    refused("tables: expected a mapping by name, got NoneType", engine.load_arrays, state, None)
    says = "slots of table 'mod': expected a mapping by name, got i"
    refused(says, engine.load_arrays, state, {}, {"mod": 3})


def test_masked_arrays_are_refused(refused):
    engine, state = _engine(1)
    masked = np.ma.masked_array(np.ones((11, 2), np.float32), mask=True)
    for load, *given in (
        (engine.load_arrays, {"mod": masked}),
        (engine.load, "mod", [masked]),
        (engine.set_rows, "mod", np.arange(11), masked),
    ):
        refused("'mod': expected an array, got a masked", load, state, *given, error=TypeError)
