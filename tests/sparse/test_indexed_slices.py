"""IndexedSlices: every form has the same sum, and norms add duplicates first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed.sparse import IndexedSlices, clip_by_global_norm, global_norm, scale

V = 7
UNEVEN = IndexedSlices(jnp.ones((3, 1)), jnp.zeros(2, jnp.int32), (V, 1))


def dense_of(slices):
    """Add up the slices in float64."""
    whole, indices = np.zeros(slices.dense_shape), np.asarray(slices.indices)
    inside = (indices >= 0) & (indices < len(whole))
    np.add.at(whole, indices[inside], np.asarray(slices.values, np.float64)[inside])
    return whole


# Programs that many examples of a shape share; run eagerly, each step of them compiles again.
deduplicate = jax.jit(IndexedSlices.deduplicate)
to_dense = jax.jit(IndexedSlices.to_dense)


def draw(seed, n, trailing=(3,), *, low=0, high=V):
    """Return slices of small whole numbers, whose sums are exact; index V is padding."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 9, (n, *trailing)).astype(np.float32)
    indices = rng.integers(low, high + 1, n).astype(np.int32)
    return IndexedSlices(jnp.asarray(values), jnp.asarray(indices), (V, *trailing))


@pytest.mark.parametrize("trailing", [(), (3,), (2, 2)])
@pytest.mark.parametrize("n", [0, 1, 20])
@pytest.mark.quick(1)
def test_dense_deduplicated_and_compact_are_one_sum(trailing, n):
    slices = draw(n, n, trailing)
    unique = deduplicate(slices)
    for same in (slices, unique, slices.compact(), unique.compact()):
        assert np.array_equal(to_dense(same), dense_of(slices))
        assert same.shape == same.dense_shape == (V, *trailing)
        assert same.dtype == jnp.float32


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-2, V + 2), min_size=12, max_size=12))
def test_deduplicate_keeps_n_and_the_order_of_first_appearance(rows):
    values = np.arange(24, dtype=np.float32).reshape(12, 2) + 1
    slices = IndexedSlices(jnp.asarray(values), jnp.asarray(rows, jnp.int32), (V, 2))
    unique = deduplicate(slices)
    present = list(dict.fromkeys(row for row in rows if 0 <= row < V))
    assert unique.indices.tolist() == present + [V] * (12 - len(present))
    assert np.array_equal(to_dense(unique), dense_of(slices))
    assert not np.asarray(unique.values)[len(present) :].any()


