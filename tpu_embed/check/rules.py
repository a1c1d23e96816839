"""Every optimizer twice: as the package has it, and as float64 formulas for one row.

The formulas are those of the documentation, with its default hyperparameters written as numbers.

Input: a row `[D]`, its slots, its gradient, t. Output: the row and its slots after the step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import optax

from tpu_embed import optimizers
from tpu_embed.check.oracle import Rule, Slots

__all__ = ["ADAGRAD", "RATE", "Pair", "pairs"]

RATE = 0.05
"""The learning rate of every rule."""

Row = np.ndarray
Updated = tuple[Row, Slots]


class Pair(NamedTuple):
    """An optimizer, and what it should do.

    Attributes:
      optimizer: the package's.
      rule: the formula.
      accumulates: whether the gradients of a row are summed before it is updated once.
    """

    optimizer: Any
    rule: Rule
    accumulates: bool = True


def _sgd(w: Row, s: Slots, g: Row, t: int) -> Updated:
    return w - RATE * g, {}


def _sgd_with_options(w: Row, s: Slots, g: Row, t: int) -> Updated:
    g = np.clip(g, -0.5, 0.5)
    w = (1 - 0.1) * w - RATE * g
    return np.clip(w, -0.2, 0.3), {}


def _momentum(w: Row, s: Slots, g: Row, t: int) -> Updated:
    m = 0.9 * s["momenta"] + g
    return w - RATE * (g + 0.9 * m), {"momenta": m}


def _adagrad(w: Row, s: Slots, g: Row, t: int) -> Updated:
    a = s["accumulators"] + g * g
    return w - RATE * g / np.sqrt(a), {"accumulators": a}


def _rowwise_adagrad(w: Row, s: Slots, g: Row, t: int) -> Updated:
    a = s["accumulators"] + np.mean(g * g)
    return w - RATE * g / (math.sqrt(a) + 1e-8), {"accumulators": a}


def _adagrad_momentum(w: Row, s: Slots, g: Row, t: int) -> Updated:
    a = s["accumulators"] + g * g
    m = 0.9 * s["momenta"] + g * (a + 1e-10) ** (-1 / 2)
    return w - RATE * m, {"accumulators": a, "momenta": m}


def _ftrl(w: Row, s: Slots, g: Row, t: int) -> Updated:
    l1, l2 = 0.01, 0.02
    a = s["accumulators"] + g * g
    z = s["linears"] + g - (np.sqrt(a) - np.sqrt(s["accumulators"])) * w / RATE
    shrunk = np.where(np.abs(z) <= l1, 0.0, l1 * np.sign(z) - z)
    return shrunk / (np.sqrt(a) / RATE + 2 * l2), {"accumulators": a, "linears": z}


def _adam(w: Row, s: Slots, g: Row, t: int) -> Updated:
    m = 0.9 * s["momenta"] + 0.1 * g
    v = 0.999 * s["velocities"] + 0.001 * g * g
    alpha = RATE * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - alpha * m / np.sqrt(v + 1e-7**2), {"momenta": m, "velocities": v}


def _lamb(w: Row, s: Slots, g: Row, t: int) -> Updated:
    m = 0.9 * s["momenta"] + 0.1 * g
    v = 0.999 * s["velocities"] + 0.001 * g * g
    r = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
    ratio = np.linalg.norm(w) / np.linalg.norm(r)
    return w - RATE * ratio * r, {"momenta": m, "velocities": v}


def _lion(w: Row, s: Slots, g: Row, t: int) -> Updated:
    m = s["momenta"]
    return w - RATE * np.sign(0.9 * m + 0.1 * g), {"momenta": 0.99 * m + 0.01 * g}


def _rmsprop(w: Row, s: Slots, g: Row, t: int) -> Updated:
    ms = 0.9 * s["ms"] + 0.1 * g * g
    b = 0.5 * s["momenta"] + RATE * g / np.sqrt(ms + 1e-7)
    return w - b, {"ms": ms, "momenta": b}


def _centered_rmsprop(w: Row, s: Slots, g: Row, t: int) -> Updated:
    ms, mg = 0.9 * s["ms"] + 0.1 * g * g, 0.9 * s["mg"] + 0.1 * g
    b = 0.5 * s["momenta"] + RATE * g / np.sqrt(np.maximum(ms - mg * mg, 0) + 1e-7)
    return w - b, {"ms": ms, "mg": mg, "momenta": b}


def _adadelta(w: Row, s: Slots, g: Row, t: int) -> Updated:
    a = 0.95 * s["accumulators"] + 0.05 * g * g
    d = g * np.sqrt(s["accum_updates"] + 1e-7) / np.sqrt(a + 1e-7)
    u = 0.95 * s["accum_updates"] + 0.05 * d * d
    return w - RATE * d, {"accumulators": a, "accum_updates": u}


def _proximal_adagrad(w: Row, s: Slots, g: Row, t: int) -> Updated:
    a = s["accumulators"] + g * g
    eta = RATE / np.sqrt(a)
    y = w - eta * g
    w = np.sign(y) * np.maximum(np.abs(y) - eta * 0.01, 0) / (1 + eta * 0.02)
    return w, {"accumulators": a}


def _yogi(w: Row, s: Slots, g: Row, t: int) -> Updated:
    m = 0.9 * s["momenta"] + 0.1 * g
    v = s["velocities"]
    v = v - 0.001 * np.sign(v - g * g) * g * g
    alpha = RATE * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - alpha * m / (np.sqrt(v) + 1e-3), {"momenta": m, "velocities": v}


def _leaky(w: Row, s: Slots, g: Row, t: int) -> Updated:
    trail = 0.5 * s["trail"] + g / t
    return w - RATE * trail, {"trail": trail}


def _of_optax(w: Row, s: Slots, g: Row, t: int) -> Updated:
    (name, trail), *_ = s.items()
    trail = 0.8 * trail + g
    return w - RATE * trail, {name: trail}


def _leaky_rule(gradient: Any, row: Any, slots: Any, learning_rate: Any, step: Any) -> Any:
    """Do what `_leaky` does, as a `CustomOptimizer` wants it."""
    trail = 0.5 * slots["trail"] + gradient / step.astype(gradient.dtype)
    return row - learning_rate * trail, {"trail": trail}


ADAGRAD = Pair(optimizers.Adagrad(RATE), _adagrad)
"""For the parts that are not about rules."""


def pairs() -> dict[str, Pair]:
    """Return every optimizer with its formula, by the name of the table that it trains."""
    o, clip = optimizers, {"clipvalue": 0.5, "clip_weight_min": -0.2, "clip_weight_max": 0.3}
    shrink = {"l1": 0.01, "l2": 0.02}
    l1_l2 = {f"{name}_regularization_strength": value for name, value in shrink.items()}
    return {
        "SGD": Pair(o.SGD(RATE), _sgd),
        "SGD_with_options": Pair(o.SGD(RATE, weight_decay_factor=0.1, **clip), _sgd_with_options),
        "Momentum": Pair(o.Momentum(RATE, use_nesterov=True), _momentum),
        "Adagrad": ADAGRAD,
        "Adagrad_one_by_one": Pair(
            o.Adagrad(RATE, use_gradient_accumulation=False), _adagrad, accumulates=False
        ),
        "RowWiseAdagrad": Pair(o.RowWiseAdagrad(RATE), _rowwise_adagrad),
        "AdagradMomentum": Pair(o.AdagradMomentum(RATE, momentum=0.9), _adagrad_momentum),
        "FTRL": Pair(o.FTRL(RATE, **l1_l2), _ftrl),
        "Adam": Pair(o.Adam(RATE), _adam),
        "LAMB": Pair(o.LAMB(RATE), _lamb),
        "Lion": Pair(o.Lion(RATE), _lion),
        "RMSProp": Pair(o.RMSProp(RATE, momentum=0.5), _rmsprop),
        "CenteredRMSProp": Pair(o.CenteredRMSProp(RATE, momentum=0.5), _centered_rmsprop),
        "Adadelta": Pair(o.Adadelta(RATE), _adadelta),
        "ProximalAdagrad": Pair(o.ProximalAdagrad(RATE, **shrink), _proximal_adagrad),
        "Yogi": Pair(o.Yogi(RATE), _yogi),
        "CustomOptimizer": Pair(o.CustomOptimizer(_leaky_rule, {"trail": 0}, RATE), _leaky),
        "optax": Pair(optax.sgd(RATE, momentum=0.8), _of_optax),
    }
