"""Random optimizers: every class with any of its options, optax transforms, and learning rates.

`draw(rng)` returns one. The ranges keep numbers moderate over two steps, and large enough for a
wrong rule to show.
"""

import jax
import optimizer_cases
import oracle_rules

from tpu_embed import optimizers as o


class HostRate:
    """A learning rate that the host reads once per update; the test sets `step`."""

    step = 0

    def __call__(self):
        return 0.3 / (2 + self.step)


HOST_RATE = HostRate()
RATES = (0.1, 0.1, 0.5, 0.01, 0.0, optimizer_cases.halving, HOST_RATE)
EPSILON = {"epsilon": (1e-7, 1e-3, 0.1)}
ADAM_BETAS = {"beta_1": (0.0, 0.5, 0.9), "beta_2": (0.0, 0.9, 0.999)}
RMS = {"rho": (0.0, 0.5, 0.9), "momentum": (0.0, 0.5, 0.9), **EPSILON}
ACCUMULATOR = {"initial_accumulator_value": (0.1, 0.5, 1e-3)}
FLAGS = (False, True)
OPTIONS = {
    "SGD": {},
    "Momentum": {"momentum": (0.0, 0.5, 0.9), "use_nesterov": FLAGS},
    "Adagrad": {**ACCUMULATOR, "epsilon": (0.0, 1e-8, 0.1)},
    "RowWiseAdagrad": {**ACCUMULATOR, "epsilon": (0.0, 1e-8, 0.1)},
    "AdagradMomentum": {"momentum": (0.0, 0.5, 0.9), "use_nesterov": FLAGS}
    | {"exponent": (1.5, 2.0, 3.0), "beta2": (0.5, 0.9, 1.0), "epsilon": (1e-10, 1e-3, 0.1)},
    "FTRL": {
        **ACCUMULATOR,
        "learning_rate_power": (-0.5, -0.5, -0.3, -1.0, 0.0),
        "l1_regularization_strength": (0.0, 0.05, 0.5),
        "l2_regularization_strength": (0.0, 0.2),
        "beta": (0.0, 0.3),
        "multiply_linear_by_learning_rate": FLAGS,
    },
    "Adam": {**ADAM_BETAS, **EPSILON, "lazy_adam": (True, True, False)}
    | dict.fromkeys(("sum_inside_sqrt", "bias_correction"), FLAGS),
    "LAMB": {**ADAM_BETAS, "epsilon": (1e-6, 1e-3, 0.1)},
    "Lion": ADAM_BETAS,
    "RMSProp": RMS,
    "CenteredRMSProp": RMS | {"rho": (0.5, 0.9)},  # at ρ = 0 the variance is 0, up to rounding
    "Adadelta": {"rho": (0.0, 0.5, 0.95), **EPSILON},
    "ProximalAdagrad": {**ACCUMULATOR, "l1": (0.0, 0.05, 0.5), "l2": (0.0, 0.3)},
    "Yogi": {**ADAM_BETAS, "epsilon": (1e-3, 0.1)},
    "CustomOptimizer": {"rule": (optimizer_cases.leaky_rule, optimizer_cases.centred_rule)},
}
COMMON = {
    "use_gradient_accumulation": (True, True, False),
    "clipvalue": (None, None, 0.7, (None, 0.5), (-0.3, None), (-0.2, 0.9)),
    "weight_decay_factor": (None, 0.0, 0.03, 0.3),
    "multiply_weight_decay_factor_by_learning_rate": FLAGS,
    "clip_weight_min": (None, None, -0.8),
    "clip_weight_max": (None, None, 0.9),
}
FIRST_SLOTS = (0.0, 0.2, 0.7)
TRAIL = {"trail": 0.0, "seen": 1.0}
CLASSES = (*OPTIONS, "optax")


def choose(rng, levels):
    """Return one of the levels unchanged; `rng.choice` would convert it to an array element."""
    return levels[rng.integers(len(levels))]


def draw(rng):
    """Return a random optimizer: one of ours, or an optax transform."""
    name = choose(rng, CLASSES)
    if name == "optax":
        transforms = [transform for transform, _ in optimizer_cases.OPTAX_CASES.values()]
        return choose(rng, transforms)
    levels = OPTIONS[name] | COMMON
    options = {option: choose(rng, levels[option]) for option in levels}
    return getattr(o, name)(**_allowed(name, options, rng))


def _allowed(name, options, rng):
    """Return a valid set of options, with a learning rate and the initial values of some slots."""
    if not options["use_gradient_accumulation"]:
        options["clipvalue"] = None
        if name == "Adam":
            options["lazy_adam"] = True
    options["learning_rate"] = choose(rng, RATES)
    slots = oracle_rules.SLOTS.get(name, TRAIL)
    if slots and rng.random() < 0.3:
        slot = choose(rng, sorted(slots))
        positive = slots[slot] == "initial_accumulator_value" or name == "Adadelta"
        values = (*FIRST_SLOTS[positive:], jax.nn.initializers.uniform(0.5))
        options["slot_initializers"] = {slot: choose(rng, values)}
    if name == "CustomOptimizer":
        options["slots"] = TRAIL
    elif name == "FTRL" and rng.random() < 0.2:  # β > 0, so that no root to divide by is zero
        options |= {"initial_accumulator_value": 0.0, "allow_zero_accumulator": True, "beta": 0.3}
    return options
