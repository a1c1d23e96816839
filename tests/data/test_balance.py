"""Batches in another order, in which all replicas have about as many events."""

import dataclasses

import jax
import numpy as np
import pytest
from facade_cases import mesh
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed.data import balance_replicas, reorder_batch
from tpu_embed.optimizers import SGD


@st.composite
def draw_lengths(draw):
    """Return lengths, and replicas that divide their number."""
    replicas, room = draw(st.integers(1, 5)), draw(st.integers(0, 8))
    size = replicas * room
    return draw(st.lists(st.integers(0, 50), min_size=size, max_size=size)), replicas


@given(draw_lengths())
def test_examples_go_where_the_fewest_events_are(drawn):
    lengths, replicas = drawn
    order = balance_replicas(lengths, replicas)
    assert order.dtype == np.int64
    # The same by a plain loop.
    room, events = len(lengths) // replicas, [0] * replicas
    placed = [[] for _ in range(replicas)]
    for e in sorted(range(len(lengths)), key=lambda e: (-lengths[e], e)):
        s = min((s for s in range(replicas) if len(placed[s]) < room), key=lambda s: events[s])
        placed[s].append(e)
        events[s] += lengths[e]
    assert order.tolist() == [e for mine in placed for e in sorted(mine)]


RAGGED = RaggedIds([7, 3, 5, 9], [0, 2, 2, 3, 4], np.float32([0.5, 1, 2, 3]))
SPARSE = SparseIds([[0, 1], [2, 0], [2, 4]], [1, 2, 3], (4, 5), np.float32([1, 2, 3]))
NEST = {
    "array": np.arange(8).reshape(4, 2),
    "label": np.float32([0, 1, 2, 3]),
    "list": [3, 1, 4, 1],
    "masked": np.ma.array(np.arange(4, dtype=np.uint32), mask=[True, False, False, False]),
    "none": None,
    "negatives": np.arange(8),  # two per example
}


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, np.uint64])
def test_every_leaf_is_reordered_by_positions_of_any_integer_dtype(dtype):
    ragged = dataclasses.replace(RAGGED, row_splits=RAGGED.row_splits.astype(dtype))
    sparse = dataclasses.replace(SPARSE, indices=SPARSE.indices.astype(dtype))
    order = np.array([2, 0, 3, 1], dtype)
    found, ragged, (sparse,) = reorder_batch((NEST, ragged, [sparse]), order)
    assert found["array"].tolist() == [[4, 5], [0, 1], [6, 7], [2, 3]]
    assert found["label"].tolist() == [2, 0, 3, 1]
    assert found["list"].tolist() == [4, 3, 1, 1]
    assert found["masked"].tolist() == [2, None, 3, 1]
    assert found["none"] is None
    assert found["negatives"].tolist() == [4, 5, 0, 1, 6, 7, 2, 3]
    assert (ragged.values.tolist(), ragged.row_splits.tolist()) == ([5, 7, 3, 9], [0, 1, 3, 4, 4])
    assert ragged.weights.tolist() == [2, 0.5, 1, 3]
    assert sparse.indices.tolist() == [[0, 0], [0, 4], [1, 1]]
    assert (sparse.values.tolist(), sparse.weights.tolist()) == ([2, 3, 1], [2, 3, 1])
    assert sparse.dense_shape == (4, 5)
    assert ragged.row_splits.dtype == sparse.indices.dtype == np.int64


def test_a_balanced_batch_needs_less_room():
    lengths = np.array([30, 28, 1, 2, 1, 1, 2, 1] * 4)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    ids = {"seen": RaggedIds(np.arange(splits[-1]) % 50, splits), "number": np.arange(32)}
    moved = reorder_batch(ids, balance_replicas(lengths, 8))
    feature, sums, room = FeatureConfig(TableConfig(50, 4), jagged=True), [], []
    for batch in (ids, moved):
        # An engine of its own: one keeps the room that its largest batch has needed.
        engine = EmbeddingEngine({"seen": feature}, SGD(0.1), mesh=mesh(8))
        placed = engine.place({"seen": batch["seen"]})
        history = engine.lookup(engine.init(jax.random.key(0)), placed)["seen"]
        sums.append(np.asarray(history.sums())[np.argsort(batch["number"])])
        room.append(history.values.shape[1])
    np.testing.assert_array_equal(*sums)
    assert room[1] < 0.7 * room[0]


def swapped(batch):
    return lambda: reorder_batch(batch, [1, 0])


REFUSED = {
    "replicas: expected an integer": lambda: balance_replicas([1, 2], 0),
    r"lengths: expected \[B\], B a multiple of 2": lambda: balance_replicas([1, 2, 3], 2),
    r"lengths: expected \[B\]": lambda: balance_replicas([[1, 2]], 1),
    "lengths: expected at least 0, got -3 at 1": lambda: balance_replicas([1, -3], 2),
    "lengths: expected integers, got float64": lambda: balance_replicas([0.0, 1.0], 2),
    "order: expected .* once": lambda: reorder_batch(NEST, [0, 1, 1, 3]),
    r"order: expected .* got shape \(1, 4\)": lambda: reorder_batch(NEST, [[0, 1, 2, 3]]),
    "order: expected integers, got float64": lambda: reorder_batch(NEST, [0.0, 1, 2, 3]),
    "x/y: expected a multiple of 2 rows": swapped({"x": {"y": [1, 2, 3]}}),
    "RaggedIds.row_splits that rise": swapped(RaggedIds([1, 2, 3], [0, 1, 2])),
    "SparseIds.indices inside": swapped(SparseIds([[2, 0]], [1], (2, 2))),
    "feature: expected weights of shape": swapped(RaggedIds([1, 2], [0, 1, 2], [1.0])),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said):
    with pytest.raises((ValueError, TypeError), match=said):
        REFUSED[said]()
