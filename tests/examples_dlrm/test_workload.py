"""The workload of the DLRM-DCNv2 example: its sizes, scaled sizes, and tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dlrm_cases import CONFIG, dlrm_model


def test_config_is_the_workload():
    assert len(CONFIG.rows) == len(CONFIG.hots) == 26
    assert sum(CONFIG.rows) == 204_184_588
    assert sum(CONFIG.hots) == 214
    assert sum(CONFIG.rows) * CONFIG.dim * 4 == pytest.approx(104.5e9, rel=1e-3)
    assert sum(CONFIG.hots) * CONFIG.dim * 4 == pytest.approx(109.6e3, rel=1e-3)


def test_scaled_keeps_what_is_not_asked_for():
    small = CONFIG.scaled(1e-4)
    assert small.rows[:6] == (4000, 4, 4, 4, 4, 3)
    assert dataclasses.replace(small, rows=CONFIG.rows) == CONFIG
    assert CONFIG.scaled(1.0) == CONFIG
    other = CONFIG.scaled(0.5, dim=16, most_hot=10)
    assert (other.rows[0], other.bottom, max(other.hots)) == (20_000_000, (512, 256, 16), 10)
    thin = CONFIG.scaled(1, network=0.25)
    assert (thin.bottom, thin.cross_rank) == ((128, 64, 128), 128)
    assert thin.top == (256, 256, 128, 64, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CONFIG.scaled(2), "scale: expected 0 < scale <= 1, got 2"),
        (lambda: CONFIG.scaled(1, network=0), "network: expected 0 < network <= 1, got 0"),
        (lambda: CONFIG.scaled(1, dim=0), "dim: expected dim >= 1, got 0"),
        (lambda: CONFIG.scaled(1, most_hot=0), "most_hot: expected most_hot >= 1, got 0"),
        (lambda: dataclasses.replace(CONFIG, dim=64), "bottom: expected 64"),
        (lambda: dataclasses.replace(CONFIG, hots=(1,)), "hots: expected 26 as in rows, got 1"),
    ],
)
def test_config_refuses(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_features_are_the_tables_in_order():
    features = dlrm_model.feature_config(CONFIG)
    tables = [features[name].table for name in sorted(features)]
    assert tuple(table.vocabulary_size for table in tables) == CONFIG.rows
    assert [table.name for table in tables] == sorted(features)
    assert {(table.dim, table.combiner) for table in tables} == {(128, "sum")}


def test_rows_start_uniform():
    config = CONFIG.scaled(1e-5)
    features = dlrm_model.feature_config(config)
    tables = [features[name].table for name in ("t00", "t05", "t10")]

    @jax.jit
    def drawn(key):
        return [t.initializer(key, (t.vocabulary_size, 128), jnp.float32) for t in tables]

    for table, values in zip(tables, drawn(jax.random.key(0)), strict=True):
        values, limit = np.asarray(values, np.float64), table.vocabulary_size**-0.5
        assert np.abs(values).max() <= limit * (1 + 1e-6)
        error = limit**2 * (4 / 45) ** 0.5 / values.size**0.5  # of the mean of the squares
        assert abs((values**2).mean() - limit**2 / 3) < 5 * error, table.name
