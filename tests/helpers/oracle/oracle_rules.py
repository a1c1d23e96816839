"""The specified defaults and first slots of every optimizer, around the formulas of `check`.

`hyper` holds the options that differ from the defaults, or all of them. What `apply` calls are
float64 formulas that share no code with the rules in `tpu_embed.optimizers` or with the kernels.
"""

from types import SimpleNamespace

import numpy as np

from tpu_embed.check.oracle import FORMULAS, update_row

NONE = ("clipvalue", "weight_decay_factor", "clip_weight_min", "clip_weight_max")
COMMON = dict.fromkeys(NONE) | {"slot_initializers": ()}
COMMON |= {"multiply_weight_decay_factor_by_learning_rate": False}
DEFAULTS = {
    "SGD": {},
    "Momentum": {"momentum": 0.9, "use_nesterov": False},
    "Adagrad": {"initial_accumulator_value": 0.1, "epsilon": 0.0},
    "RowWiseAdagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-8},
    "AdagradMomentum": {"momentum": 0.0, "use_nesterov": False, "exponent": 2.0}
    | {"beta2": 1.0, "epsilon": 1e-10},
    "FTRL": {"learning_rate_power": -0.5, "beta": 0.0, "initial_accumulator_value": 0.1}
    | {"l1_regularization_strength": 0.0, "l2_regularization_strength": 0.0}
    | {"multiply_linear_by_learning_rate": False, "allow_zero_accumulator": False},
    "Adam": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
    | {"lazy_adam": True, "sum_inside_sqrt": True, "bias_correction": True},
    "LAMB": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-6},
    "Lion": {"beta_1": 0.9, "beta_2": 0.99},
    "RMSProp": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7},
    "CenteredRMSProp": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7},
    "Adadelta": {"rho": 0.95, "epsilon": 1e-7},
    "ProximalAdagrad": {"l1": 0.0, "l2": 0.0, "initial_accumulator_value": 0.1},
    "Yogi": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-3},
    "CustomOptimizer": {"slots": ()},
}
SLOTS = {
    "SGD": {},
    "Momentum": {"momenta": 0.0},
    "Adagrad": {"accumulators": "initial_accumulator_value"},
    "RowWiseAdagrad": {"accumulators": "initial_accumulator_value"},
    "AdagradMomentum": {"accumulators": 0.0, "momenta": 0.0},
    "FTRL": {"accumulators": "initial_accumulator_value", "linears": 0.0},
    "Adam": {"momenta": 0.0, "velocities": 0.0},
    "LAMB": {"momenta": 0.0, "velocities": 0.0},
    "Lion": {"momenta": 0.0},
    "RMSProp": {"ms": 1.0, "momenta": 0.0},
    "CenteredRMSProp": {"ms": 1.0, "mg": 0.0, "momenta": 0.0},
    "Adadelta": {"accumulators": 0.0, "accum_updates": 0.0},
    "ProximalAdagrad": {"accumulators": "initial_accumulator_value"},
    "Yogi": {"momenta": 0.0, "velocities": 1e-6},
}


def initial_slots(name, hyper, D):
    """Return the slots of a new row of D numbers; function initializers are refused."""
    hyper = COMMON | DEFAULTS[name] | hyper
    declared = dict(hyper["slots"]) if name == "CustomOptimizer" else SLOTS[name]
    slots = {slot: hyper.get(initial, initial) for slot, initial in declared.items()}
    slots |= dict(hyper["slot_initializers"])
    assert not any(map(callable, slots.values())), "the oracle knows numbers only"
    shape = () if name == "RowWiseAdagrad" else (D,)
    return {slot: np.full(shape, value, np.float64) for slot, value in slots.items()}


def apply(name, hyper, row, slots, gradient, t, lr):
    """Return (row, slots) after update t (the first is 1), as new objects."""
    hyper = COMMON | DEFAULTS[name] | hyper
    by_mean = getattr(hyper.get("rule"), "__name__", "") == "centred_rule"
    formula = _centred if by_mean else FORMULAS[name]
    row, gradient = as_numbers(row), as_numbers(gradient)
    slots = {slot: as_numbers(values) for slot, values in slots.items()}
    row, slots = update_row(formula, SimpleNamespace(**hyper), row, slots, gradient, t, lr)
    slots = {slot: np.array(values, np.float64) for slot, values in slots.items()}
    return np.array(row, np.float64), slots


def as_numbers(values):
    """Return what formulas compute with; `oracle_bounds` replaces it by numbers that round."""
    return np.array(values, np.float64)


def _centred(o, w, slots, g, t, lr):
    """Do what `optimizer_cases.centred_rule` does."""
    return FORMULAS["CustomOptimizer"](o, w, slots, g - np.mean(g), t, lr)
