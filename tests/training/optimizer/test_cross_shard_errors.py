"""CrossShardOptimizer and cross_shard: unbound axes, and refusals."""

from __future__ import annotations

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
from tpu_embed.sparse import embedding_lookup
from tpu_embed.training import CrossShardOptimizer, Optimizer, cross_shard


@pytest.mark.parametrize("sizes", [{"r": S}, {"a": 2, "b": 4}], ids=["one axis", "two axes"])
def test_gradients_that_are_summed_already_are_refused(sizes):
    axes = tuple(sizes)
    crossed = CrossShardOptimizer(optax.sgd(1.0), axis_name=axes)

    def step(tree, ids, x):
        varying = jax.lax.pcast(tree["kernel"], axes[:-1], to="varying") if axes[1:] else None
        kernel = tree["kernel"] if varying is None else varying
        gradient = jax.grad(lambda k: loss_of("sum", ids, x)(tree | {"kernel": k}))(kernel)
        return crossed.apply_gradients([(gradient, "['kernel']")], tree, crossed.init(tree))[0]

    words = r"gradient of \['kernel'\].*compute_gradients.*skip_gradients_aggregation=True"
    with pytest.raises(ValueError, match=words):
        on_replicas(step, True, sizes=sizes)(params(), IDS, X)
    transform = cross_shard(optax.sgd(1.0), axes)

    def update(tree, ids, x):
        gradient = jax.grad(loss_of("sum", ids, x))(tree)
        return transform.update(gradient, transform.init(tree), tree)[0]

    with pytest.raises(ValueError, match=r"cross_shard: gradient of \['kernel'\]"):
        on_replicas(update, True, sizes=sizes)(params(), IDS, X)


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


def test_some_of_several_axes_unbound():
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name=("r", "q"))
    step = functools.partial(train, crossed, "mean")
    with pytest.raises(ValueError, match=r"expected all axes bound, or none, got \['q'\] unbound"):
        on_replicas(step, True)(params(), IDS, X)


def test_groups_of_an_unbound_axis():
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=GROUPS)
    with pytest.raises(ValueError, match="group_assignment: expected each of 1 replicas once"):
        crossed.scale_loss(1.0)


# -- construction ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0, 1], [1, 2]], r"got \[1\] more than once"),
        ([[0, 1], [2]], r"got lists of \[1, 2\] ids"),
        ([[0, 2], [3, 4]], r"got \[1\] in none"),
        ([[0, 1.5]], "got ids that are no integers"),
        ([[False, True]], "got ids that are no integers"),
        ([0, 1], "got ids that are no integers"),
        ([[]], "got lists without ids"),
        ([[1]], r"got \[0\] in none"),
    ],
)
def test_groups(groups, words):
    for make in (
        lambda: CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=groups),
        lambda: cross_shard(optax.sgd(0.1), "r", group_assignment=groups),
    ):
        with pytest.raises(ValueError, match=f"group_assignment: expected lists of .*{words}"):
            make()


def test_groups_of_another_size():
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=[[0, 1]])
    with pytest.raises(ValueError, match="expected each of 8 replicas once, got 2 ids"):
        on_replicas(functools.partial(train, crossed, "mean"), True)(params(), IDS, X)


@pytest.mark.parametrize(
    ("kind", "opt", "options", "words"),
    [
        (ValueError, optax.sgd(0.1), {"reduction": "max"}, r"reduction: expected 'mean' \| 'sum'"),
        (ValueError, optax.sgd(0.1), {"axis_name": None}, "axis_name: expected the name of a mesh"),
        (ValueError, optax.sgd(0.1), {"name": ""}, "name: expected a word, got ''"),
        (TypeError, "sgd", {}, "opt: expected an Optimizer or an optax transform, got str"),
        (TypeError, o.SGD(0.1), {}, r"got SGD; wrap it: Optimizer\(SGD\(...\)\)"),
        (
            TypeError,
            CrossShardOptimizer(optax.sgd(0.1), axis_name="r"),
            {},
            "one is enough: give it the optimizer that this one wraps",
        ),
        (
            ValueError,
            Optimizer(optax.sgd(0.1), "own", axis_name="r"),
            {},
            r"optimizer own: expected an optimizer without an axis of its own.*leave the axis out",
        ),
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
    gradient = Optimizer(optax.sgd(0.1), "x").compute_gradients(
        lambda table: embedding_lookup(table, IDS).sum(), jnp.ones((V, D))
    )[0][0]
    with pytest.raises(TypeError, match="gradient of the parameter: expected an array"):
        cross_shard(optax.sgd(0.1), "r").update(gradient, optax.EmptyState())


def test_what_sums_by_itself_is_not_summed_again():
    once = cross_shard(optax.sgd(0.1), "d")
    with pytest.raises(ValueError, match="an optimizer without an axis of its own"):
        CrossShardOptimizer(once, axis_name="d")
    with pytest.raises(ValueError, match="an optimizer without an axis of its own"):
        cross_shard(once, "d")
    with pytest.raises(ValueError, match="an optimizer without an axis of its own"):
        Optimizer(once, "opt", axis_name="d")
    with pytest.raises(ValueError, match="an optimizer without an axis of its own"):
        CrossShardOptimizer(Optimizer(once, "opt"), axis_name="d")
    assert Optimizer(once, "opt").get_name() == "opt"
