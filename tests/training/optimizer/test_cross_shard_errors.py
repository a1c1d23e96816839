"""CrossShardOptimizer and cross_shard: unbound axes, and refusals."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from cross_shard_cases import (
    GROUPS,
    IDS,
    D,
    S,
    V,
    X,
    assert_close,
    expected,
    loss_of,
    on_replicas,
    params,
    train,
)

from tpu_embed import optimizers as o
from tpu_embed.sparse import IndexedSlices
from tpu_embed.training import CrossShardOptimizer, Optimizer, cross_shard


@pytest.mark.parametrize("sizes", [{"r": S}, {"a": 2, "b": 4}], ids=["one axis", "two axes"])
def test_gradients_that_are_summed_already_are_refused(sizes):
    axes = tuple(sizes)
    crossed = CrossShardOptimizer(optax.sgd(1.0), axis_name=axes)
    transform = cross_shard(optax.sgd(1.0), axes)

    def step(tree, ids, x):
        kernel = jax.lax.pcast(tree["kernel"], axes[:-1], to="varying")
        gradient = jax.grad(lambda k: loss_of("sum", ids, x)(tree | {"kernel": k}))(kernel)
        return crossed.apply_gradients([(gradient, "['kernel']")], tree, crossed.init(tree))[0]

    def update(tree, ids, x):
        gradient = jax.grad(loss_of("sum", ids, x))(tree)
        return transform.update(gradient, transform.init(tree), tree)[0]

    way_out = r"gradient of \['kernel'\].*compute_gradients.*skip_gradients_aggregation=True"
    for local, words in ((step, way_out), (update, r"cross_shard: gradient of \['kernel'\]")):
        with pytest.raises(ValueError, match=words):
            on_replicas(local, True, sizes=sizes)(params(), IDS, X)


# -- without an axis -------------------------------------------------------------------------------


def test_an_unbound_axis_is_one_replica_and_one_warning():
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=[[0]])
    with pytest.warns(UserWarning, match="no axis named r is bound") as seen:
        tree, _ = jax.jit(functools.partial(train, crossed, "mean"))(params(), IDS, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert crossed.scale_loss(3.0) == 3.0
    assert len(seen) == 1
    assert_close(tree, expected(o.SGD(0.1), "mean")[0])


# -- construction ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0, 1], [1, 2]], r"got \[1\] more than once"),
        ([[0, 1], [2]], r"got lists of \[1, 2\] ids"),
        ([[0, 2], [3, 4]], r"got \[1\] in none"),
        ([[False, True]], "got ids that are no integers"),
        ([0, 1], "got ids that are no integers"),
        ([[]], "got lists without ids"),
    ],
)
@pytest.mark.parametrize("make", [CrossShardOptimizer, cross_shard])
def test_groups(groups, words, make):
    with pytest.raises(ValueError, match=f"group_assignment: expected lists of .*{words}"):
        make(optax.sgd(0.1), axis_name="r", group_assignment=groups)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis_name": ("r", "q")}, r"expected all axes bound, or none, got \['q'\] unbound"),
        ({"group_assignment": [[0, 1]]}, "expected each of 8 replicas once, got 2 ids"),
    ],
)
def test_other_axes_than_those_of_the_step(options, words):
    crossed = CrossShardOptimizer(optax.sgd(0.1), **{"axis_name": "r"} | options)
    with pytest.raises(ValueError, match=words):
        on_replicas(functools.partial(train, crossed, "mean"), True)(params(), IDS, X)


def test_groups_of_an_unbound_axis():
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=GROUPS)
    with pytest.raises(ValueError, match="group_assignment: expected each of 1 replicas once"):
        crossed.scale_loss(1.0)


CROSSED = CrossShardOptimizer(optax.sgd(0.1), axis_name="r")
ONCE = cross_shard(optax.sgd(0.1), "r")
TWICE = "an optimizer without an axis of its own"


@pytest.mark.parametrize(
    ("kind", "opt", "options", "words"),
    [
        (ValueError, optax.sgd(0.1), {"reduction": "max"}, r"reduction: expected 'mean' \| 'sum'"),
        (ValueError, optax.sgd(0.1), {"axis_name": None}, "axis_name: expected the name of a mesh"),
        (ValueError, optax.sgd(0.1), {"name": ""}, "name: expected a word, got ''"),
        (TypeError, "sgd", {}, "opt: expected an Optimizer or an optax transform, got str"),
        (TypeError, o.SGD(0.1), {}, r"got SGD; wrap it: Optimizer\(SGD\(...\)\)"),
        (TypeError, CROSSED, {}, "one is enough: give it the optimizer that this one wraps"),
        (ValueError, Optimizer(optax.sgd(0.1), "own", axis_name="r"), {}, f"own: .*{TWICE}"),
        (ValueError, ONCE, {}, TWICE),
        (ValueError, Optimizer(ONCE, "opt"), {}, TWICE),
    ],
)
def test_construction(kind, opt, options, words):
    with pytest.raises(kind, match=words):
        CrossShardOptimizer(opt, **({"axis_name": "r"} | options))


def test_the_optax_form_without_an_axis_and_with_none():
    transform = cross_shard(optax.sgd(1.0), "r")
    gradients = {"a": jnp.ones(2), "b": None}
    with pytest.warns(UserWarning, match="cross_shard: no axis named r is bound"):
        updates, _ = transform.update(gradients, transform.init(gradients))
    assert updates["b"] is None
    assert updates["a"].tolist() == [-1.0, -1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transform.update(gradients, transform.init(gradients))


def test_what_the_optax_form_refuses():
    with pytest.raises(TypeError, match=r"cross_shard: opt: .* or SGD\(...\).as_optax\(\)"):
        cross_shard(o.SGD(0.1), "r")
    with pytest.raises(TypeError, match="CrossShardOptimizer takes an Optimizer"):
        cross_shard(Optimizer(optax.sgd(0.1), "x"), "r")
    with pytest.raises(ValueError, match=r"reduction: expected 'mean' \| 'sum', got 'max'"):
        cross_shard(optax.sgd(0.1), "r", "max")
    for again in (cross_shard, functools.partial(Optimizer, name="opt")):
        with pytest.raises(ValueError, match=TWICE):
            again(ONCE, axis_name="d")
    slices = IndexedSlices(jnp.ones((1, D)), jnp.array([0]), (V, D))
    with pytest.raises(TypeError, match="gradient of the parameter: expected an array"):
        cross_shard(optax.sgd(0.1), "r").update(slices, optax.EmptyState())
