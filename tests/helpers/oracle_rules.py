"""Float64 NumPy loops of every optimizer rule, one row and one number at a time.

They share no code with the library. `apply` does one whole update: gradient clipping, decay, the
rule, weight clipping. `hyper` holds the options that differ from the defaults, or all of them.
"""

import math

import numpy as np

COMMON = {
    "clipvalue": None,
    "weight_decay_factor": None,
    "multiply_weight_decay_factor_by_learning_rate": False,
    "clip_weight_min": None,
    "clip_weight_max": None,
    "slot_initializers": (),
}
DEFAULTS = {
    "SGD": {},
    "Momentum": {"momentum": 0.9, "use_nesterov": False},
    "Adagrad": {"initial_accumulator_value": 0.1, "epsilon": 0.0},
    "RowWiseAdagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-8},
    "AdagradMomentum": {
        "momentum": 0.0,
        "use_nesterov": False,
        "exponent": 2.0,
        "beta2": 1.0,
        "epsilon": 1e-10,
    },
    "FTRL": {
        "learning_rate_power": -0.5,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "beta": 0.0,
        "initial_accumulator_value": 0.1,
        "multiply_linear_by_learning_rate": False,
        "allow_zero_accumulator": False,
    },
    "Adam": {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "lazy_adam": True,
        "sum_inside_sqrt": True,
        "bias_correction": True,
    },
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


number = float
"""What elementwise rules compute with; `oracle_bounds` replaces it by a version that rounds."""


def _complete(name, hyper):
    return {**COMMON, **DEFAULTS[name], **hyper}


def initial_slots(name, hyper, D):
    """Return the slots of a new row of D numbers; function initializers are refused."""
    hyper = _complete(name, hyper)
    declared = dict(hyper["slots"]) if name == "CustomOptimizer" else SLOTS[name]
    given = dict(hyper["slot_initializers"])
    slots = {}
    for slot, initial in declared.items():
        value = given.get(slot, hyper[initial] if isinstance(initial, str) else initial)
        assert not callable(value), "the oracle knows numbers only"
        one_number = name == "RowWiseAdagrad"
        slots[slot] = float(value) if one_number else np.full(D, value, np.float64)
    return slots


def apply(name, hyper, row, slots, gradient, t, lr):
    """Return (row, slots) after update t (the first is 1), as new objects."""
    hyper = _complete(name, hyper)
    row, gradient = np.array(row, np.float64), np.array(gradient, np.float64)
    gradient = np.array([_clip(g, *_bounds(hyper["clipvalue"])) for g in gradient])
    if name != "LAMB":
        factor = _decay(hyper, lr)
        row = np.array([(1 - factor) * w for w in row])
    if getattr(hyper.get("rule"), "__name__", "") == "centred_rule":
        gradient = np.array([g - sum(gradient) / len(gradient) for g in gradient])
    if name == "RowWiseAdagrad":
        row, slots = _rowwise_adagrad(hyper, row, slots, gradient, lr)
    elif name == "LAMB":
        row, slots = _lamb(hyper, row, slots, gradient, t, lr)
    else:
        rule = ELEMENTWISE[name]
        results = []
        for d in range(len(row)):
            one = {slot: number(values[d]) for slot, values in slots.items()}
            results.append(rule(hyper, number(row[d]), one, number(gradient[d]), t, lr))
        row = np.array([w for w, _ in results])
        slots = {slot: np.array([new[slot] for _, new in results]) for slot in slots}
    low, high = hyper["clip_weight_min"], hyper["clip_weight_max"]
    return np.array([_clip(w, low, high) for w in row]), slots


def _bounds(clipvalue):
    if clipvalue is None:
        return None, None
    return clipvalue if isinstance(clipvalue, tuple) else (-clipvalue, clipvalue)


def _clip(value, low, high):
    if low is not None and value < low:
        value = low
    if high is not None and value > high:
        value = high
    return value


def _decay(hyper, lr):
    factor = hyper["weight_decay_factor"] or 0.0
    return factor * lr if hyper["multiply_weight_decay_factor_by_learning_rate"] else factor


def _sign(x):
    return (x > 0) - (x < 0)


def _avg(old, new, rate):
    return rate * old + (1 - rate) * new


def _alpha(hyper, t, lr):
    return lr * math.sqrt(1 - hyper["beta_2"] ** t) / (1 - hyper["beta_1"] ** t)


def _rowwise_adagrad(hyper, row, slots, gradient, lr):
    a = slots["accumulators"] + sum(g * g for g in gradient) / len(gradient)
    step = lr / (math.sqrt(a) + hyper["epsilon"])
    new = [w - step * g for w, g in zip(row, gradient, strict=True)]
    return np.array(new), {"accumulators": a}


def _lamb(hyper, row, slots, gradient, t, lr):
    b1, b2 = hyper["beta_1"], hyper["beta_2"]
    m = np.array([_avg(o, g, b1) for o, g in zip(slots["momenta"], gradient, strict=True)])
    v = np.array([_avg(o, g * g, b2) for o, g in zip(slots["velocities"], gradient, strict=True)])
    r = np.empty_like(row)
    for d in range(len(row)):
        root = math.sqrt(v[d] / (1 - b2**t))
        r[d] = m[d] / (1 - b1**t) / (root + hyper["epsilon"]) + _decay(hyper, lr) * row[d]
    w_norm = math.sqrt(sum(w * w for w in row))
    r_norm = math.sqrt(sum(x * x for x in r))
    if w_norm > 0 and r_norm > 0:
        lr = lr * w_norm / r_norm
    return row - lr * r, {"momenta": m, "velocities": v}


def _sgd(hyper, w, slots, g, t, lr):
    return w - lr * g, {}


def _momentum(hyper, w, slots, g, t, lr):
    mu = hyper["momentum"]
    m = mu * slots["momenta"] + g
    return w - lr * (g + mu * m if hyper["use_nesterov"] else m), {"momenta": m}


def _adagrad(hyper, w, slots, g, t, lr):
    a = slots["accumulators"] + g * g
    return w - lr * g / (math.sqrt(a) + hyper["epsilon"]), {"accumulators": a}


def _adagrad_momentum(hyper, w, slots, g, t, lr):
    a, mu, b2 = slots["accumulators"], hyper["momentum"], hyper["beta2"]
    a = a + g * g if b2 == 1 else b2 * a + (1 - b2) * g * g
    q = g * (a + hyper["epsilon"]) ** (-1 / hyper["exponent"])
    m = mu * slots["momenta"] + q
    step = mu * m + q if hyper["use_nesterov"] else m
    return w - lr * step, {"accumulators": a, "momenta": m}


def _ftrl(hyper, w, slots, g, t, lr):
    power, beta = -hyper["learning_rate_power"], hyper["beta"]
    l1, l2 = hyper["l1_regularization_strength"], hyper["l2_regularization_strength"]
    a, z = slots["accumulators"], slots["linears"]
    new_a = a + g * g
    change = new_a**power - a**power
    if hyper["multiply_linear_by_learning_rate"]:
        z = z + lr * g - change * w
        threshold, denominator = lr * l1, new_a**power + beta + 2 * lr * l2
    elif lr == 0:
        return w, dict(slots)
    else:
        z = z + g - change * w / lr
        threshold, denominator = l1, (new_a**power + beta) / lr + 2 * l2
    new_w = 0.0 if abs(z) <= threshold else (threshold * _sign(z) - z) / denominator
    return new_w, {"accumulators": new_a, "linears": z}


def _adam(hyper, w, slots, g, t, lr):
    m = _avg(slots["momenta"], g, hyper["beta_1"])
    v = _avg(slots["velocities"], g * g, hyper["beta_2"])
    alpha = _alpha(hyper, t, lr) if hyper["bias_correction"] else lr
    eps = hyper["epsilon"]
    scale = math.sqrt(v + eps * eps) if hyper["sum_inside_sqrt"] else math.sqrt(v) + eps
    return w - alpha * m / scale, {"momenta": m, "velocities": v}


def _lion(hyper, w, slots, g, t, lr):
    m = slots["momenta"]
    w = w - lr * _sign(_avg(m, g, hyper["beta_1"]))
    return w, {"momenta": _avg(m, g, hyper["beta_2"])}


def _rmsprop(hyper, w, slots, g, t, lr):
    ms = _avg(slots["ms"], g * g, hyper["rho"])
    b = hyper["momentum"] * slots["momenta"] + lr * g / math.sqrt(ms + hyper["epsilon"])
    return w - b, {"ms": ms, "momenta": b}


def _centered_rmsprop(hyper, w, slots, g, t, lr):
    ms, mg = _avg(slots["ms"], g * g, hyper["rho"]), _avg(slots["mg"], g, hyper["rho"])
    scale = math.sqrt(max(ms - mg * mg, 0.0) + hyper["epsilon"])
    b = hyper["momentum"] * slots["momenta"] + lr * g / scale
    return w - b, {"ms": ms, "mg": mg, "momenta": b}


def _adadelta(hyper, w, slots, g, t, lr):
    rho, eps = hyper["rho"], hyper["epsilon"]
    a = _avg(slots["accumulators"], g * g, rho)
    d = g * math.sqrt(slots["accum_updates"] + eps) / math.sqrt(a + eps)
    return w - lr * d, {
        "accumulators": a,
        "accum_updates": _avg(slots["accum_updates"], d * d, rho),
    }


def _proximal_adagrad(hyper, w, slots, g, t, lr):
    a = slots["accumulators"] + g * g
    eta = lr / math.sqrt(a)
    y = w - eta * g
    w = _sign(y) * max(abs(y) - eta * hyper["l1"], 0.0) / (1 + eta * hyper["l2"])
    return w, {"accumulators": a}


def _yogi(hyper, w, slots, g, t, lr):
    m, v = _avg(slots["momenta"], g, hyper["beta_1"]), slots["velocities"]
    v = v - (1 - hyper["beta_2"]) * _sign(v - g * g) * g * g
    w = w - _alpha(hyper, t, lr) * m / (math.sqrt(v) + hyper["epsilon"])
    return w, {"momenta": m, "velocities": v}


def _custom(hyper, w, slots, g, t, lr):
    """Do what `optimizer_cases.leaky_rule` does."""
    trail = 0.5 * slots["trail"] + g / t
    return w - lr * trail, {"trail": trail, "seen": slots["seen"] + 1}


ELEMENTWISE = {
    "SGD": _sgd,
    "Momentum": _momentum,
    "Adagrad": _adagrad,
    "AdagradMomentum": _adagrad_momentum,
    "FTRL": _ftrl,
    "Adam": _adam,
    "Lion": _lion,
    "RMSProp": _rmsprop,
    "CenteredRMSProp": _centered_rmsprop,
    "Adadelta": _adadelta,
    "ProximalAdagrad": _proximal_adagrad,
    "Yogi": _yogi,
    "CustomOptimizer": _custom,
}
