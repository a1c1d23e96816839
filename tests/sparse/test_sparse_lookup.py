"""embedding_lookup: rows and their combinations, against float64 loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tpu_embed.sparse import embedding_lookup

V, D = 9, 4
IDS = np.array([[3, 3, -1], [0, 8, 5], [-1, -1, -1], [7, -1, 2]])
T = np.ones((2, 2), np.float32)


def table_of(trailing=(D,), dtype=np.float32):
    return np.random.default_rng(0).standard_normal((V, *trailing)).astype(dtype)


def weights_of(ids):
    weights = np.random.default_rng(1).uniform(-1, 2, ids.shape).astype(np.float32)
    weights[1] = [1, -1, 0]  # whose sum is zero
    return weights


def combined(table, ids, weights, combiner):
    """Combine bags in float64."""
    out = []
    for row, some in zip(ids, weights.astype(np.float64), strict=True):
        gains = oracle.gains(some[row >= 0].tolist(), combiner)
        out.append(np.tensordot(gains, table[row[row >= 0]].astype(np.float64), 1))
    return np.stack(out)


@pytest.mark.parametrize("trailing", [(), (D,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
@pytest.mark.quick(5)
def test_rows_are_those_of_the_table(trailing, dtype):
    ids = np.array([[1, 2], [2, 8]], dtype)
    table = table_of(trailing)
    assert np.array_equal(embedding_lookup(table, ids), table[ids])
    assert np.array_equal(jax.jit(embedding_lookup)(table, ids), table[ids])
    assert np.array_equal(embedding_lookup(table, np.int32(3)), table[3])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("trailing", [(), (D,), (2, 3)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.quick(3)
def test_bags_combine_as_in_float64(combiner, trailing, weighted):
    table, weights = table_of(trailing), weights_of(IDS) if weighted else None
    got = jax.jit(functools.partial(embedding_lookup, combiner=combiner))(table, IDS, weights)
    expected = combined(table, IDS, np.ones(IDS.shape) if weights is None else weights, combiner)
    # A sum of three products of numbers below 4.
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_weight_scales_its_row():
    weights = weights_of(IDS)
    expected = np.where(IDS[..., None] < 0, 0, table_of()[IDS]) * weights[..., None]
    assert np.array_equal(embedding_lookup(table_of(), IDS, weights), expected)


def test_the_weight_of_padding_is_not_read():
    weights = np.where(IDS < 0, np.nan, 1).astype(np.float32)
    for combiner in (None, "mean"):
        found = embedding_lookup(table_of(), IDS, weights, combiner)
        assert np.isfinite(np.asarray(found)).all()


@pytest.mark.whole
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_empty_bags_have_zero_gradients(combiner):
    def loss(table, weights):
        return embedding_lookup(table, np.full((2, 3), -1), weights, combiner=combiner).sum()

    for gradient in jax.grad(loss, (0, 1))(jnp.asarray(table_of()), jnp.ones((2, 3))):
        assert not np.asarray(gradient).any()


def test_low_precision_is_summed_in_float32():
    table = jnp.ones((V, 1), jnp.bfloat16)
    ids = np.zeros((1, 300), np.int32)
    got = embedding_lookup(table, ids, combiner="sum")
    assert (got.dtype, got.item()) == (jnp.float32, 300)  # bfloat16 stops at 256
    assert embedding_lookup(table, ids).dtype == jnp.bfloat16


def test_plain_derivatives_are_those_of_indexing():
    def indexed(table, ids):
        return jnp.where(ids[..., None] < 0, 0, table[ids])

    @jax.jit
    def derivatives(table, tangent):
        found = []
        for look in (embedding_lookup, indexed):
            gradient = jax.grad(lambda table, look=look: jnp.sin(look(table, IDS)).sum())
            first = jax.jvp(lambda table, look=look: look(table, IDS), (table,), (tangent,))
            found.append((first, jax.jvp(gradient, (table,), (tangent,))))
        return found

    ours, theirs = derivatives(table_of(), table_of()[::-1])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, theirs)


@pytest.mark.parametrize("axes", [(None, 0), (None, 1), (0, 0), (0, None)], ids=str)
@pytest.mark.quick(2)
def test_vmap_over_ids_tables_or_both(axes):
    tables, ids = np.stack([table_of(), table_of()[::-1]]), np.array([[1, 2, -1], [8, 0, 0]])
    tables = tables if axes[0] == 0 else tables[[0, 0]]
    ids = ids if axes[1] is not None else ids[[0, 0]]
    given = tables if axes[0] == 0 else tables[0], ids[0] if axes[1] is None else ids
    given = (given[0], ids.T) if axes[1] == 1 else given
    pairs = zip(tables, ids, strict=True)
    expected = [np.where(row[:, None] < 0, 0, table[row]) for table, row in pairs]
    assert np.array_equal(jax.vmap(embedding_lookup, axes)(*given), expected)


def test_ids_outside_the_table():
    bad = np.array([[1, 9], [2, 3]])
    with pytest.raises(ValueError, match=r"expected numbers in \[0, 9\), .* got 9 at \[0, 1\]"):
        embedding_lookup(table_of(), bad)
    got = jax.jit(embedding_lookup)(table_of(), bad)
    assert not np.asarray(got[0, 1]).any()
    assert np.array_equal(got[1], table_of()[bad[1]])
    large = jax.jit(embedding_lookup)(table_of(), np.array([2**32 - 1], np.uint32))
    assert not np.asarray(large).any()


@pytest.mark.parametrize("combiner", [None, "sum", "mean", "sqrtn"])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16])
@pytest.mark.quick(4)
def test_weights_may_be_integers(combiner, dtype):
    weights = np.arange(IDS.size).reshape(IDS.shape)
    both = weights.astype(dtype), weights.astype(np.float32)
    found, expected = (embedding_lookup(table_of(), IDS, one, combiner) for one in both)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (TypeError, (np.ones((2, 2), np.int32), [0]), "table: expected a float dtype, got int32"),
        (TypeError, (T, np.ones(1, np.float32)), "ids: expected integers, got float32"),
        (ValueError, (1.0, [0]), r"table: expected \[V, …\], got rank 0"),
        (ValueError, (T, [[0]], None, "max"), r"combiner: expected .*'sqrtn', got 'max'"),
        (ValueError, (T, [0], np.ones(2)), r"weights: .* real numbers of the ids' shape \(1,\)"),
        (ValueError, (T, [0], np.ones(1, bool)), r"expected real .*, got bool of shape \(1,\)"),
        (ValueError, (T, np.int32(0), None, "sum"), "ids: expected bags"),
    ],
)
def test_errors_name_the_argument(kind, arguments, words):
    with pytest.raises(kind, match=words):
        embedding_lookup(*arguments)


def test_an_id_that_is_a_literal_of_a_branch_under_vmap():
    table = jnp.asarray(table_of())

    def fn(sign):
        return jax.lax.cond(sign > 0, lambda: embedding_lookup(table * sign, 2), lambda: table[0])

    found = jax.vmap(jax.jit(fn))(jnp.array([1.0, -1.0]))
    assert np.array_equal(found, np.stack([table[2], table[0]]))
