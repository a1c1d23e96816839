"""Options of optimizers: errors, equality and hash by value, slot initializers, describe."""

import dataclasses
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optimizer_cases
import pytest

from tpu_embed import optimizers as o

RMS, BETAS = [o.RMSProp, o.CenteredRMSProp], [o.Adam, o.LAMB, o.Yogi]
LIMITS = [  # of an option: its range, numbers outside, and the rules that have it
    ("beta_1", r"in \[0, 1\)", (1, -0.1), [*BETAS, o.Lion]),
    ("beta_2", r"in \[0, 1\)", (1, -0.1), [*BETAS, o.Lion]),
    ("rho", r"in \[0, 1\)", (1, -0.1), [*RMS, o.Adadelta]),
    ("momentum", r"in \[0, 1\)", (1, -0.1), [*RMS, o.Momentum, o.AdagradMomentum]),
    ("beta2", r"in \(0, 1\]", (0, 1.1), [o.AdagradMomentum]),
    ("epsilon", "> 0", (0,), [*BETAS, *RMS, o.Adadelta, o.AdagradMomentum]),
    ("epsilon", ">= 0", (-1e-9,), [o.Adagrad, o.RowWiseAdagrad]),
    ("initial_accumulator_value", "> 0", (0,), [o.Adagrad, o.RowWiseAdagrad, o.ProximalAdagrad]),
    ("learning_rate_power", "<= 0", (0.1,), [o.FTRL]),
    ("l1_regularization_strength", ">= 0", (-1,), [o.FTRL]),
    ("l2_regularization_strength", ">= 0", (-1,), [o.FTRL]),
    ("beta", ">= 0", (-1,), [o.FTRL]),
    ("l1", ">= 0", (-1,), [o.ProximalAdagrad]),
    ("l2", ">= 0", (-1,), [o.ProximalAdagrad]),
    ("exponent", "> 0", (0,), [o.AdagradMomentum]),
]
EACH = {"use_gradient_accumulation": False}
ERRORS = [
    *[
        (rule, {name: number}, f"{name}: expected a number {within}")
        for name, within, outside, rules in LIMITS
        for rule in rules
        for number in outside
    ],
    (o.FTRL, {"initial_accumulator_value": 0}, "allow_zero_accumulator=True"),
    (o.FTRL, {"initial_accumulator_value": -1, "allow_zero_accumulator": True}, "initial_accumul"),
    (o.SGD, {"clip_weight_min": 1, "clip_weight_max": 0}, "clip_weight: expected min <= max"),
    (o.SGD, {"clipvalue": (1, 0)}, "clipvalue: expected min <= max"),
    (o.SGD, {"clipvalue": -1}, "clipvalue: expected min <= max"),
    (o.SGD, {"clipvalue": "1"}, "clipvalue: expected None, a number c"),
    (o.SGD, {"clipvalue": (1, 2, 3)}, "clipvalue: expected None, a number c"),
    (o.SGD, {"clipvalue": 1, **EACH}, "clipvalue: expected None with use_gradient_accumulation="),
    (o.Adam, {"lazy_adam": False, **EACH}, "lazy_adam: expected True with use_gradient_accumul"),
    (o.SGD, {"weight_decay_factor": "1"}, "weight_decay_factor: expected a number"),
    *[(o.SGD, {"learning_rate": x}, "rate: expected a number, a sch") for x in ("0.1", None, True)],
    (o.SGD, {"learning_rate": lambda a, b: 0.1}, "expected a callable of the step.*needs a, b"),
    (o.SGD, {"learning_rate": lambda *, a: 0.1}, "learning_rate: expected a callable of the step"),
    (o.Adam, {"beta_1": "0.9"}, "beta_1: expected a number"),
    (o.Adam, {"beta_1": float("nan")}, "beta_1: expected a number"),
    (o.Adam, {"lazy_adam": "no"}, "lazy_adam: expected True or False"),
    (o.Adam, {"slot_initializers": {"m": 0}}, "its slots .momenta, velocities., got 'm'"),
    (o.SGD, {"slot_initializers": {"m": 0}}, "it has none"),
    (o.Adam, {"slot_initializers": {"momenta": "0"}}, "number or an initializer"),
    (o.Adam, {"slot_initializers": 3}, "slot_initializers: expected a mapping"),
    (o.CustomOptimizer, {"rule": None, "slots": {}}, "rule: expected a function"),
    (o.CustomOptimizer, {"rule": max, "slots": {"a": None}}, "number or an initializer"),
    (o.CustomOptimizer, {"rule": max, "slots": {1: 0.0}}, "slot names"),
]


