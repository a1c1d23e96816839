"""Optimizer: the contents and names of its state, and pickling."""

from __future__ import annotations

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_embed import optimizers as o
from tpu_embed.training import CrossShardOptimizer, Optimizer

D = 2


def params():
    return {"bias": jnp.ones(3), "kernel": jnp.ones((3, D)), "table": jnp.ones((7, D))}


def test_slots_exist_from_init_and_have_names():
    optimizer = Optimizer(o.AdagradMomentum(0.1), "opt")
    state = optimizer.init(params())
    assert optimizer.get_name() == "opt"
    assert optimizer.get_slot_names(state) == ["accumulators", "momenta"]
    assert optimizer.get_slot(state, "['kernel']", "momenta").shape == (3, D)
    assert optimizer.get_slot(state, "['kernel']", "velocity") is None
    assert sorted(optimizer.get_non_slot(state)) == ["count", "step"]
    names = [f"['{name}']/{slot}" for name in params() for slot in ("accumulators", "momenta")]
    assert [name for name, _ in optimizer.variables(state)] == [*names, "count", "step"]


def test_slots_of_a_chain_bear_its_positions_and_masked_parameters_have_none():
    mask = {"bias": False, "kernel": True, "table": True}
    last = optax.masked(optax.trace(0.5), mask)
    optimizer = Optimizer(optax.chain(optax.trace(0.9), optax.scale_by_adam(), last), "opt")
    state = optimizer.init(params())
    assert optimizer.get_slot_names(state) == ["0_trace", "2_trace", "mu", "nu"]
    gradient = jnp.arange(6.0).reshape(3, D)
    _, state = optimizer.apply_gradients([(gradient, "['kernel']")], params(), state)
    assert np.array_equal(optimizer.get_slot(state, "['kernel']", "0_trace"), gradient)
    assert np.array_equal(optimizer.get_slot(state, "['bias']", "0_trace"), np.zeros(3))
    assert optimizer.get_slot(state, "['bias']", "2_trace") is None
    assert optimizer.get_slot(state, "['kernel']", "2_trace").shape == (3, D)


def test_slots_of_a_tree_that_is_one_array():
    optimizer = Optimizer(o.AdagradMomentum(0.1), "opt")
    state = optimizer.init(jnp.ones(3))
    names = [name for name, _ in optimizer.variables(state)]
    assert names == ["accumulators", "count", "momenta", "step"]
    assert optimizer.get_slot(state, "", "momenta").shape == (3,)


# -- a transform that counts by the name of `step` -------------------------------------------------


def counted():
    """Return a transform whose state is a step, from 10 on."""

    def update(updates, state, params=None):
        return updates, {"step": state["step"] + 1}

    return optax.GradientTransformation(lambda params: {"step": jnp.int32(10)}, update)


@pytest.mark.parametrize("tx", [counted(), optax.chain(optax.trace(0.9), counted())])
def test_a_transform_s_own_step_stands_beside_the_optimizer_s(tx):
    optimizer = Optimizer(tx, "opt")
    gradients = [(jnp.ones(3), "['bias']")]
    _, state = optimizer.apply_gradients(gradients, params(), optimizer.init(params()))
    found = {name: int(leaf) for name, leaf in optimizer.get_non_slot(state).items()}
    assert found == {"step": 1, "inner_step": 11}
    assert found.items() <= {n: v.sum().item() for n, v in optimizer.variables(state)}.items()


def test_a_slot_called_step_stands_beside_the_optimizer_s():
    def rule(gradient, row, slots, learning_rate, step):
        return row - learning_rate * gradient, {"step": slots["step"] + 1}

    optimizer = Optimizer(o.CustomOptimizer(rule, {"step": 5.0}), "opt")
    variables = dict(optimizer.variables(optimizer.init(jnp.ones(2))))
    assert variables["inner_step"].tolist() == [5.0, 5.0]
    assert int(variables["step"]) == 0


# -- pickles ---------------------------------------------------------------------------------------


def scaled(updates, state, params=None):
    return jax.tree.map(lambda g: -g, updates), state


def no_state(params):
    return optax.EmptyState()


@pytest.mark.parametrize(
    "tx",
    [
        o.Adagrad(0.5),
        o.Adam(0.1, lazy_adam=False, clipvalue=1.0),
        optax.GradientTransformation(no_state, scaled),
    ],
    ids=["rule", "options", "transform of named functions"],
)
def test_a_pickled_optimizer_does_the_same(tx):
    alone = Optimizer(tx, "opt")
    for optimizer in (alone, CrossShardOptimizer(alone, "sum", axis_name="r")):
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.get_name() == optimizer.get_name()
        results = []
        for one in (optimizer, again):
            given = [(jnp.ones(3), "['bias']")], params(), one.init(params())
            results.append(one.apply_gradients(*given, skip_gradients_aggregation=True))
        jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, results))


@pytest.mark.parametrize("given", [o.SGD(lambda: 0.1), optax.adam(0.1)], ids=["rule", "transform"])
def test_what_does_not_pickle_says_so_in_pickle_s_words(given):
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"Can't (pickle|get)"):
        pickle.dumps(Optimizer(given, "opt"))
