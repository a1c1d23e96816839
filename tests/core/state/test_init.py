"""Initial values of a row depend only on the key, the table's name and the row id."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, initializers
from tpu_embed import optimizers as o

SIZES = {"item": 21, "shop": 3, "word": 10}
NORMAL = jax.nn.initializers.normal(0.5)
KEY = jax.random.key(7)


def make_engine(on, initializer=NORMAL, rule=None, sizes=SIZES, stack_tables=True, **options):
    features = [
        FeatureConfig(TableConfig(size, 4, initializer, name=name, **options))
        for name, size in sizes.items()
    ]
    options = {"mesh": on, "stack_tables": stack_tables}
    return tpu_embed.EmbeddingEngine(features, rule or o.SGD(0.1), **options)


def tables_of(engine):
    return jax.device_get(engine.tables(engine.init(KEY)))


def row_by_row(sizes=SIZES):
    """Return the tables made one row at a time, as the rule says."""
    tables = {}
    for name, size in sizes.items():
        key = jax.random.fold_in(KEY, zlib.crc32(name.encode()))
        rows = [NORMAL(jax.random.fold_in(key, r), (1, 4), jnp.float32) for r in range(size)]
        tables[name] = np.concatenate(rows)
    return tables


LAYOUTS = {
    "one device": (1, {}),
    "mod on 3": (3, {}),
    "div on 8": (8, {"placement": "div"}),
    "mod on 8, unstacked": (8, {"stack_tables": False}),
    "replicated": (2, {"placement": "replicated"}),
    "one of two axes": (8, {"shard_axes": "q"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick(2)
def test_values_are_those_of_a_row_alone_wherever_it_lives(layout):
    devices, options = LAYOUTS[layout]
    grid = Mesh(np.array(jax.devices()).reshape(2, 4), ("p", "q"))
    on = grid if "shard_axes" in options else mesh(devices)
    jax.tree.map(np.testing.assert_array_equal, tables_of(make_engine(on, **options)), row_by_row())


def test_rows_tables_and_keys_differ():
    engine = make_engine(mesh(2))
    found = tables_of(engine)
    rows = np.concatenate(list(found.values()))
    assert len(np.unique(rows, axis=0)) == len(rows)
    other = jax.device_get(engine.tables(engine.init(jax.random.key(8))))
    assert not np.isin(other["item"], found["item"]).any()


def test_many_chunks_are_one(monkeypatch):
    monkeypatch.setattr("tpu_embed.core.state.init.CHUNK", 1)  # 64 rows at a time
    sizes = {"item": 200, "shop": 3}
    found = tables_of(make_engine(mesh(2), sizes=sizes))
    jax.tree.map(np.testing.assert_array_equal, found, row_by_row(sizes))


def test_bfloat16_rows_are_the_float32_ones_rounded():
    found = tables_of(make_engine(mesh(2), dtype="bfloat16"))
    for name, table in row_by_row().items():
        np.testing.assert_array_equal(found[name], table.astype(jnp.bfloat16), strict=True)


@pytest.mark.parametrize(("placement", "shards"), [("mod", 4), ("div", 4), ("replicated", 1)])
@pytest.mark.quick(1)
def test_an_initializer_that_asks_is_told_its_shard(placement, shards):
    calls = []

    def own(key, shape, dtype, shard_info):
        calls.append((shard_info.table_shape, shape, shard_info.rows.shape))
        assert shard_info.rows.dtype == jnp.int32
        size = shard_info.table_shape[0]
        inside = (shard_info.rows >= 0) & (shard_info.rows < size)  # also of padding rows
        values = jnp.where(inside, shard_info.rows, -1000)
        return jnp.broadcast_to(values[:, None], shape).astype(dtype)

    engine = make_engine(mesh(4), own, placement=placement)
    state, numbers = engine.init(KEY), initializers.RowIdInitializer(offset=3)
    numbered = tables_of(make_engine(mesh(4), numbers, placement=placement))
    for name, table in jax.device_get(engine.tables(state)).items():
        np.testing.assert_array_equal(table, np.arange(SIZES[name])[:, None] + np.zeros(4))
        np.testing.assert_array_equal(numbered[name], table + 3)
    assert {call[0] for call in calls} == {(size, 4) for size in SIZES.values()}
    for table_shape, shape, rows in calls:
        assert shape == (*rows, 4) == (-(-table_shape[0] // shards), 4)
    assert all((np.asarray(table) > -1000).all() for table in state.tables.values())


OTHER_SHAPES = [
    (lambda d: jnp.zeros((1, d - 1)), r"shape \(1, 3\)"),
    (lambda d: jnp.zeros(d), r"shape \(4,\)"),
    (lambda d: 0.5, "float"),
]


@pytest.mark.parametrize(("value", "got"), OTHER_SHAPES)
def test_another_shape_is_refused(value, got, refused):
    """It would be broadcast, or fill a part of the row."""

    says = r"table 'item': initializer: .* of shape \({}, 4\), got {}"
    one = make_engine(mesh(2), lambda key, shape, dtype: value(shape[1]))
    refused(says.format(1, got), one.init, KEY)
    shard = make_engine(mesh(2), lambda key, shape, dtype, shard_info: value(shape[1]))
    refused(says.format(11, got), shard.init, KEY)  # of "item" on one of two devices


def test_slots_start_as_declared_and_padding_as_zeros():
    engine = make_engine(mesh(8), rule=o.FTRL(0.1, slot_initializers={"linears": 0.25}))
    state = engine.init(KEY)
    for slots in engine.slots(state).values():
        assert (np.asarray(slots["accumulators"]) == np.float32(0.1)).all()
        assert (np.asarray(slots["linears"]) == 0.25).all()
    (stack,) = engine.layout.stacks
    places = [stack.physical(np.arange(t.vocabulary_size), t) for t in stack.tables]
    padding = np.setdiff1d(np.arange(stack.physical_rows), np.concatenate(places))
    assert padding.size == stack.physical_rows - sum(SIZES.values()) > 0
    assert not np.asarray(state.tables[stack.name])[padding].any()


@pytest.mark.whole
def test_random_slots_depend_on_no_layout():
    rule = o.Momentum(0.1, slot_initializers={"momenta": NORMAL})
    spread = make_engine(mesh(8), rule=rule, placement="div", stack_tables=False)
    one, other = (
        jax.device_get(engine.slots(engine.init(KEY)))
        for engine in (make_engine(mesh(1), rule=rule), spread)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not np.isin(one["item"]["momenta"], row_by_row()["item"]).any()


def test_no_table_no_slots_without_an_optimizer():
    table = TableConfig(5, 4, name="t", trainable=False)
    engine = tpu_embed.EmbeddingEngine(FeatureConfig(table), mesh=mesh(2))
    state = engine.init(KEY)
    assert (engine.slots(state), int(state.step)) == ({"t": {}}, 0)
    counters = jax.device_get(state.counters)
    assert (counters["bad_ids"].tolist(), counters["overflows"]) == ([0], 0)
