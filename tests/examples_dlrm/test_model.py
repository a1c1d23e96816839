"""The workload, tables, network and loss of the DLRM-DCNv2 example, beside float64 formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dlrm_cases import CONFIG, TINY, dlrm_model
from flax import nnx


def test_config_is_the_workload_and_scales():
    features = dlrm_model.feature_config(CONFIG)
    tables = [features[name].table for name in sorted(features)]
    assert tuple(table.vocabulary_size for table in tables) == CONFIG.rows
    assert {(table.dim, table.combiner) for table in tables} == {(128, "sum")}
    assert (len(CONFIG.rows), sum(CONFIG.rows), sum(CONFIG.hots)) == (26, 204_184_588, 214)
    small, thin = CONFIG.scaled(1e-4), CONFIG.scaled(0.5, dim=16, most_hot=10, network=0.25)
    assert small.rows[:6] == (4000, 4, 4, 4, 4, 3)
    assert dataclasses.replace(small, rows=CONFIG.rows) == CONFIG
    assert (thin.rows[0], max(thin.hots), thin.cross_rank) == (20_000_000, 10, 128)
    assert (thin.bottom, thin.top) == ((128, 64, 16), (256, 256, 128, 64, 1))


REFUSED = [
    (lambda: CONFIG.scaled(2), "scale: expected 0 < scale <= 1, got 2"),
    (lambda: CONFIG.scaled(1, network=0), "network: expected 0 < network <= 1, got 0"),
    (lambda: CONFIG.scaled(1, dim=0), "dim: expected dim >= 1, got 0"),
    (lambda: dataclasses.replace(CONFIG, dim=64), "bottom: expected 64"),
    (lambda: dataclasses.replace(CONFIG, hots=(1,)), "hots: expected 26 as in rows, got 1"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_config_refuses(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_rows_start_uniform():
    features = dlrm_model.feature_config(CONFIG.scaled(1e-5))
    for table in (features[name].table for name in ("t00", "t05")):
        shape, limit = (table.vocabulary_size, 128), table.vocabulary_size**-0.5
        values = np.asarray(table.initializer(jax.random.key(0), shape, jnp.float32), np.float64)
        assert np.abs(values).max() <= limit * (1 + 1e-6)
        error = limit**2 * (4 / 45) ** 0.5 / values.size**0.5  # of the mean of the squares
        assert abs((values**2).mean() - limit**2 / 3) < 5 * error, table.name


def test_network_has_the_workloads_parameters():
    network = nnx.eval_shape(lambda: dlrm_model.Dlrm(CONFIG, rngs=nnx.Rngs(0)))
    parts = [network.bottom, *network.crosses, network.top]
    sizes = [dlrm_model.parameter_count(part) for part in parts]
    assert sizes == [171_392, *[3_542_400] * 3, 5_245_953]
    assert dlrm_model.parameter_count(network) == 16_044_545


def dense_layers(sequential, x, *, relu_at_end):
    """Return a stack of linear layers and ReLUs in float64."""
    linear = [layer for layer in sequential.layers if isinstance(layer, nnx.Linear)]
    for number, layer in enumerate(linear, 1):
        assert layer.bias is not None
        x = x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...], np.float64)
        if relu_at_end or number < len(linear):
            x = np.maximum(x, 0.0)
    return x


def test_network_is_the_formula():
    rng = np.random.default_rng(0)
    graph, params = nnx.split(dlrm_model.Dlrm(TINY, rngs=nnx.Rngs(0)))
    # Biases, too, are not zeros.
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype) * 0.3, params)
    network = nnx.merge(graph, drawn)
    names = dlrm_model.table_names(26)
    activations = {name: rng.normal(size=(5, 4)).astype(np.float32) for name in reversed(names)}
    dense = rng.normal(size=(5, 13)).astype(np.float32)
    got = nnx.jit(lambda network, *inputs: network(*inputs))(network, dense, activations)

    bottom = dense_layers(network.bottom, dense.astype(np.float64), relu_at_end=True)
    x0 = x = np.concatenate([bottom, *(activations[name] for name in names)], axis=1)
    assert x0.shape == (5, 27 * 4)
    assert len(network.crosses) == 3
    for cross in network.crosses:
        assert cross.down.bias is None
        arrays = cross.down.kernel, cross.up.kernel, cross.up.bias
        V, W, b = (np.asarray(array[...], np.float64) for array in arrays)
        assert V.shape == W.T.shape == (27 * 4, 3)
        x = x0 * (x @ V @ W + b) + x
    want = dense_layers(network.top, x, relu_at_end=False)[:, 0]
    # float32 products against float64.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_loss_leaves_padding_out():
    logits, label = np.float32([2, -1, 30]), np.float32([1, 0, -1])
    value_and_grad = jax.jit(jax.value_and_grad(dlrm_model.loss))
    want = (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(-1.0))) / 2
    value, grad = value_and_grad(logits, label)
    assert float(value) == pytest.approx(want, rel=1e-6)
    assert np.asarray(grad)[2] == 0
    value, grad = value_and_grad(logits, np.float32([-1, -1, -1]))
    assert float(value) == np.abs(grad).max() == 0
