"""Optimizer: refusals, and their texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_embed import optimizers as o
from tpu_embed.sparse import IndexedSlices
from tpu_embed.training import CrossShardOptimizer, Optimizer
from tpu_embed.training.replicas import Replicas

PARAMS = {"kernel": np.ones((3, 2), np.float32), "n": np.int32(1), "w": np.ones(2, np.float32)}
SLICES = IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
OPTIMIZER = Optimizer(o.SGD(0.1), "opt")


def loss(params):
    return (params["w"] ** 2).sum()


def apply(pairs, optimizer=OPTIMIZER, **options):
    params = jax.tree.map(jnp.asarray, PARAMS)
    return optimizer.apply_gradients(pairs, params, optimizer.init(params), **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((o.SGD(), ""), r"Optimizer: name: expected a word, got ''"),
        ((o.SGD(), None), "name: expected a word"),
        (("sgd", "opt"), "optimizer: expected one of tpu_embed.optimizers or an optax transform"),
        ((o.SGD, "opt"), r"make one: SGD\(...\)"),
    ],
)
def test_construction(arguments, words):
    with pytest.raises(ValueError, match=words):
        Optimizer(*arguments)


def test_a_name_may_be_left_out():
    optimizer = Optimizer(o.SGD())
    assert optimizer.get_name() == "Optimizer"
    with pytest.raises(ValueError, match=r"^Optimizer: "):
        apply([], optimizer)


def test_construction_of_the_axis():
    with pytest.raises(ValueError, match=r"opt: reduction: expected 'mean' \| 'sum', got 'max'"):
        Optimizer(o.SGD(), "opt", axis_name="x", reduction="max")
    for name in ("", 3, (), ("x", "x")):
        with pytest.raises(ValueError, match="opt: axis_name: expected the name of a mesh axis"):
            Optimizer(o.SGD(), "opt", axis_name=name)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (TypeError, {"loss": 3.0}, "loss: expected a function of the parameters, got 3.0"),
        (ValueError, {"loss": lambda p: p["n"]}, r"loss: expected a float array, got int32"),
        (ValueError, {"loss": lambda p: "x"}, "loss: expected a float array, got str"),
        (ValueError, {"params": {}}, "params: expected at least one array"),
        (ValueError, {"var_list": ["['x']"]}, r"opt: var_list: expected the path of one of .*'w'"),
        (ValueError, {"var_list": ["['w']"] * 2}, r"expected each path once, got \['w'\]"),
        (
            ValueError,
            {"gate_gradients": "all"},
            r"gate_gradients: expected 'none' \| 'op' \| 'graph'",
        ),
        (ValueError, {"aggregation_method": "mean"}, "aggregation_method: expected"),
        (
            ValueError,
            {"grad_loss": np.ones(2, np.float32)},
            r"the loss' shape \(\), got float32 of",
        ),
        (ValueError, {"grad_loss": 1}, r"grad_loss: expected floats"),
        (
            ValueError,
            {"loss": lambda p: (loss(p), 1.0)},
            r"loss: expected a float array, got tuple",
        ),
    ],
)
def test_compute_gradients(kind, given, words):
    arguments = {"loss": loss, "params": PARAMS} | given
    with pytest.raises(kind, match=words):
        OPTIMIZER.compute_gradients(**arguments)


@pytest.mark.parametrize(
    ("kind", "pairs", "words"),
    [
        (TypeError, [("text", "['w']")], r"opt: gradient of \['w'\]: expected an array"),
        (TypeError, [(object(), "['w']")], r"expected an array, IndexedSlices or None, got <obj"),
        (TypeError, [jnp.ones(2)], "opt: grads_and_vars: expected pairs"),
        (ValueError, [(jnp.ones(2), "w")], r"expected the path of one of .*, got w"),
        (ValueError, [(jnp.ones(2), 3)], r"expected the path of one of"),
        (ValueError, [(None, "['w']"), (jnp.ones(2), "['w']")], r"each path once, got \['w'\]"),
        (
            ValueError,
            [(jnp.ones(3), "['w']")],
            r"'w'\]: expected the parameter's shape \(2,\), got",
        ),
        (ValueError, [(jnp.ones(()), "['n']")], r"\['n'\]: expected None, for a parameter of int"),
        (
            ValueError,
            [(jnp.ones(2, jnp.complex64), "['w']")],
            r"\['w'\]: expected floats, .* got complex64",
        ),
        (ValueError, [(SLICES, "['w']")], r"\['w'\]: expected IndexedSlices of dense_shape \(2,\)"),
        (
            ValueError,
            [(IndexedSlices(jnp.ones((2, 2)), jnp.array([0]), (3, 2)), "['kernel']")],
            r"\['kernel'\]: expected .*, got dense_shape \(3, 2\), values \(2, 2\), indices \(1,\)",
        ),
        (
            ValueError,
            [],
            r"expected a gradient for .*, got none for \['kernel'\], \['n'\], \['w'\]",
        ),
        (ValueError, [(None, "['w']")], r"got none for \['w'\]"),
        (
            ValueError,
            [(IndexedSlices(jnp.ones(1), jnp.array([0]), (2,)), "['w']")],
            r"\['w'\]: .* IndexedSlices of a parameter \[V, …, D\].*table\[:, None\]",
        ),
    ],
)
def test_apply_gradients(kind, pairs, words):
    with pytest.raises(kind, match=words):
        apply(pairs)


def fail(*_):
    raise AssertionError


def test_shapes_are_judged_before_anything_is_computed():
    tx = optax.GradientTransformation(lambda params: (), fail)
    with pytest.raises(ValueError, match="the parameter's shape"):
        apply([(jnp.ones((3, 2)), "['kernel']"), (jnp.ones(3), "['w']")], Optimizer(tx, "opt"))


VECTOR = IndexedSlices(jnp.ones(1), jnp.array([0]), (2,))


@pytest.mark.parametrize(
    ("tx", "sparse", "words"),
    [
        (o.SGD(0.1), (VECTOR, "['w']"), r"opt: gradient of \['w'\]: .* one of shape \(2,\)"),
        (
            optax.flatten(optax.trace(0.9)),
            (SLICES, "['kernel']"),
            r"\['kernel'\]: slot trace: expected shape \(3, 2\), got shape \(9,\)",
        ),
    ],
    ids=["rank", "slots not by row"],
)
def test_rows_are_judged_before_anything_is_summed_or_computed(tx, sparse, words, monkeypatch):
    optimizer = Optimizer(tx, "opt")
    monkeypatch.setattr(Replicas, "summed", fail)
    with pytest.raises(ValueError, match=words):
        apply([sparse], optimizer)


def test_a_table_that_has_no_slots_is_judged_too(monkeypatch):
    flat = optax.masked(optax.trace(0.9), lambda tree: jax.tree.map(lambda x: x.ndim < 3, tree))
    optimizer, table = Optimizer(flat, "opt"), jnp.ones((3, 2, 2))
    state = optimizer.init(table)
    monkeypatch.setattr(Replicas, "summed", fail)
    gradient = IndexedSlices(jnp.ones((1, 2, 2)), jnp.array([0]), table.shape)
    words = r"slot trace: expected shape \(3, 2, 2\), got none; a transform that keeps"
    with pytest.raises(ValueError, match=words):
        optimizer.apply_gradients([(gradient, "")], table, state)


def test_a_table_of_rank_one_is_whole_where_every_row_is_updated():
    whole, sparse = (
        apply([(gradient, "['w']")], Optimizer(o.Adam(0.1, lazy_adam=False), "opt"))[0]["w"]
        for gradient in (VECTOR.to_dense(), VECTOR)
    )
    assert np.array_equal(whole, sparse)


# -- transforms that read the loss -----------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.lbfgs(),
        optax.polyak_sgd(),
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    ],
    ids=["lbfgs", "polyak", "plateau"],
)
@pytest.mark.quick(1)
def test_transforms_that_read_the_loss(tx):
    optimizer = Optimizer(tx, "opt")
    state = optimizer.init(jnp.ones(2))
    words = (
        r"optimizer: expected a transform of .* one that reads the loss too \(.*'value'.*\); call"
    )
    with pytest.raises(ValueError, match=words):
        optimizer.minimize(lambda w: (w**2).sum(), jnp.ones(2), state)


def test_other_errors_of_a_transform_stay_its_own():
    def update(updates, state, params=None):
        raise TypeError("mine")

    optimizer = Optimizer(optax.GradientTransformation(lambda params: (), update), "opt")
    with pytest.raises(TypeError, match=r"^mine$"):
        apply([(jnp.ones(2), "['w']")], optimizer)


# -- states ----------------------------------------------------------------------------------------

CROSSED = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", name="opt")


@pytest.mark.parametrize("state", [None, optax.sgd(0.1).init(PARAMS), {}, PARAMS])
@pytest.mark.parametrize("optimizer", [OPTIMIZER, CROSSED], ids=["alone", "crossed"])
@pytest.mark.parametrize(
    "verb",
    [
        lambda opt, state: opt.minimize(loss, PARAMS, state),
        lambda opt, state: opt.apply_gradients([(jnp.ones(2), "['w']")], PARAMS, state),
        lambda opt, state: opt.get_slot(state, "['w']", "momenta"),
        lambda opt, state: opt.get_slot_names(state),
        lambda opt, state: opt.get_non_slot(state),
        lambda opt, state: opt.variables(state),
    ],
    ids=["minimize", "apply", "slot", "slot names", "non slot", "variables"],
)
def test_a_state_of_another_type(verb, optimizer, state):
    words = rf"opt: state: expected an OptState, got {type(state).__name__}; init\(params\)"
    with pytest.raises(TypeError, match=words):
        verb(optimizer, state)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.adafactor(0.1),
        optax.MultiSteps(optax.sgd(0.1), 2),
    ],
    ids=["global norm", "adafactor", "multi steps"],
)
@pytest.mark.quick(1)
def test_slices_want_a_row_separable_transform(tx):
    with pytest.raises(ValueError, match=r"expected a (row-separable transform|transform that)"):
        apply([(SLICES, "['kernel']")], Optimizer(tx, "opt"))


def test_constraints():
    with pytest.raises(
        RuntimeError, match=r"constraint on \['kernel'\]: expected a dense gradient"
    ):
        apply([(SLICES, "['kernel']")], constraints={"['kernel']": jnp.abs})
    with pytest.raises(ValueError, match="opt: constraints: expected the path of one of"):
        apply([(jnp.ones(2), "['w']")], constraints={"w": jnp.abs})
    with pytest.raises(ValueError, match=r"a constraint's result: expected shape \(2,\), got"):
        apply([(jnp.ones(2), "['w']")], constraints={"['w']": jnp.sum})


def test_minimize_lists_the_variables_that_have_no_gradient():
    state = OPTIMIZER.init(PARAMS)
    with pytest.raises(ValueError, match=r"no gradient for any of \['kernel'\], \['n'\]"):
        OPTIMIZER.minimize(loss, PARAMS, state, var_list=["['kernel']", "['n']"])
    with pytest.raises(ValueError, match=r"no gradient for any of \['n'\]"):
        OPTIMIZER.minimize(loss, PARAMS, state, var_list=["['n']"])


def test_another_tree_than_the_state_s():
    state = OPTIMIZER.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="opt: params: expected the tree that the state was made"):
        OPTIMIZER.apply_gradients([(jnp.ones(2), "['w']")], PARAMS, state)
    with pytest.raises(ValueError, match=r"get_slot: expected the path of one of \['w'\]"):
        OPTIMIZER.get_slot(state, "['v']", "momenta")
    with pytest.raises(ValueError, match="params: expected at least one array"):
        OPTIMIZER.init({})


def test_learning_rates():
    with pytest.raises(ValueError, match="an optax transform holds its own"):
        apply([(jnp.ones(2), "['w']")], Optimizer(optax.sgd(0.1), "opt"), learning_rate=0.1)
    optimizer = Optimizer(o.SGD(lambda: 0.1), "opt")
    with pytest.raises(ValueError, match=r"apply_gradients\(..., learning_rate=value\)"):
        jax.jit(lambda g: apply([(g, "['w']")], optimizer))(jnp.ones(2))


def test_a_transform_that_mixes_parameters_wants_a_gradient_for_each():
    tx = optax.flatten(optax.adam(0.1))
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    optimizer = Optimizer(tx, "opt")
    state = optimizer.init(params)
    gradients = [(jnp.ones(2), "['a']"), (jnp.ones(3), "['b']")]
    now, _ = optimizer.apply_gradients(gradients, params, state)
    np.testing.assert_allclose(now["b"], 0.9, rtol=1e-5)
    with pytest.raises(ValueError, match="give a gradient for every parameter"):
        optimizer.apply_gradients(gradients[:1], params, state)
