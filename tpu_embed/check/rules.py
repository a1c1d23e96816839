"""Every optimizer twice: as the package has it, and as a float64 formula for one row.

Input: a row `[D]`, its slots, its gradient, t. Output: the row and its slots after the step.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import optax

from tpu_embed import optimizers
from tpu_embed.check.formulas import FORMULAS, Slots, Updated, update_row
from tpu_embed.check.oracle import Rule

RATE = 0.05
"""The learning rate of every rule."""


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


def _pair(optimizer: Any) -> Pair:
    """Return one of our optimizers with the formula of its class."""
    rule = functools.partial(update_row, FORMULAS[type(optimizer).__name__], optimizer, lr=RATE)
    return Pair(optimizer, rule, optimizer.use_gradient_accumulation)


def _of_optax(w: np.ndarray, s: Slots, g: np.ndarray, t: int) -> Updated:
    (name, trail), *_ = s.items()
    trail = 0.8 * trail + g
    return w - RATE * trail, {name: trail}


def leaky_rule(gradient: Any, row: Any, slots: Any, learning_rate: Any, step: Any) -> Any:
    """Do what the formula of `CustomOptimizer` says, as a `CustomOptimizer` wants it."""
    trail = 0.5 * slots["trail"] + gradient / step.astype(gradient.dtype)
    return row - learning_rate * trail, {"trail": trail, "seen": slots["seen"] + 1}


ADAGRAD = _pair(optimizers.Adagrad(RATE))
"""For the parts that are not about rules."""


def pairs() -> dict[str, Pair]:
    """Return every optimizer with its formula, by the name of the table that it trains."""
    o, clip = optimizers, {"clipvalue": 0.5, "clip_weight_min": -0.2, "clip_weight_max": 0.3}
    shrink = {"l1": 0.01, "l2": 0.02}
    l1_l2 = {f"{name}_regularization_strength": value for name, value in shrink.items()}
    ours = {
        "SGD": o.SGD(RATE),
        "SGD_with_options": o.SGD(RATE, weight_decay_factor=0.1, **clip),
        "Momentum": o.Momentum(RATE, use_nesterov=True),
        "Adagrad": ADAGRAD.optimizer,
        "Adagrad_one_by_one": o.Adagrad(RATE, use_gradient_accumulation=False),
        "RowWiseAdagrad": o.RowWiseAdagrad(RATE),
        "AdagradMomentum": o.AdagradMomentum(RATE, momentum=0.9),
        "FTRL": o.FTRL(RATE, **l1_l2),
        "Adam": o.Adam(RATE),
        "LAMB": o.LAMB(RATE),
        "Lion": o.Lion(RATE),
        "RMSProp": o.RMSProp(RATE, momentum=0.5),
        "CenteredRMSProp": o.CenteredRMSProp(RATE, momentum=0.5),
        "Adadelta": o.Adadelta(RATE),
        "ProximalAdagrad": o.ProximalAdagrad(RATE, **shrink),
        "Yogi": o.Yogi(RATE),
        "CustomOptimizer": o.CustomOptimizer(leaky_rule, {"trail": 0, "seen": 0}, RATE),
    }
    of_optax = Pair(optax.sgd(RATE, momentum=0.8), _of_optax)
    return {name: _pair(optimizer) for name, optimizer in ours.items()} | {"optax": of_optax}