def test_deduplicate_sums_in_order_of_position():
    """In float32 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    indices = jnp.array([2, 2, 2, 5, 5, 5], jnp.int32)
    values = jnp.array([1e8, 1, -1e8, 1e8, -1e8, 1], jnp.float32)[:, None]
    unique = IndexedSlices(values, indices, (V, 1)).deduplicate()
    assert unique.values[:2, 0].tolist() == [0, 1]


def test_padding_counts_as_zero_whatever_its_value():
    nothing = IndexedSlices(jnp.full((2, 1), jnp.nan), jnp.array([V, V], jnp.int32), (V, 1))
    assert not np.asarray(nothing.to_dense()).any()
    assert not np.asarray(nothing.deduplicate().values).any()
    assert global_norm(nothing) == 0
    assert nothing.compact().indices.shape == (0,)


def test_sums_and_products():
    a, b = draw(1, 9), draw(2, 4)
    zeros = np.zeros(a.shape, np.float32)
    for both in (a + b, a + to_dense(b), to_dense(b) + a, sum([a, b]), sum([a, b], zeros)):
        dense = to_dense(both) if isinstance(both, IndexedSlices) else both
        assert np.array_equal(dense, dense_of(a) + dense_of(b))
    assert np.array_equal(to_dense(2 * a), 2 * dense_of(a))
    assert np.array_equal(to_dense(-a / 2), dense_of(a) / -2)
    assert (a + zeros).dtype == jnp.float32


@pytest.mark.whole
def test_norm_scaling_and_clipping_of_a_tree():
    slices, dense = draw(3, 15), jnp.arange(4.0)
    tree, whole = {"table": slices, "kernel": dense, "none": None}, dense_of(slices)
    norm = np.sqrt((whole**2).sum() + (np.arange(4.0) ** 2).sum())
    np.testing.assert_allclose(global_norm(tree), norm, rtol=1e-6)
    halved = scale(tree, 0.5)
    assert halved["none"] is None
    assert np.array_equal(halved["table"].to_dense(), whole / 2)
    assert np.array_equal(halved["kernel"], np.arange(4.0) / 2)
    clipped = clip_by_global_norm(tree, 1.5)
    np.testing.assert_allclose(global_norm(clipped), 1.5, rtol=1e-6)
    np.testing.assert_allclose(clipped["table"].to_dense(), whole * 1.5 / norm, rtol=1e-5)
    same = clip_by_global_norm(tree, 1e6)
    assert np.array_equal(same["table"].values, slices.values)


def test_clipping_zeros_gives_zeros():
    zeros = clip_by_global_norm({"w": jnp.zeros(3)}, 1.0)
    assert np.array_equal(zeros["w"], np.zeros(3))


def test_passes_through_transformations():
    def half(slices):
        return scale(slices.deduplicate(), 0.5)

    both = draw(4, 6), draw(5, 6)
    jitted = jax.jit(half)(both[0])
    assert jitted.dense_shape == both[0].dense_shape
    assert np.array_equal(to_dense(jitted), dense_of(both[0]) / 2)
    several = jax.tree.map(lambda *x: jnp.stack(x), *both)
    mapped = jax.jit(jax.vmap(lambda s: half(s).to_dense()))(several)
    assert np.array_equal(mapped, np.stack([dense_of(one) / 2 for one in both]))


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (TypeError, lambda: IndexedSlices(jnp.ones(2), jnp.ones(2), (V,)), "integers, got float32"),
        (TypeError, lambda: IndexedSlices(jnp.ones(2), np.ones(2, "m8[s]"), (V,)), "got timedelta"),
        (ValueError, lambda: UNEVEN.to_dense(), r"got shapes \(2,\) and \(3, 1\)"),
        (ValueError, lambda: jax.jit(lambda s: s.compact())(draw(0, 3)), "compact outside the jit"),
        (ValueError, lambda: draw(0, 3) + draw(0, 3, (2,)), r"of shape \(7, 3\), got shape \(7, 2"),
        (ValueError, lambda: draw(0, 3) + jnp.ones((7, 2)), r"an array, of shape \(7, 3\)"),
        (ValueError, lambda: draw(0, 3) * jnp.ones(2), "expected a scalar"),
        (TypeError, lambda: global_norm({"n": jnp.arange(3)}), "gradients of floats, got int32"),
        (TypeError, lambda: scale(jnp.arange(3), 0.5), "gradients of floats, got int32"),
    ],
)
def test_errors_name_what_is_wrong(kind, call, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.whole
def test_low_precision_is_summed_in_float32():
    """In bfloat16 a sum of ones stops at 256."""
    ones = IndexedSlices(jnp.ones((300, 1), jnp.bfloat16), jnp.zeros(300, jnp.int32), (V, 1))
    for whole in (ones.to_dense(), ones.deduplicate().to_dense()):
        assert (whole.dtype, whole[0, 0]) == (jnp.bfloat16, 300)
    assert global_norm(ones) == 300
    scaled = scale({"w": ones.values, "t": ones}, jnp.float32(0.1))
    assert {g.dtype for g in (scaled["w"], scaled["t"])} == {jnp.dtype(jnp.bfloat16)}
    clipped = clip_by_global_norm(ones, 30.0)
    np.testing.assert_allclose(global_norm(clipped), 30, rtol=1e-2)


def test_narrow_indices_of_a_large_table():
    slices = IndexedSlices(jnp.ones((2, 1)), jnp.array([3, 3], jnp.int8), (1000, 1))
    assert slices.deduplicate().indices.tolist() == [3, 1000]
