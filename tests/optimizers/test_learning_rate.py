"""Learning rates: constants, schedules and host callables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_embed.optimizers import SGD, LearningRateKind, learning_rate_kind


class Warmup:
    def __call__(self, count):
        return count


class NoHash:
    __hash__ = None

    def __call__(self):
        return 0.1


KINDS = [
    (0.1, "constant"),
    (lambda: 0.1, "host"),
    (lambda scale=1.0: 0.1, "host"),
    (lambda *args, **kwargs: 0.1, "host"),
    (functools.partial(lambda count: 0.1, 3), "host"),
    (lambda count: 0.1, "schedule"),
    (lambda count, scale=1.0: 0.1, "schedule"),
    (Warmup(), "schedule"),
    (optax.constant_schedule(0.1), "schedule"),
    (optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 5), "schedule"),
    (jax.jit(lambda count: 0.1), "schedule"),
    (None, "transform"),
]


@pytest.mark.parametrize(("rate", "kind"), KINDS)
def test_kind(rate, kind):
    assert learning_rate_kind(rate) is LearningRateKind(kind)


def test_constant_ignores_step_and_operand():
    assert SGD(0.1).resolve_learning_rate(7, 0.5) == 0.1


def test_schedule_counts_from_zero():
    optimizer = SGD(optax.exponential_decay(1.0, 1, 0.5))
    rates = [float(optimizer.resolve_learning_rate(jnp.int32(t), None)) for t in (1, 2, 3)]
    assert rates == [1.0, 0.5, 0.25]
    # `conftest.py` asks for strict promotion, under which this schedule alone would fail.
    cosine = SGD(optax.cosine_decay_schedule(0.5, 10))
    assert float(cosine.resolve_learning_rate(jnp.int32(1), None)) == 0.5


@pytest.mark.parametrize("value", [None, "a", [0.1], np.ones(2), np.True_, np.complex64(1)])
def test_a_schedule_that_returns_no_number_is_refused(value):
    optimizer = SGD(lambda count: value)
    with pytest.raises(ValueError, match=r"learning_rate .*: expected a schedule that returns a"):
        optimizer.resolve_learning_rate(1, None)


@pytest.mark.parametrize("value", [1, 0.5, np.float64(0.5), np.int32(1), jnp.float32(0.5)])
def test_a_schedule_may_return_any_number(value):
    assert SGD(lambda count: value).resolve_learning_rate(1, None) == value


def test_host_callable_is_never_called():
    optimizer = SGD(lambda: pytest.fail("called"))
    assert optimizer.resolve_learning_rate(1, 0.25) == 0.25
    with pytest.raises(ValueError, match=r"learning_rates=engine.learning_rates\(\)"):
        optimizer.resolve_learning_rate(1, None)
    with pytest.raises(ValueError, match=r"learning_rate: expected a hashable callable"):
        SGD(NoHash())
