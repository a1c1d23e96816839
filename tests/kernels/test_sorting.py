"""Sorts in place of gathers and scatters: the same results on every platform, and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed.kernels import cpu, dispatch

PLATFORMS = ("reference", "gpu", *(["native"] if cpu.load().path else []))
N = 50


@pytest.fixture(params=PLATFORMS)
def platform(request, monkeypatch):
    """Run the implementation for a platform, all of them on this CPU."""

    def choose(*operands, otherwise, native=None, gpu=None, sparse=None):
        del sparse
        return {"reference": otherwise, "native": native, "gpu": gpu}[request.param](*operands)

    monkeypatch.setattr(dispatch, "choose", choose)
    return request.param


def draw(low, high, dtype=np.int32, seed=0):
    return np.random.default_rng(seed).integers(low, high, N).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_payload_follows_its_rows(platform, dtype):
    with jax.enable_x64(dtype == np.int64):
        rows = draw(-1, 9, dtype) * (1 if dtype == np.int32 else 2**40)
        payload = {"bag": draw(0, 99, seed=1), "weight": draw(0, 9).astype(np.float32), "no": None}
        ordered, positions, carried = jax.jit(dispatch.sort_with)(rows, payload)
    order = np.argsort(rows, kind="stable")
    assert (ordered.dtype, positions.dtype) == (dtype, np.int32)
    expected = order, rows[order], jax.tree.map(lambda x: x[order], payload)
    jax.tree.map(np.testing.assert_array_equal, (positions, ordered, carried), expected)


def test_a_payload_is_differentiable(platform):
    """The loss is Σ i · weight[order[i]], so the weight at order[i] has the derivative i."""
    rows, weights = draw(0, 9), draw(0, 9, seed=1).astype(np.float32)

    def loss(weights):
        _, _, carried = dispatch.sort_with(jnp.asarray(rows), weights)
        return jnp.sum(carried * np.arange(N, dtype=np.float32))

    expected = np.zeros(N, np.float32)
    expected[np.argsort(rows, kind="stable")] = np.arange(N)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(weights), expected)


@pytest.mark.parametrize("share", [0, 0.4, 1])
@pytest.mark.quick(5)
def test_compact_closes_gaps(platform, share):
    values = np.sort(draw(0, 30))
    kept = np.random.default_rng(1).random(N) < share
    found = jax.jit(lambda values, kept: dispatch.compact(values, kept, 30))(values, kept)
    chosen = values[kept].tolist()
    assert np.asarray(found).tolist() == chosen + [30] * (N - len(chosen))


@pytest.mark.parametrize("size", [1, 7, 90])
@pytest.mark.quick(3)
def test_rows_that_occur(platform, size):
    rows = draw(-2, size + 3)
    found = jax.jit(lambda rows: dispatch.occurs(rows, size))(rows)
    assert np.asarray(found).tolist() == [row in rows for row in range(size)]
