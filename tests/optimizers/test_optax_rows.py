"""Optax transforms as table optimizers: what is accepted, what they do, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import pytest

from tpu_embed.optimizers import SGD, Adam, as_table_optimizer

N, D, STEPS = 6, 4, 3
RNG = np.random.default_rng(2)
ROWS = RNG.normal(size=(N, D)).astype(np.float32)
GRADIENTS = RNG.normal(size=(STEPS, N, D)).astype(np.float32)
KEYS = jax.random.split(jax.random.key(0), N)


@pytest.mark.parametrize("case", optimizer_cases.OPTAX_CASES)
@pytest.mark.quick(3)
def test_rows_equal_the_transform_on_the_whole(case):
    tx, row_slots = optimizer_cases.OPTAX_CASES[case]
    optimizer = as_table_optimizer(tx)

    @jax.jit
    def run(rows, gradients):
        by_rows, whole = rows, rows
        first = slots = optimizer.init_slots(rows, KEYS)
        with jax.numpy_dtype_promotion("standard"):  # optax itself is not strict
            state = tx.init(rows)
        for t in range(STEPS):
            by_rows, slots = optimizer.update_rows(by_rows, slots, gradients[t], jnp.int32(t), 0.0)
            with jax.numpy_dtype_promotion("standard"):
                updates, state = tx.update(gradients[t], state, whole)
            whole = optax.apply_updates(whole, updates)
        return first, slots, by_rows, whole, jax.tree.leaves(state)

    first, slots, by_rows, whole, state = run(ROWS, GRADIENTS)
    np.testing.assert_allclose(by_rows, whole, rtol=1e-5, atol=1e-6)  # two fusions of one formula
    declared = optimizer.slot_shapes(D, jnp.float32)
    assert set(slots) == set(declared)
    assert [name for name, slot in declared.items() if slot.per_row] == list(row_slots)
    for (name, slot), expected in zip(declared.items(), state, strict=True):
        np.testing.assert_allclose(slots[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert slots[name].shape == ((N, *slot.shape) if slot.per_row else slot.shape)
        for made in (first[name], slots[name]):
            assert (made.shape, made.dtype) == (slots[name].shape, slot.dtype)
            assert not made.weak_type


def test_transform_keeps_float64():
    optimizer = as_table_optimizer(optax.adam(0.1))
    with jax.enable_x64(True):
        rows = jnp.asarray(ROWS, jnp.float64)
        slots = optimizer.init_slots(rows, KEYS)
        rows, slots = jax.jit(optimizer.update_rows)(rows, slots, rows, 1, 0.0)
        assert rows.dtype == slots["mu"].dtype == jnp.float64
        assert slots["count"].dtype == jnp.int32


def test_slots_that_depend_on_the_row():
    optimizer = as_table_optimizer(optax.contrib.schedule_free_sgd(0.1))
    slots = optimizer.init_slots(jnp.asarray(ROWS), KEYS)
    np.testing.assert_array_equal(slots["z"], ROWS)


MOMENTUM = optax.sgd(0.1, momentum=0.9)
MIXES_ROWS = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), MOMENTUM),
    "large global norm": lambda: optax.clip_by_global_norm(1e6),
    "trust ratio": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "block norm": lambda: optax.clip_by_block_rms(1.0),
    "adafactor": lambda: optax.adafactor(0.1),
    "orthogonalised": lambda: optax.contrib.muon(0.1),
    "inner products": lambda: optax.contrib.mechanize(MOMENTUM),
    "noise": lambda: optax.add_noise(0.1, 0.5, key=1),
    "scalar of gradients": lambda: optax.novograd(0.1),
    "scalar flag": lambda: optax.apply_if_finite(MOMENTUM, 3),
    "needs the loss": lambda: optax.polyak_sgd(),
}


@pytest.mark.parametrize("name", MIXES_ROWS)
@pytest.mark.quick(1)
def test_transform_that_mixes_rows_is_refused(name):
    words = r"(?s)optimizer '\w+': expected a row-separable transform.*around the dense part"
    with pytest.raises(ValueError, match=words):
        as_table_optimizer(MIXES_ROWS[name]())


def test_scalar_of_gradients_names_the_cause():
    with pytest.raises(ValueError, match="scalars of its state are shared by all rows"):
        as_table_optimizer(optax.novograd(0.1))


MULTI = optax.MultiSteps(optax.sgd(0.1), 2)


@pytest.mark.parametrize(
    "transform",
    [
        MULTI,
        MULTI.gradient_transformation(),
        optax.chain(optax.clip(1.0), MULTI.gradient_transformation()),
    ],
    ids=["itself", "transform", "chain"],
)
def test_multi_steps_is_refused(transform):
    with pytest.raises(ValueError, match=r"got optax.MultiSteps; .*larger batch"):
        as_table_optimizer(transform)


def test_ours_and_none_pass_through():
    ours = Adam()
    assert as_table_optimizer(ours) is ours
    assert as_table_optimizer(None) is None


@pytest.mark.parametrize("other", ["adam", 0.1, SGD, optax.adam, object()])
def test_other_objects_are_refused(other):
    words = r"make one: SGD\(\.\.\.\)" if other is SGD else r"expected one of tpu_embed\.optimizers"
    with pytest.raises(ValueError, match=words):
        as_table_optimizer(other)


def test_transforms_are_equal_by_identity():
    tx = optax.sgd(0.1)
    one, other = as_table_optimizer(tx), as_table_optimizer(tx)
    assert one == one
    assert len({one, other}) == 2
    options = one.learning_rate, one.use_gradient_accumulation, one.updates_every_row
    assert options == (None, True, False)
    assert one.resolve_learning_rate(1, None) == 0.0


def test_made_inside_a_trace():
    def step(rows):
        optimizer = as_table_optimizer(optax.sgd(0.5))
        return optimizer.update_rows(rows, {}, rows, 1, 0.0)[0]

    assert jax.jit(step)(jnp.ones((1, 2))).tolist() == [[0.5, 0.5]]


def slot_names(transform):
    return list(as_table_optimizer(transform).slot_shapes(D, jnp.float32))


def keeping(*names):
    """Return a transform that keeps the gradients under some names."""

    def init(params):
        return {name: {"c": params} for name in names} if names else params

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda kept: kept + updates, state)

    return optax.GradientTransformation(init, update)


def test_slot_names():
    nested = optax.chain(optax.adam(0.1), optax.chain(optax.ema(0.5), optax.ema(0.9)))
    inner = ["1_0_count", "1_0_ema", "1_1_count", "1_1_ema"]
    assert slot_names(nested) == ["0_0_count", "mu", "nu", *inner]
    assert slot_names(keeping()) == ["state"]
    assert slot_names(optax.chain(keeping(), keeping())) == ["0_state", "1_state"]
    assert slot_names(keeping("a", "b")) == ["a_c", "b_c"]
