"""Optimizer: refusals, and their texts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_embed import optimizers as o
from tpu_embed.sparse import IndexedSlices
from tpu_embed.training import CrossShardOptimizer, Optimizer

PARAMS = {"kernel": np.ones((3, 2), np.float32), "n": np.int32(1), "w": np.ones(2, np.float32)}
SLICES = IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
OPTIMIZER = Optimizer(o.SGD(0.1), "opt")


def loss(params):
    return (params["w"] ** 2).sum()


def apply(pairs, optimizer=OPTIMIZER, tree=PARAMS, **options):
    params = jax.tree.map(jnp.asarray, tree)
    return optimizer.apply_gradients(pairs, params, optimizer.init(params), **options)


def of(tx, pairs, **options):
    """Apply gradients with an optimizer of a rule or transform."""
    return apply(pairs, Optimizer(tx, "opt"), **options)


@pytest.mark.parametrize(
    ("arguments", "axis", "words"),
    [
        ((o.SGD(), ""), {}, r"Optimizer: name: expected a word, got ''"),
        (("sgd", "opt"), {}, "optimizer: expected one of tpu_embed.optimizers or an optax"),
        ((o.SGD, "opt"), {}, r"make one: SGD\(...\)"),
        ((o.SGD(), "opt"), {"axis_name": "x", "reduction": "max"}, "opt: reduction: expected"),
        ((o.SGD(), "opt"), {"axis_name": ("x", "x")}, "opt: axis_name: expected the name"),
    ],
)
def test_construction(arguments, axis, words):
    with pytest.raises(ValueError, match=words):
        Optimizer(*arguments, **axis)


def test_a_name_may_be_left_out():
    optimizer = Optimizer(o.SGD())
    assert optimizer.get_name() == "Optimizer"
    with pytest.raises(ValueError, match=r"^Optimizer: "):
        apply([], optimizer)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (TypeError, {"loss": 3.0}, "loss: expected a function of the parameters, got 3.0"),
        (ValueError, {"loss": lambda p: p["n"]}, r"loss: expected a float array, got int32"),
        (ValueError, {"loss": lambda p: (loss(p), 1.0)}, "loss: expected a float array, got tuple"),
        (ValueError, {"params": {}}, "params: expected at least one array"),
        (ValueError, {"var_list": ["['x']"]}, r"opt: var_list: expected the path of one of .*'w'"),
        (ValueError, {"var_list": ["['w']"] * 2}, r"expected each path once, got \['w'\]"),
        (ValueError, {"grad_loss": np.ones(2, np.float32)}, r"the loss' shape \(\), got float32"),
        (ValueError, {"grad_loss": 1}, r"grad_loss: expected floats"),
    ],
)
def test_compute_gradients(kind, given, words):
    with pytest.raises(kind, match=words):
        OPTIMIZER.compute_gradients(**{"loss": loss, "params": PARAMS} | given)


VECTOR = IndexedSlices(jnp.ones(1), jnp.array([0]), (2,))
UNEVEN = IndexedSlices(jnp.ones((2, 2)), jnp.array([0]), (3, 2))
CUBE = IndexedSlices(jnp.ones((1, 2, 2)), jnp.array([0]), (3, 2, 2))


@pytest.mark.parametrize(
    ("kind", "pairs", "words"),
    [
        (TypeError, [("text", "['w']")], r"opt: gradient of \['w'\]: expected an array"),
        (TypeError, [jnp.ones(2)], "opt: grads_and_vars: expected pairs"),
        (ValueError, [(jnp.ones(2), "w")], r"expected the path of one of .*, got w"),
        (ValueError, [(None, "['w']"), (jnp.ones(2), "['w']")], r"each path once, got \['w'\]"),
        (ValueError, [(jnp.ones(3), "['w']")], r"'w'\]: expected the parameter's shape \(2,\), g"),
        (ValueError, [(jnp.ones(()), "['n']")], r"\['n'\]: expected None, for a parameter of int"),
        (ValueError, [(jnp.ones(2, jnp.complex64), "['w']")], "expected floats, .* got complex64"),
        (ValueError, [(SLICES, "['w']")], r"\['w'\]: expected IndexedSlices of dense_shape \(2,\)"),
        (ValueError, [(UNEVEN, "['kernel']")], r"got dense_shape \(3, 2\), values \(2, 2\), ind"),
        (ValueError, [], r"a gradient for .*, got none for \['kernel'\], \['n'\], \['w'\]"),
        (ValueError, [(VECTOR, "['w']")], r"\['w'\]: .* IndexedSlices of a parameter \[V, …, D\]"),
    ],
)
def test_apply_gradients(kind, pairs, words):
    with pytest.raises(kind, match=words):
        apply(pairs)


def fail(*_):
    raise AssertionError("mine")


FAILS = optax.GradientTransformation(lambda params: (), fail)


def test_shapes_are_judged_before_anything_is_computed():
    with pytest.raises(ValueError, match="the parameter's shape"):
        of(FAILS, [(jnp.ones((3, 2)), "['kernel']"), (jnp.ones(3), "['w']")])


def of_rank_two(tree):
    return jax.tree.map(lambda x: x.ndim < 3, tree)


@pytest.mark.parametrize(
    ("tx", "pair", "tree", "words"),
    [
        (o.SGD(0.1), (VECTOR, "['w']"), PARAMS, r"gradient of \['w'\]: .* one of shape \(2,\)"),
        (optax.flatten(optax.trace(0.9)), (SLICES, "['kernel']"), PARAMS, r"trace: .* shape \(9"),
        (optax.masked(optax.trace(0.9), of_rank_two), (CUBE, ""), np.ones((3, 2, 2)), "got none"),
    ],
    ids=["rank", "slots not by row", "no slot"],
)
def test_rows_are_judged_before_anything_is_summed(tx, pair, tree, words, monkeypatch):
    monkeypatch.setattr("tpu_embed.training.replicas.Replicas.summed", fail)
    with pytest.raises(ValueError, match=words):
        of(tx, [pair], tree=tree)


def test_a_table_of_rank_one_is_whole_where_every_row_is_updated():
    rule = o.Adam(0.1, lazy_adam=False)
    whole, sparse = (of(rule, [(g, "['w']")])[0]["w"] for g in (VECTOR.to_dense(), VECTOR))
    assert np.array_equal(whole, sparse)


# -- transforms that read the loss -----------------------------------------------------------------


@pytest.mark.parametrize("tx", [optax.lbfgs(), optax.polyak_sgd()], ids=["lbfgs", "polyak"])
@pytest.mark.quick(1)
def test_transforms_that_read_the_loss(tx):
    words = r"expected a transform of .* one that reads the loss too \(.*'value'.*\); call"
    with pytest.raises(ValueError, match=words):
        Optimizer(tx, "opt").minimize(loss, PARAMS, Optimizer(tx, "opt").init(PARAMS))


KERNEL, W = (SLICES, "['kernel']"), (jnp.ones(2), "['w']")
MULTI_STEPS = optax.MultiSteps(optax.sgd(0.1), 2)


@pytest.mark.parametrize(
    ("kind", "tx", "pair", "options", "words"),
    [
        (AssertionError, FAILS, W, {}, r"^mine$"),  # another error of a transform stays its own
        (ValueError, optax.clip_by_global_norm(1.0), KERNEL, {}, "expected a row-separable trans"),
        (ValueError, MULTI_STEPS, KERNEL, {}, r"expected a (row-separable transform|transform th)"),
        (RuntimeError, o.SGD(0.1), KERNEL, {"constraints": {"['kernel']": jnp.abs}}, r"l'\]: exp"),
        (ValueError, o.SGD(0.1), W, {"constraints": {"w": jnp.abs}}, "constraints: expected the p"),
        (ValueError, o.SGD(0.1), W, {"constraints": {"['w']": jnp.sum}}, r"expected shape \(2,\)"),
        (ValueError, optax.sgd(0.1), W, {"learning_rate": 0.1}, "optax transform holds its own"),
    ],
)
def test_what_an_optimizer_refuses(kind, tx, pair, options, words):
    with pytest.raises(kind, match=words):
        of(tx, [pair], **options)


# -- states ----------------------------------------------------------------------------------------

CROSSED = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", name="opt")


@pytest.mark.parametrize("optimizer", [OPTIMIZER, CROSSED], ids=["alone", "crossed"])
@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [
        ("minimize", [loss, PARAMS], []),
        ("apply_gradients", [[(jnp.ones(2), "['w']")], PARAMS], []),
        ("get_slot", [], ["['w']", "momenta"]),
        *((verb, [], []) for verb in ("get_slot_names", "get_non_slot", "variables")),
    ],
)
def test_a_state_of_another_type(verb, before, after, optimizer):
    for state in (None, optax.sgd(0.1).init(PARAMS), PARAMS):
        words = rf"opt: state: expected an OptState, got {type(state).__name__}; init\(params\)"
        with pytest.raises(TypeError, match=words):
            getattr(optimizer, verb)(*before, state, *after)


def test_minimize_lists_the_variables_that_have_no_gradient():
    with pytest.raises(ValueError, match=r"no gradient for any of \['kernel'\], \['n'\]"):
        OPTIMIZER.minimize(loss, PARAMS, OPTIMIZER.init(PARAMS), var_list=["['kernel']", "['n']"])


def test_another_tree_than_the_state_s():
    state = OPTIMIZER.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="opt: params: expected the tree that the state was made"):
        OPTIMIZER.apply_gradients([(jnp.ones(2), "['w']")], PARAMS, state)
    with pytest.raises(ValueError, match=r"get_slot: expected the path of one of \['w'\]"):
        OPTIMIZER.get_slot(state, "['v']", "momenta")


def test_a_rate_of_the_host_is_needed_inside_a_jit():
    with pytest.raises(ValueError, match=r"apply_gradients\(..., learning_rate=value\)"):
        jax.jit(lambda g: of(o.SGD(lambda: 0.1), [(g, "['w']")]))(jnp.ones(2))


def test_a_transform_that_mixes_parameters_wants_a_gradient_for_each():
    tx, tree = optax.flatten(optax.adam(0.1)), {"a": np.ones(2), "b": np.ones(3)}
    gradients = [(jnp.ones(2), "['a']"), (jnp.ones(3), "['b']")]
    np.testing.assert_allclose(of(tx, gradients, tree=tree)[0]["b"], 0.9, rtol=1e-5)
    with pytest.raises(ValueError, match="give a gradient for every parameter"):
        of(tx, gradients[:1], tree=tree)
