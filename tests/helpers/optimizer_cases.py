"""The one table of optimizers that drives every test.

`CASES` maps a class name to instances: the first has nearly the defaults, the others have options.
Rates are large enough for a wrong rule to show. `OPTAX_CASES` maps a name to (transform, its
per-row slots).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import oracle_rules

from tpu_embed import optimizers as o
from tpu_embed.check.parts import leaky_rule

DECAY = {"weight_decay_factor": 0.03}
DECAY_BY_RATE = {"weight_decay_factor": 0.3, "multiply_weight_decay_factor_by_learning_rate": True}
CLIPS = {"clipvalue": 0.7, "clip_weight_min": -0.8, "clip_weight_max": 0.9}
ALL = {**DECAY_BY_RATE, **CLIPS}
RIDGE = {"l2_regularization_strength": 0.2, "beta": 0.3}
BY_RATE = {"multiply_linear_by_learning_rate": True}
FROM_ZERO = {"initial_accumulator_value": 0.0, "allow_zero_accumulator": True}
TRAIL = {"slot_initializers": {"trail": 0.4}}


def centred_rule(gradient, row, slots, learning_rate, step):
    """Follow a decaying trail of gradients minus their row mean; also in `oracle_rules`."""
    centred = gradient - o.row_mean(gradient)
    return leaky_rule(centred, row, slots, learning_rate, step)


def halving(count):
    """Return the rate of a schedule: 0.2, 0.1, 0.0666…"""
    return 0.2 / (1 + jnp.asarray(count).astype(jnp.float32))


CASES = {
    "SGD": [o.SGD(0.1), o.SGD(0.1, **ALL), o.SGD(halving, clipvalue=(None, 0.5), **DECAY)],
    "Momentum": [
        o.Momentum(0.1),
        o.Momentum(0.1, momentum=0.5, use_nesterov=True, slot_initializers={"momenta": 0.3}, **ALL),
    ],
    "Adagrad": [
        o.Adagrad(0.1),
        o.Adagrad(0.1, initial_accumulator_value=0.5, epsilon=0.1, **ALL),
        o.Adagrad(0.1, slot_initializers={"accumulators": 0.7}, **DECAY),
    ],
    "RowWiseAdagrad": [
        o.RowWiseAdagrad(0.1),
        o.RowWiseAdagrad(0.1, initial_accumulator_value=0.5, epsilon=0.0, **ALL),
        o.RowWiseAdagrad(0.1, slot_initializers={"accumulators": 0.7}, **DECAY),
    ],
    "AdagradMomentum": [
        o.AdagradMomentum(0.1),
        o.AdagradMomentum(0.1, momentum=0.9, use_nesterov=True, **ALL),
        o.AdagradMomentum(0.1, momentum=0.5, exponent=3.0, beta2=0.9, epsilon=0.01, **DECAY),
    ],
    "FTRL": [
        o.FTRL(0.1),
        o.FTRL(0.1, l1_regularization_strength=0.1, **RIDGE),
        o.FTRL(0.1, learning_rate_power=-0.3, l1_regularization_strength=0.05, **ALL),
        o.FTRL(0.1, l1_regularization_strength=0.5, **RIDGE, **BY_RATE, **FROM_ZERO, **DECAY),
        o.FTRL(0.1, learning_rate_power=0.0, slot_initializers={"linears": 0.2}),
        o.FTRL(0.0),
        o.FTRL(0.0, **BY_RATE),
    ],
    "Adam": [
        o.Adam(0.1),
        o.Adam(0.1, beta_1=0.5, beta_2=0.9, epsilon=0.1, sum_inside_sqrt=False, **ALL),
        o.Adam(0.1, beta_1=0.0, epsilon=0.1, bias_correction=False, **DECAY),
        o.Adam(halving, lazy_adam=False),
    ],
    "LAMB": [
        o.LAMB(0.1),
        o.LAMB(0.1, beta_1=0.5, beta_2=0.9, epsilon=0.1, **ALL),
        o.LAMB(0.1, **DECAY),
    ],
    "Lion": [o.Lion(0.01), o.Lion(0.1, beta_1=0.5, beta_2=0.7, **ALL)],
    "RMSProp": [o.RMSProp(0.1), o.RMSProp(0.1, rho=0.5, momentum=0.9, epsilon=0.1, **ALL)],
    "CenteredRMSProp": [
        o.CenteredRMSProp(0.1),
        o.CenteredRMSProp(0.1, rho=0.5, momentum=0.9, epsilon=0.1, **ALL),
        o.CenteredRMSProp(0.1, epsilon=0.1, slot_initializers={"ms": 0.0, "mg": 2.0}),
    ],
    "Adadelta": [o.Adadelta(0.1), o.Adadelta(1.0, rho=0.5, epsilon=0.1, **ALL)],
    "ProximalAdagrad": [
        o.ProximalAdagrad(0.1),
        o.ProximalAdagrad(0.1, l1=0.5, l2=0.3, initial_accumulator_value=0.5, **ALL),
    ],
    "Yogi": [o.Yogi(0.1), o.Yogi(0.1, beta_1=0.5, beta_2=0.9, epsilon=0.1, **ALL)],
    "CustomOptimizer": [
        o.CustomOptimizer(leaky_rule, {"trail": 0.0, "seen": 1.0}, 0.1),
        o.CustomOptimizer(leaky_rule, {"trail": 0.2, "seen": 0}, 0.1, **TRAIL, **ALL),
    ],
}

CHAIN = optax.clip(0.5), optax.trace(0.9), optax.trace(0.5), optax.scale(-0.1)
MU_NU = ("mu", "nu")
OPTAX_CASES = {
    "sgd": (optax.sgd(0.1), ()),
    "sgd with momentum": (optax.sgd(0.1, momentum=0.9, nesterov=True), ("trace",)),
    "schedule": (optax.sgd(optax.exponential_decay(0.1, 1, 0.5)), ()),
    "adam": (optax.adam(0.1), MU_NU),
    "adamw by schedule": (optax.adamw(optax.linear_schedule(0.1, 0.0, 5), weight_decay=0.1), MU_NU),
    "adagrad": (optax.adagrad(0.1), ("sum_of_squares",)),
    "rmsprop": (optax.rmsprop(0.1, centered=True, momentum=0.9), ("mu", "nu", "trace")),
    "lion": (optax.lion(0.01), ("mu",)),
    "yogi": (optax.yogi(0.1), ("mu", "nu")),
    "chain": (optax.chain(*CHAIN), ("1_trace", "2_trace")),
    "schedule free": (optax.contrib.schedule_free_sgd(0.1), ("z",)),
    "hyperparameters": (optax.inject_hyperparams(optax.adam)(0.1), ("mu", "nu")),
}


def flat():
    """Return `(id, optimizer)` for every case of our own optimizers."""
    return [(f"{name}-{i}", case) for name, cases in CASES.items() for i, case in enumerate(cases)]


def hyper(optimizer):
    """Return the options of an optimizer for `oracle_rules`."""
    return {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}


def oracle_steps(optimizer, rows, gradients):
    """Yield rows and slots after each step, in float64; `gradients`: per step, row -> gradient."""
    name, options = type(optimizer).__name__, hyper(optimizer)
    rows = [np.asarray(row, np.float64) for row in rows]
    slots = [oracle_rules.initial_slots(name, options, rows[0].size) for _ in rows]
    for t, step in enumerate(gradients, start=1):
        rate = optimizer.learning_rate
        rate = float(rate(t - 1)) if callable(rate) else rate
        for i, g in step.items():
            rows[i], slots[i] = oracle_rules.apply(name, options, rows[i], slots[i], g, t, rate)
        yield np.stack(rows), {slot: np.stack([one[slot] for one in slots]) for slot in slots[0]}
