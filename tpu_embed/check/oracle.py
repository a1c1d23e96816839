"""The right answers: lookups, gradients and optimizers as float64 loops.

Nothing here calls the rest of the package, so a mistake there cannot be repeated here. The check of
a machine and the tests compare with these loops.

Input: tables and slots as NumPy arrays, and the bags of each feature. Output: activations, and the
tables and slots after a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

Slots = dict[str, Any]
"""The slots of one row: `[D]`, or one number."""
Rule = Callable[..., tuple[np.ndarray, Slots]]
"""(row [D], its slots, the row's gradient [D], t) -> (row, slots)."""


class Bags(NamedTuple):
    """What a feature looks up in one batch.

    Attributes:
      bags: the (row, weight) pairs of each bag.
      combiner: "sum", "mean" or "sqrtn"; None where a bag is at most one row times its weight.
      shape: the shape of the activation without D; its product is the number of bags.
    """

    bags: list[list[tuple[int, float]]]
    combiner: str | None
    shape: tuple[int, ...]


def gains(weights: list[float], combiner: str | None) -> list[float]:
    """Return the factor of each row of a bag, from the weights of its ids."""
    divisor = 1.0
    if combiner == "mean":
        divisor = math.fsum(weights)
    elif combiner == "sqrtn":
        divisor = math.sqrt(math.fsum(weight * weight for weight in weights))
    return [weight / divisor if divisor else 0.0 for weight in weights]


def terms(feature: Bags) -> Iterator[tuple[int, int, float]]:
    """Yield the bag, the row and the gain of each id that a feature looks up, in batch order."""
    for b, bag in enumerate(feature.bags):
        factors = gains([weight for _, weight in bag], feature.combiner)
        for (row, _), gain in zip(bag, factors, strict=True):
            yield b, row, gain


def lookup(table: np.ndarray, feature: Bags) -> np.ndarray:
    """Return the activation of a feature, float64 `[B, …, D]`, from a table `[V, D]`."""
    found = np.zeros((len(feature.bags), table.shape[1]))
    for b, row, gain in terms(feature):
        found[b] += gain * table[row]
    return found.reshape(*feature.shape, table.shape[1])


def row_gradients(
    feature: Bags, gradient: np.ndarray
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the bag and the row of each id, in batch order, with the row's gradient `[D]`."""
    of_bags = np.asarray(gradient, np.float64).reshape(len(feature.bags), -1)
    for b, row, gain in terms(feature):
        yield b, row, gain * of_bags[b]


def summed(found: Iterable[tuple[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """Return each row once with the sum of its gradients, in the order of first appearance."""
    sums: dict[int, np.ndarray] = {}
    for row, gradient in found:
        sums[row] = sums.get(row, 0.0) + gradient
    return sums


def update(
    table: np.ndarray,
    slots: Mapping[str, np.ndarray],
    gradients: Iterable[tuple[int, np.ndarray]],
    rule: Rule,
    step: int,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the table `[V, D]` and its slots `[V, …]` after the rule was applied to some rows.

    Args:
      table: the table before.
      slots: its slots before.
      gradients: rows with their gradients; a row that comes twice is updated twice.
      rule: the rule.
      step: t, which is 1 for the first step.
    """
    table = np.array(table, np.float64)
    new = {name: np.array(slot, np.float64) for name, slot in slots.items()}
    for row, gradient in gradients:
        own = {name: slot[row] for name, slot in new.items()}
        table[row], changed = rule(table[row], own, gradient, step)
        for name, value in changed.items():
            new[name][row] = value
    return table, new


def update_row(
    formula: Callable[..., Any], o: Any, w: Any, slots: Slots, g: Any, t: int, lr: float
) -> tuple[Any, Slots]:
    """Return a row and its slots after gradient clipping, decay, the formula and weight clipping.

    Args:
      formula: one of `FORMULAS`.
      o: the options of the optimizer.
      w: the row `[D]`.
      slots: its slots by name.
      g: its gradient `[D]`.
      t: the step, which is 1 for the first update.
      lr: the learning rate of this step.
    """
    g = _clip(g, *(o.clipvalue or (None, None)))
    if formula is not _lamb:  # which decays in its rule
        w = (1 - _decay(o, lr)) * w
    w, slots = formula(o, w, slots, g, t, lr)
    return _clip(w, o.clip_weight_min, o.clip_weight_max), slots


def _clip(values, low, high):
    values = values if low is None else np.maximum(values, low)
    return values if high is None else np.minimum(values, high)


# Each formula takes the options, w, the slots, g, t and the learning rate, and returns w and slots;
# without types it reads like mathematics.


def _decay(o, lr):
    by_rate = o.multiply_weight_decay_factor_by_learning_rate
    return (o.weight_decay_factor or 0.0) * (lr if by_rate else 1.0)


def _average(old, new, rate):
    return rate * old + (1 - rate) * new


def _moments(o, s, g):
    return _average(s["momenta"], g, o.beta_1), _average(
        s["velocities"], g * g, o.beta_2
    )


def _corrected_rate(o, t, lr):
    return lr * math.sqrt(1 - o.beta_2**t) / (1 - o.beta_1**t)


def _sgd(o, w, s, g, t, lr):
    """Robbins and Monro, "A stochastic approximation method", 1951."""
    return w - lr * g, {}


def _momentum(o, w, s, g, t, lr):
    """Sutskever et al., "On the importance of initialization and momentum", 2013."""
    m = o.momentum * s["momenta"] + g
    return w - lr * (g + o.momentum * m if o.use_nesterov else m), {"momenta": m}


def _adagrad(o, w, s, g, t, lr):
    """Duchi, Hazan and Singer, "Adaptive subgradient methods", 2011."""
    a = s["accumulators"] + g * g
    return w - lr * g / (np.sqrt(a) + o.epsilon), {"accumulators": a}


def _rowwise_adagrad(o, w, s, g, t, lr):
    """Mudigere et al., "Software-hardware co-design for … recommendation models", 2022."""
    a = s["accumulators"] + np.mean(g * g)
    return w - lr / (np.sqrt(a) + o.epsilon) * g, {"accumulators": a}


def _adagrad_momentum(o, w, s, g, t, lr):
    """Adagrad with the momentum of TensorFlow's TPU embedding."""
    a = s["accumulators"]
    a = a + g * g if o.beta2 == 1 else _average(a, g * g, o.beta2)
    q = g * (a + o.epsilon) ** (-1 / o.exponent)
    m = o.momentum * s["momenta"] + q
    step = o.momentum * m + q if o.use_nesterov else m
    return w - lr * step, {"accumulators": a, "momenta": m}


def _ftrl(o, w, s, g, t, lr):
    """McMahan et al., "Ad click prediction: a view from the trenches", 2013."""
    multiplied = o.multiply_linear_by_learning_rate
    if lr == 0 and not multiplied:
        return w, s
    # With the flag, z, l1, l2 and the denominator are multiplied by lr.
    scale, unit = (lr, 1.0) if multiplied else (1.0, lr)
    l1, l2 = scale * o.l1_regularization_strength, scale * o.l2_regularization_strength
    power = -o.learning_rate_power
    a = s["accumulators"] + g * g
    z = s["linears"] + scale * g - (a**power - s["accumulators"] ** power) * w / unit
    solved = (l1 * np.sign(z) - z) / ((a**power + o.beta) / unit + 2 * l2)
    return np.where(np.abs(z) <= l1, 0.0, solved), {"accumulators": a, "linears": z}


def _adam(o, w, s, g, t, lr):
    """Kingma and Ba, "Adam: a method for stochastic optimization", 2015."""
    m, v = _moments(o, s, g)
    alpha = _corrected_rate(o, t, lr) if o.bias_correction else lr
    scale = np.sqrt(v + o.epsilon**2) if o.sum_inside_sqrt else np.sqrt(v) + o.epsilon
    return w - alpha * m / scale, {"momenta": m, "velocities": v}


def _lamb(o, w, s, g, t, lr):
    """You et al., "Large batch optimization for deep learning", 2020."""
    m, v = _moments(o, s, g)
    r = (
        m / (1 - o.beta_1**t) / (np.sqrt(v / (1 - o.beta_2**t)) + o.epsilon)
        + _decay(o, lr) * w
    )
    w_norm, r_norm = np.sqrt(np.sum(w * w)), np.sqrt(np.sum(r * r))
    ratio = w_norm / r_norm if w_norm > 0 and r_norm > 0 else 1.0
    return w - lr * ratio * r, {"momenta": m, "velocities": v}


def _lion(o, w, s, g, t, lr):
    """Chen et al., "Symbolic discovery of optimization algorithms", 2023."""
    m = s["momenta"]
    w = w - lr * np.sign(_average(m, g, o.beta_1))
    return w, {"momenta": _average(m, g, o.beta_2)}


def _rmsprop(o, w, s, g, t, lr):
    """Tieleman and Hinton, lecture 6.5 of "Neural networks for machine learning", 2012.

    Centered: Graves, "Generating sequences with recurrent neural networks", 2013.
    """
    variance = ms = _average(s["ms"], g * g, o.rho)
    new = {"ms": ms}
    if "mg" in s:
        mg = new["mg"] = _average(s["mg"], g, o.rho)
        variance = np.maximum(ms - mg * mg, 0.0)
    new["momenta"] = b = o.momentum * s["momenta"] + lr * g / np.sqrt(
        variance + o.epsilon
    )
    return w - b, new


def _adadelta(o, w, s, g, t, lr):
    """Zeiler, "ADADELTA: an adaptive learning rate method", 2012."""
    a = _average(s["accumulators"], g * g, o.rho)
    d = g * np.sqrt(s["accum_updates"] + o.epsilon) / np.sqrt(a + o.epsilon)
    u = _average(s["accum_updates"], d * d, o.rho)
    return w - lr * d, {"accumulators": a, "accum_updates": u}


def _proximal_adagrad(o, w, s, g, t, lr):
    """Duchi and Singer, "Efficient online and batch learning …", 2009."""
    a = s["accumulators"] + g * g
    eta = lr / np.sqrt(a)
    y = w - eta * g
    w = np.sign(y) * np.maximum(np.abs(y) - eta * o.l1, 0.0) / (1 + eta * o.l2)
    return w, {"accumulators": a}


def _yogi(o, w, s, g, t, lr):
    """Zaheer et al., "Adaptive methods for nonconvex optimization", 2018."""
    m, v = _average(s["momenta"], g, o.beta_1), s["velocities"]
    v = v - (1 - o.beta_2) * np.sign(v - g * g) * g * g
    alpha = _corrected_rate(o, t, lr)
    return w - alpha * m / (np.sqrt(v) + o.epsilon), {"momenta": m, "velocities": v}


def _leaky(o, w, s, g, t, lr):
    """A decaying trail of gradients, each divided by its step: `leaky_rule` of `parts.py`."""
    trail = 0.5 * s["trail"] + g / t
    return w - lr * trail, {"trail": trail, "seen": s["seen"] + 1}


def _trace(o, w, s, g, t, lr):
    """Momentum, as `optax.sgd(lr, momentum=0.8)` has it."""
    m = 0.8 * s["trace"] + g
    return w - lr * m, {"trace": m}


FORMULAS = {
    "SGD": _sgd,
    "Momentum": _momentum,
    "Adagrad": _adagrad,
    "RowWiseAdagrad": _rowwise_adagrad,
    "AdagradMomentum": _adagrad_momentum,
    "FTRL": _ftrl,
    "Adam": _adam,
    "LAMB": _lamb,
    "Lion": _lion,
    "RMSProp": _rmsprop,
    "CenteredRMSProp": _rmsprop,
    "Adadelta": _adadelta,
    "ProximalAdagrad": _proximal_adagrad,
    "Yogi": _yogi,
    "CustomOptimizer": _leaky,
    "OptaxOptimizer": _trace,
}
"""The formula of each optimizer by the name of its class."""
