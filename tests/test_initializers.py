"""Initial values: their distributions, and which initializers are refused."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import initializers
from tpu_embed.initializers import RowIdInitializer, ShardInfo, TruncatedNormal, variance_scaling

N = 20_000


def _sample(initializer) -> np.ndarray:
    return np.asarray(initializer(jax.random.key(0), (N // 4, 4), jnp.float32))


def test_default_is_a_truncated_normal_of_one_over_root_dim():
    given = jax.nn.initializers.normal()
    assert initializers.resolve(given, 16) is given
    default = initializers.resolve(None, 16)
    assert default == TruncatedNormal(0.25)
    assert hash(default) == hash(TruncatedNormal(0.25))
    values = _sample(default)
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 0.5
    # The cut at 2σ leaves 0.8796 σ; 5 standard errors of a sample of N.
    assert abs(values.std() / (0.25 * 0.8796) - 1) < 5 / math.sqrt(2 * N)
    assert abs(values.mean()) < 5 * 0.25 / math.sqrt(N)


@pytest.mark.parametrize("distribution", ["truncated_normal", "normal", "uniform"])
@pytest.mark.parametrize(("mode", "fan"), [("fan_in", 40), ("fan_out", 10), ("fan_avg", 25)])
def test_variance_scaling_has_the_variance_of_the_whole_table(distribution, mode, fan):
    scaled = functools.partial(variance_scaling, table_shape=(40, 10))
    initializer = scaled(2.0, mode, distribution)
    values = _sample(initializer)
    # The variance of a sample of N has a relative standard error below √(2/N) for these three.
    assert abs(values.var() / (2.0 / fan) - 1) < 5 * math.sqrt(2 / N)
    assert initializer == scaled(2.0, mode, distribution)
    assert hash(initializer) != hash(scaled(1.0, mode, distribution))


def test_row_id_initializer_fills_rows_with_their_number():
    info = ShardInfo((10, 3), jnp.array([9, 0, 4], jnp.int32))
    values = RowIdInitializer(offset=2)(jax.random.key(0), (3, 3), jnp.float32, info)
    np.testing.assert_array_equal(values, np.array([[11.0] * 3, [2.0] * 3, [6.0] * 3]))
    assert RowIdInitializer(2) == RowIdInitializer(np.int32(2))  # type: ignore[arg-type]


def test_shard_info_is_wanted_by_name():
    def whole(key, shape, dtype, *, shard_info):
        raise NotImplementedError

    assert initializers.wants_shard_info(whole)
    assert initializers.wants_shard_info(functools.partial(whole, jax.random.key(0)))
    assert initializers.wants_shard_info(RowIdInitializer())
    assert not initializers.wants_shard_info(TruncatedNormal())
    assert not initializers.wants_shard_info(jax.nn.initializers.normal())
    assert not initializers.wants_shard_info(min)


THEIRS = "glorot_normal glorot_uniform he_normal he_uniform lecun_normal lecun_uniform".split()
THEIRS += "xavier_normal kaiming_uniform orthogonal delta_orthogonal variance_scaling".split()


@pytest.mark.parametrize("name", THEIRS)
def test_initializers_that_see_the_fan_in_are_refused(name):
    factory = getattr(jax.nn.initializers, name)
    made = factory(1.0, "fan_in", "normal") if name == "variance_scaling" else factory()
    says = r"t.initializer: expected .*one row at a time, got (\w+), .*fan-in.*table_shape=\(V, D\)"
    for initializer in [made, functools.partial(made), jax.jit(made), factory]:
        with pytest.raises(ValueError, match=says):
            initializers.check("t.initializer", initializer)


def test_initializers_that_see_one_row_alike_pass():
    jaxs = jax.nn.initializers
    for one in (jaxs.normal(), jaxs.zeros, variance_scaling(table_shape=(4, 2)), None):
        initializers.check("i", one)


REFUSED = [
    (lambda: TruncatedNormal(-1.0), r"TruncatedNormal.stddev: expected a finite number >= 0"),
    (lambda: RowIdInitializer(0.5), r"RowIdInitializer.offset: expected an integer, got 0.5"),
    (lambda: variance_scaling(math.inf, table_shape=(2, 2)), r"scale: .*finite.*got inf"),
    (lambda: variance_scaling(mode="fan", table_shape=(2, 2)), r"mode: expected 'fan_in'"),
    (lambda: variance_scaling(table_shape=(2,)), r"table_shape: expected \(V, D\), got \(2,\)"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()
