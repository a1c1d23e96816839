"""`as_optax`: the same rule, applied to dense trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import pytest

from tpu_embed import optimizers as o

RNG = np.random.default_rng(1)
SHAPES = {"cube": (2, 2, 3), "matrix": (4, 3), "scalar": (), "vector": (3,)}
PARAMS, *GRADIENTS = (
    {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    for _ in range(3)
)


def close(found, expected):
    np.testing.assert_allclose(np.ravel(found), np.ravel(expected), rtol=2e-5, atol=5e-6)


def check(optimizer, shapes):
    """Compare two updates of a tree with the oracle's."""
    tx = optimizer.as_optax()
    params, *gradients = ({key: tree[key] for key in shapes} for tree in (PARAMS, *GRADIENTS))

    @jax.jit
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    new, state = params, tx.init(params)
    for gradient in gradients:
        new, state = step(new, state, gradient)
    assert int(state.count) == 2
    for key in shapes:
        assert new[key].shape == SHAPES[key]
        dim = SHAPES[key][-1] if SHAPES[key] else 1
        of_rows = [dict(enumerate(tree[key].reshape(-1, dim))) for tree in gradients]
        start = params[key].reshape(-1, dim)
        *_, expected = optimizer_cases.oracle_steps(optimizer, start, of_rows)
        # float32 against float64, and an update is a difference: adding it back rounds once more
        got = new[key], {slot: tree[key] for slot, tree in state.slots.items()}
        jax.tree.map(close, got, expected)


@pytest.mark.parametrize("name", optimizer_cases.CASES)
@pytest.mark.quick(2)
def test_as_optax_is_the_rule_over_rows(name):
    """Its other cases differ in options, which `test_rules` compares with the oracle."""
    check(optimizer_cases.CASES[name][0], ["cube"])


@pytest.mark.parametrize("name", ["RowWiseAdagrad", "LAMB"])
@pytest.mark.quick(1)
def test_any_leaf_is_rows(name):
    check(optimizer_cases.CASES[name][1], list(SHAPES))


def test_slots_are_trees_of_the_parameters():
    state = o.RowWiseAdagrad().as_optax().init(PARAMS)
    slots = state.slots["accumulators"]
    assert jax.tree.map(jnp.shape, slots) == {key: shape[:-1] for key, shape in SHAPES.items()}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".slots['accumulators']['matrix']" in paths


def test_leaves_keep_their_shapes_and_dtypes_and_slots_are_float32():
    empty = {"a": jnp.zeros((0, 3)), "b": jnp.zeros((2, 0))}
    params = empty | {"w": jnp.ones((2, 3), jnp.bfloat16)}
    tx = o.Adam(0.5).as_optax()
    updates, state = jax.jit(lambda params: tx.update(params, tx.init(params), params))(params)
    for found in (updates, optax.apply_updates(params, updates)):
        assert jax.tree.map(jnp.shape, found) == {"a": (0, 3), "b": (2, 0), "w": (2, 3)}
        assert found["w"].dtype == jnp.bfloat16
    assert state.slots["momenta"]["w"].dtype == jnp.float32


def test_random_slots_follow_the_seed():
    optimizer = o.Momentum(slot_initializers={"momenta": jax.nn.initializers.normal(1.0)})
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 3))}
    seeds = (1, 1, 2)
    first, again, other = (optimizer.as_optax(seed=n).init(params).slots["momenta"] for n in seeds)
    np.testing.assert_array_equal(first["a"], again["a"])
    assert len(np.unique(np.stack([first["a"], first["b"], other["a"]]))) == 18


def test_params_are_needed():
    tx = o.SGD().as_optax()
    with pytest.raises(ValueError, match=r"params: expected the parameters, got None; update\("):
        tx.update(PARAMS, tx.init(PARAMS))


def test_host_callable_is_called_once_an_eager_update_and_inside_jit_needs_its_value():
    rates = iter([0.5, 0.25])
    tx = o.SGD(lambda: next(rates)).as_optax()
    params, ones = jnp.zeros(2), jnp.ones(2)
    state = tx.init(params)
    first, state = tx.update(ones, state, params)
    second, state = tx.update(ones, state, params)
    assert (first.tolist(), second.tolist()) == ([-0.5, -0.5], [-0.25, -0.25])
    with pytest.raises(ValueError, match="learning_rate=value"):
        jax.jit(tx.update)(ones, state, params)
    given = jax.jit(lambda rate: tx.update(ones, state, params, learning_rate=rate)[0])
    assert given(0.5).tolist() == [-0.5, -0.5]


def test_composes_with_optax_chain():
    tx = optax.chain(optax.clip_by_global_norm(1.0), o.SGD(1.0).as_optax())
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([0.0, 4.0])}
    params = jax.tree.map(jnp.zeros_like, gradients)
    updates, _ = tx.update(gradients, tx.init(params), params)
    np.testing.assert_allclose(updates["b"], [0.0, -0.8], rtol=1e-6)