@pytest.mark.parametrize(("rule", "options", "words"), ERRORS)
def test_bad_option_is_refused(rule, options, words):
    with pytest.raises(ValueError, match=words):
        rule(**options)


def test_bounds_of_the_options_are_allowed():
    o.Adagrad(epsilon=0)
    o.RowWiseAdagrad(epsilon=0)
    o.FTRL(learning_rate_power=0, initial_accumulator_value=0, allow_zero_accumulator=True)
    o.Adam(beta_1=0, beta_2=0)
    o.AdagradMomentum(beta2=1, momentum=0)
    o.SGD(clip_weight_min=1, clip_weight_max=1, clipvalue=(None, 1))
    assert o.SGD(clipvalue=(None, None), use_gradient_accumulation=False).clipvalue is None


@pytest.mark.parametrize(("case", "optimizer"), optimizer_cases.flat())
def test_equal_and_hashable_by_value_and_described_plainly(case, optimizer):
    twin = dataclasses.replace(optimizer)
    assert twin is not optimizer
    assert twin == optimizer
    assert hash(twin) == hash(optimizer)
    assert dataclasses.replace(optimizer, learning_rate=0.77) != optimizer
    described = optimizer.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["class"] == case.split("-")[0]
    assert set(described) == {"class"} | set(optimizer_cases.hyper(optimizer))


def test_options_that_mean_the_same_are_equal():
    initializers = {"momenta": 0, "velocities": np.float32(1)}
    backwards = dict(reversed(initializers.items()))
    one = o.Adam(1, clipvalue=1, slot_initializers=initializers)
    other = o.Adam(np.float64(1), clipvalue=[-1, np.int32(1)], slot_initializers=backwards)
    assert one == other
    assert hash(one) == hash(other)
    assert type(other.learning_rate) is float
    assert o.SGD(0.01) != o.Momentum(0.01, momentum=0)
    assert o.RMSProp() != o.CenteredRMSProp()


def test_optimizers_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        o.SGD().learning_rate = 1.0
    with pytest.raises(TypeError):
        o.Adam(0.1, 0.9)
    custom = o.CustomOptimizer(optimizer_cases.leaky_rule, {"trail": 0, "seen": 0}, 0.5)
    assert custom.learning_rate == 0.5


def test_only_eager_adam_updates_every_row():
    every = [case for case, optimizer in optimizer_cases.flat() if optimizer.updates_every_row]
    assert every == ["Adam-3"]


def test_describe_names_callables():
    zeros = jax.nn.initializers.zeros
    described = o.Adam(optimizer_cases.halving, slot_initializers={"momenta": zeros}).describe()
    assert described["learning_rate"] == "halving"
    assert described["slot_initializers"] == {"momenta": zeros.__qualname__}


def test_slot_initializer_draws_each_row_by_its_key():
    normal = jax.nn.initializers.normal(1.0)
    optimizer = o.Adam(slot_initializers={"velocities": normal})
    keys = jax.random.split(jax.random.key(3), 4)
    slots = jax.jit(optimizer.init_slots)(jnp.zeros((4, 3)), keys)
    tag = zlib.crc32(b"velocities")
    expected = [normal(jax.random.fold_in(key, tag), (1, 3), jnp.float32)[0] for key in keys]
    np.testing.assert_array_equal(slots["velocities"], np.stack(expected))
    np.testing.assert_array_equal(slots["momenta"], np.zeros((4, 3)))


def test_slot_initializer_of_one_number_a_row():
    def initializer(key, shape, dtype):
        assert (shape, dtype) == ((1,), jnp.float32)
        return jax.random.uniform(key, shape, dtype)

    optimizer = o.RowWiseAdagrad(slot_initializers={"accumulators": initializer})
    slots = optimizer.init_slots(jnp.zeros((4, 3)), jax.random.split(jax.random.key(3), 4))
    assert slots["accumulators"].shape == (4,)
    assert len(np.unique(slots["accumulators"])) == 4


def test_slot_initializer_of_another_shape_is_refused():
    optimizer = o.Adagrad(slot_initializers={"accumulators": lambda key, shape, dtype: jnp.ones(2)})
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match=r"initializer of slot 'accumulators': expected shape"):
        optimizer.init_slots(jnp.zeros((2, 3)), keys)
