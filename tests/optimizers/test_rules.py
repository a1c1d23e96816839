"""Every rule with every option, against the float64 oracle, and the golden values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimizer_cases
import oracle_rules
import pytest
import random_optimizers

from tpu_embed import optimizers
from tpu_embed.optimizers import RowOptimizer

N, D, STEPS = 5, 4, 4
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(N, D))
GRADIENTS = RNG.normal(size=(STEPS, N, D))
ROWS[1] = 0.0  # a norm of 0
GRADIENTS[:, 2] = 0.0  # touched, but never moved by a gradient
GRADIENTS[2, 3] = 50.0  # far beyond every clip
KEYS = jax.random.split(jax.random.key(1), N)
FLAT = optimizer_cases.flat()
# Each step rounds some ten times, and √ and division keep the relative error: a few hundred units
# in the last place bound all rules.
TOLERANCE = {"float32": {"rtol": 5e-5, "atol": 5e-6}, "float64": {"rtol": 1e-10, "atol": 1e-12}}


def library_trajectory(optimizer, dtype):
    """Return the first slots, and rows and slots after each step."""

    @jax.jit
    def one(rows, slots, gradient, step):
        rate = jnp.asarray(optimizer.resolve_learning_rate(step, None)).astype(dtype)
        return optimizer.update_rows(rows, slots, gradient, step, rate)

    with jax.enable_x64(dtype == "float64"):
        rows, history = jnp.asarray(ROWS, dtype), []
        first = slots = optimizer.init_slots(rows, KEYS)
        for t, gradient in enumerate(GRADIENTS, start=1):
            rows, slots = one(rows, slots, jnp.asarray(gradient, dtype), jnp.int32(t))
            history.append((rows, slots))
        return jax.device_get((first, history))


BOTH = [(dtype, *pair) for dtype in ("float64", "float32") for pair in FLAT]


@pytest.mark.parametrize(("dtype", "case", "optimizer"), BOTH, ids=[f"{c}-{d}" for d, c, _ in BOTH])
@pytest.mark.quick(11)
def test_rule_is_the_oracle(dtype, case, optimizer):
    first, history = library_trajectory(optimizer, dtype)
    by_schedule = callable(optimizer.learning_rate)  # which gives a float32
    tolerance = TOLERANCE["float32" if by_schedule else dtype]
    name, options = type(optimizer).__name__, optimizer_cases.hyper(optimizer)
    for slot, value in oracle_rules.initial_slots(name, options, D).items():
        assert first[slot].dtype == dtype
        np.testing.assert_allclose(first[slot], np.stack([value] * N).astype(dtype), rtol=1e-7)
    gradients = [dict(enumerate(step)) for step in GRADIENTS]
    expected = optimizer_cases.oracle_steps(optimizer, ROWS, gradients)
    for t, (found, wanted) in enumerate(zip(history, expected, strict=True), 1):
        assert {x.dtype for x in jax.tree.leaves(found)} <= {np.dtype(dtype)}
        close = functools.partial(np.testing.assert_allclose, **tolerance, err_msg=f"t={t}")
        jax.tree.map(close, found, wanted)


@pytest.mark.parametrize(("case", "optimizer"), FLAT, ids=[case for case, _ in FLAT])
def test_slots_have_the_declared_shapes(case, optimizer):
    declared = optimizer.slot_shapes(D, jnp.float32)
    slots = jax.eval_shape(optimizer.init_slots, jax.ShapeDtypeStruct((N, D), jnp.float32), KEYS)
    assert jax.tree.map(jnp.shape, slots) == {name: (N, *x.shape) for name, x in declared.items()}
    assert all(slot.per_row and slot.dtype == jnp.float32 for slot in declared.values())
    assert [slot.shape for slot in declared.values() if case.startswith("RowWise")] in ([], [()])


def test_every_public_rule_has_a_case():
    public = [getattr(optimizers, name) for name in optimizers.__all__]
    rules = {x.__name__ for x in public if isinstance(x, type) and issubclass(x, RowOptimizer)}
    assert rules - {"RowOptimizer"} == set(optimizer_cases.CASES) == set(oracle_rules.DEFAULTS)
    assert set(random_optimizers.OPTIONS) >= rules - {"RowOptimizer", "CustomOptimizer"}


@pytest.mark.parametrize("name", sorted(oracle_rules.DEFAULTS))
def test_defaults_are_the_specified_ones(name):
    rates = {"SGD": 0.01, "Lion": 1e-4, "Yogi": 0.01, "CustomOptimizer": 0.01}
    rule = getattr(optimizers, name)
    made = rule(optimizer_cases.leaky_rule, {}) if name == "CustomOptimizer" else rule()
    expected = oracle_rules.COMMON | oracle_rules.DEFAULTS[name]
    expected |= {"learning_rate": rates.get(name, 0.001), "use_gradient_accumulation": True}
    got = optimizer_cases.hyper(made)
    got.pop("rule", None)
    assert got == expected


STARTS = {"accumulators": 0.002, "momenta": 0.004}
NESTEROV = optimizers.AdagradMomentum(0.1, momentum=0.9, use_nesterov=True)
L1_AND_L2 = {"l1_regularization_strength": 0.001, "l2_regularization_strength": 0.01}
MOMENTUM = optimizers.AdagradMomentum(0.1, momentum=0.9)
GOLDEN = {
    "Adam": (
        optimizers.Adam(0.1, epsilon=1e-12),
        {"momenta": 0.002, "velocities": 0.004},
        {"momenta": 0.003, "velocities": 0.003996144},
        -0.001500724,
    ),
    "Adagrad": (optimizers.Adagrad(0.1), {"accumulators": 0.002}, {}, -0.02591605),
    "AdagradMomentum": (MOMENTUM, STARTS, {"momenta": 0.26276052}, -0.02627605),
    "AdagradMomentum nesterov": (NESTEROV, STARTS, {"momenta": 0.26276052}, -0.04956450),
    "FTRL": (
        optimizers.FTRL(0.1, **L1_AND_L2),
        {"accumulators": 0.1, "linears": 0.0},
        {"linears": 0.009723979},
        -1.002739467,
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
@pytest.mark.quick(3)
def test_golden_values(case):
    optimizer, slots, expected, change = GOLDEN[case]
    with jax.enable_x64(True):
        slots = {name: jnp.full((1, 1), value) for name, value in slots.items()}
        w, g = jnp.ones((1, 1)), jnp.full((1, 1), 0.012)
        rows, new = jax.jit(optimizer.update_rows)(w, slots, g, 1, 0.1)
        # the golden values have seven to ten digits
        close = 6e-10 if case != "Adagrad" else 6e-9
        np.testing.assert_allclose(rows - w, [[change]], atol=close)
        for name, value in expected.items():
            np.testing.assert_allclose(new[name], [[value]], atol=6e-9)


@pytest.mark.parametrize("t", [1, 10, 10_000, 10_000_000])
def test_bias_correction_is_accurate_in_float32(t):
    optimizer, zero = optimizers.Adam(1.0, epsilon=1e-12), jnp.zeros((1, 1))
    slots = {"momenta": zero, "velocities": zero}
    rows, _ = optimizer.update_rows(zero, slots, zero + 0.5, jnp.int32(t), 1.0)
    zeros = {name: np.zeros(1) for name in slots}
    expected, _ = oracle_rules.apply("Adam", {"epsilon": 1e-12}, [0.0], zeros, [0.5], t, 1.0)
    np.testing.assert_allclose(rows[0], expected, rtol=2e-6)


def test_adam_survives_an_epsilon_whose_square_underflows():
    optimizer = optimizers.Adam(0.1, epsilon=1e-30)
    zeros = jnp.zeros((1, 2))
    rows, _ = optimizer.update_rows(zeros, {"momenta": zeros, "velocities": zeros}, zeros, 1, 0.1)
    assert rows.tolist() == [[0.0, 0.0]]


def test_custom_rule_sees_one_row():
    def normalised(gradient, row, slots, learning_rate, step):
        assert gradient.shape == row.shape == (D,)
        return row - learning_rate * gradient / jnp.sum(jnp.abs(gradient)), {}

    optimizer = optimizers.CustomOptimizer(normalised, {})
    rows, _ = optimizer.update_rows(jnp.zeros((2, D)), {}, jnp.full((2, D), 3.0), 1, 1.0)
    np.testing.assert_allclose(rows, np.full((2, D), -1 / D))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda g, w, s, lr, t: (w[:1], s), "row: expected shape"),
        (lambda g, w, s, lr, t: w, r"rule: expected a pair \(row, slots\), got "),
        (lambda g, w, s, lr, t: (w, {}), "slots of the rule: expected"),
        (lambda g, w, s, lr, t: (w, {"a": g[:1]}), "slot 'a' of the rule: expected shape"),
    ],
)
def test_custom_rule_must_return_what_it_was_given(rule, words):
    rows = jnp.zeros((2, D))
    with pytest.raises(ValueError, match=words):
        optimizers.CustomOptimizer(rule, {"a": 0}).update_rows(rows, {"a": rows}, rows, 1, 0.1)
