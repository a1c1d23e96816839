"""Where rows live: every logical row has its own place; which tables share a stack."""

import itertools

import jax
import numpy as np
import optax
import pytest
from facade_cases import mesh
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import make_stack, resolved

from tpu_embed import EmbeddingEngine, FeatureConfig, QuantizationConfig, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.layout import INT32_ROWS, ResolvedTable, make_stacks, row_places

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
PLACEMENTS = st.sampled_from(("mod", "div", "replicated"))


@given(SIZES, st.integers(1, 9), PLACEMENTS)
def test_every_row_has_a_place_of_its_own_on_the_shard_that_the_placement_says(
    sizes, shards, placement
):
    stack = make_stack(sizes, shards, placement)
    stored = np.arange(stack.physical_rows * 2).reshape(-1, 2)
    firsts, shard_steps, row_step = row_places(stack)
    every = []
    for table, first, shard_step in zip(stack.tables, firsts, shard_steps, strict=True):
        size = table.vocabulary_size
        rows, block = np.arange(size), -(-size // stack.num_shards)
        places = stack.physical(rows, table)
        every.append(places)
        shard, local = np.divmod(places, stack.num_rows)
        expected = np.divmod(rows, block) if placement != "mod" else np.divmod(rows, shards)[::-1]
        np.testing.assert_array_equal((shard, local - table.offset), expected)
        # The rows of a shard are evenly apart, and a view reads all rows in logical order.
        np.testing.assert_array_equal(rows, shard * shard_step + (local - first) * row_step)
        view = stack.logical_view(stored, table)
        assert np.shares_memory(view, stored)
        np.testing.assert_array_equal(view.reshape(-1, 2)[:size], stored[places])
    flat = np.concatenate(every)
    assert np.unique(flat).size == sum(sizes)
    assert 0 <= flat.min() <= flat.max() < stack.physical_rows
    # No more padding than the last rows of each table on each shard.
    assert stack.physical_rows < sum(sizes) + stack.num_shards * len(sizes)


@given(SIZES, st.integers(1, 9), PLACEMENTS, st.sampled_from((np.int32, np.int64)))
def test_logical_ids_come_back_from_their_places(sizes, shards, placement, dtype):
    stack = make_stack(sizes, shards, placement)
    # All tables at once: every id [sum of V] has the offset and the rows per shard of its table.
    ids = np.concatenate([np.arange(size, dtype=dtype) for size in sizes])
    of_tables = [(table.offset, table.rows_per_shard) for table in stack.tables]
    offset, per_shard = np.repeat(np.array(of_tables, dtype), sizes, axis=0).T
    shard, local = np.divmod(stack.physical_in(ids, offset, per_shard), dtype(stack.num_rows))
    found = stack.logical_in(shard, local - offset, per_shard)
    np.testing.assert_array_equal(found, ids, strict=True)
    for table in stack.tables:  # padding has ids after the last row: each id occurs once
        places = np.arange(stack.num_shards)[:, None], np.arange(table.rows_per_shard)
        every = stack.logical_in(*places, table.rows_per_shard)
        assert sorted(every.flat) == list(range(stack.num_shards * table.rows_per_shard))


@pytest.mark.parametrize("placement", ["mod", "div", "replicated"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_jax_places_and_ids_keep_their_dtype(placement, dtype):
    stack = make_stack([5, 17], 3, placement)
    table = stack.tables[1]
    with jax.enable_x64(dtype == "int64"):
        ids = jax.numpy.arange(17, dtype=dtype)
        shard, local = jax.numpy.divmod(stack.physical(ids, table), stack.num_rows)
        found = stack.logical_in(shard, local - table.offset, table.rows_per_shard)
    np.testing.assert_array_equal(found, np.arange(17, dtype=dtype), strict=True)


def names(stacks):
    return [[table.name for table in stack.tables] for stack in stacks]


BASE = {"optimizer": o.Adam(0.1)}
OTHER = {
    "dim": {"dim": 8},
    "dtype": {"dtype": "bfloat16"},
    "optimizer": {"optimizer": o.Adam(0.2)},
    "kind of optimizer": {"optimizer": o.LAMB(0.1)},
    "no optimizer": {"optimizer": None},
    "optax": {"optimizer": o.as_table_optimizer(optax.sgd(0.1))},
    "placement": {"placement": "div"},
    "replicated": {"placement": "replicated"},
    "quantization": {"quantization_config": QuantizationConfig(4, 0.0, 1.0)},
}


@pytest.mark.parametrize("difference", OTHER)
def test_tables_that_differ_do_not_stack(difference):
    options = BASE | OTHER[difference]
    tables = [resolved("a", 5, 2, **BASE), resolved("b", 5, 2, **options)]
    tables += [resolved("c", 7, 2, **BASE), resolved("d", 7, 2, **options)]
    assert names(make_stacks(tables)) == [["a", "c"], ["b", "d"]]


def test_tables_split_over_other_axes_do_not_stack():
    config = TableConfig(5, 4)
    on = [("a", ("x",)), ("b", ("y",)), ("c", ("x",))]
    tables = [ResolvedTable(name, config, None, None, axes, 2) for name, axes in on]
    assert names(make_stacks(tables)) == [["a", "c"], ["b"]]


def test_combiner_initializer_and_size_may_differ_in_a_stack():
    other = {"combiner": "sqrtn", "initializer": jax.nn.initializers.zeros}
    equal = o.Adam(0.1)  # by value, another object
    tables = [resolved("a", 5, 2, **BASE), resolved("b", 900, 2, optimizer=equal, **other)]
    assert names(make_stacks(tables)) == [["a", "b"]]
    assert names(make_stacks(tables, stack_tables=False)) == [["a"], ["b"]]


def test_optax_transforms_stack_by_identity():
    one, other = (o.as_table_optimizer(optax.sgd(0.1)) for _ in range(2))
    tables = [resolved(n, 5, 2, optimizer=tx) for n, tx in [("a", one), ("b", other), ("c", one)]]
    assert names(make_stacks(tables)) == [["a", "c"], ["b"]]


def test_a_stack_ends_where_int32_does():
    third = INT32_ROWS // 3
    stacks = make_stacks([resolved(str(i), third, 4) for i in range(7)])
    assert names(stacks) == [["0", "1"], ["2", "3"], ["4", "5"], ["6"]]  # padding counts
    assert all(stack.physical_rows <= INT32_ROWS for stack in stacks)
    assert all(stack.index_dtype == np.int32 for stack in stacks)


GIB = 2**30 // (128 * 4)
"""Rows of 128 float32 numbers in a GiB."""


def test_a_stack_ends_where_sparse_cores_address_no_more():
    tables = [resolved(str(i), 6 * GIB, 1, dim=128) for i in range(5)]
    stacks = make_stacks(tables, packing="words")
    assert names(stacks) == [["0", "1"], ["2", "3"], ["4"]]  # 12 GiB; three would be 18
    assert len(make_stacks(tables, packing="lanes")) == len(make_stacks(tables)) == 1
    halves = [resolved(str(i), 6 * GIB, 2, dim=128) for i in range(5)]
    assert names(make_stacks(halves, packing="words")) == [["0", "1", "2", "3", "4"]]
    # Exactly 16 GiB is allowed. Rows are padded to 16 words, so D = 1 takes as much as D = 16.
    assert len(make_stacks([resolved("a", 16 * GIB, 1, dim=128)], packing="words")) == 1
    padded = [resolved(str(i), 8 * 8 * GIB, 1, dim=1) for i in range(3)]
    assert names(make_stacks(padded, packing="words")) == [["0", "1"], ["2"]]


LARGE_TABLES = [
    ("float32", o.SGD(0.1), 40, 3),
    ("float32", None, 40, 3),
    ("bfloat16", o.SGD(0.1), 40, 2),  # 20 GiB
    ("bfloat16", o.Adagrad(0.1), 40, 3),  # the accumulators are float32
    ("bfloat16", o.RowWiseAdagrad(0.1), 40, 2),
    ("bfloat16", o.RowWiseAdagrad(0.1), 30, 1),
]


@pytest.mark.parametrize(("dtype", "optimizer", "gib", "shards"), LARGE_TABLES)
def test_a_table_beyond_what_sparse_cores_address_is_refused(
    dtype, optimizer, gib, shards, refused
):
    options = {"dim": 128, "dtype": dtype, "optimizer": optimizer}
    one, enough = ([resolved("big", gib * GIB, n, **options)] for n in (1, shards))
    assert len(make_stacks(enough, packing="words")) == 1
    if shards > 1:
        says = rf"table 'big': .*16 GiB.* over {shards} shards"
        refused(says, make_stacks, one, packing="words")


def test_a_table_beyond_int32_needs_x64(refused):
    large = resolved("large", 2**31 + 10, 2)
    refused(r"table 'large': .*2147483647 rows.*got 2147483658.*x64", make_stacks, [large])
    with jax.enable_x64(True):
        stacks = make_stacks([large, resolved("small", 5, 2)])
        assert names(stacks) == [["large"], ["small"]]
        assert [stack.index_dtype for stack in stacks] == [np.int64, np.int32]
        last = stacks[0].physical(np.array([2**31 + 9]), stacks[0].tables[0])
        assert last.tolist() == [2 * stacks[0].num_rows - 1]


def test_a_device_has_at_most_so_many_blocks():
    features = FeatureConfig(TableConfig(1, 2))
    for n, blocks in itertools.product(range(1, 9), range(1, 25)):
        layout = EmbeddingEngine(features, mesh=mesh(n), sum_blocks=blocks).layout
        count = max(blocks, n)
        for sizes in ((1, 1), (2, 5), (8, 3), (30, 30)):  # examples of features, on a device
            found = [
                len({(r * k + e) * count // (n * k) for k in sizes for e in range(k)})
                for r in range(n)
            ]
            assert max(found) <= layout.blocks_per_device(sizes), (n, blocks, sizes)
