"""gradients() by tables: IndexedSlices, in a promised order, if a table is only looked up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed.sparse import IndexedSlices, embedding_lookup
from tpu_embed.training import gradients

W = jnp.array([3.0, 0.25, -2.0])
TABLE = jnp.asarray(np.random.default_rng(2).normal(size=(6, 3)).astype(np.float32))
IDS = jnp.array([4, 1, 4])


def rows_of(table, ids=IDS):
    return jnp.sin(embedding_lookup(table, ids))


def test_a_table_that_is_only_looked_up_has_slices_duplicates_kept():
    (found,) = gradients(rows_of, [TABLE])
    assert isinstance(found, IndexedSlices)
    assert found.dense_shape == (6, 3)
    assert found.indices.tolist() == [4, 1, 4]
    np.testing.assert_allclose(found.values, np.cos(np.asarray(TABLE, np.float64)[IDS]), rtol=1e-6)


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_slices_come_through_calls(call):
    (found,) = gradients(lambda t: call(rows_of)(t["t"]), [{"t": TABLE}])
    assert found["t"].indices.tolist() == [4, 1, 4]


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)], ids=["both", "ids", "table"])
def test_slices_of_vmapped_gradients(axes):
    """Each example has slices of its own, as if alone; float32 sines and cosines."""
    tables, ids = jnp.stack([TABLE, TABLE[::-1]]), jnp.array([[4, 1, 4], [5, 4, 0]])
    each = list(zip((tables, ids), axes, strict=True))
    given = [array if axis == 0 else array[0] for array, axis in each]

    def one(table, ids):
        return gradients(lambda t: rows_of(t, ids), [table])[0]

    found = jax.jit(jax.vmap(one, axes))(*given)
    assert isinstance(found, IndexedSlices)
    assert found.dense_shape == TABLE.shape
    for i in range(2):
        table, mine = (array[0 if axis is None else i] for array, axis in each)
        assert found.indices[i].tolist() == mine.tolist()
        np.testing.assert_allclose(
            found.values[i], np.cos(np.asarray(table, np.float64)[mine]), rtol=1e-6
        )


@pytest.mark.parametrize(
    "fn",
    [lambda t: rows_of(2 * t), lambda t: (rows_of(t), t[0] * 3), lambda t: t[IDS] + rows_of(t)],
    ids=["computed", "dense use beside", "plain indexing beside"],
)
def test_other_uses_of_a_table_make_its_gradient_dense(fn):
    """Without a warning, which would be an error here."""
    expected = jax.grad(lambda t: sum(y.sum() for y in jax.tree.leaves(fn(t))))(TABLE)
    (found,) = gradients(fn, [TABLE])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_slices_beside_dense_gradients_and_none():
    def fn(table, other, w):
        return rows_of(table) @ w + jnp.floor(embedding_lookup(other, IDS)).sum()

    slices, none, dense = gradients(fn, [TABLE, TABLE, W])
    assert none is None
    assert slices.indices.tolist() == [4, 1, 4]
    np.testing.assert_allclose(dense, rows_of(TABLE).sum(0), rtol=1e-6)
