"""Optimizer.compute_gradients, and minimize, which applies its result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_embed import optimizers as o
from tpu_embed.sparse import embedding_lookup, is_indexed_slices
from tpu_embed.training import Optimizer

V, D = 7, 2
RNG = np.random.default_rng(3)
PARAMS = {
    "bias": RNG.normal(size=(3,)).astype(np.float32),
    "kernel": RNG.normal(size=(3, D)).astype(np.float32),
    "table": RNG.normal(size=(V, D)).astype(np.float32),
}


def params():
    return jax.tree.map(jnp.asarray, PARAMS)


def same_bits(a, b):
    a, b = (jax.tree.leaves(tree) for tree in (a, b))
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def model():
    tree = params() | {"count": jnp.int32(4), "unused": jnp.ones(2), "stopped": jnp.ones(())}

    def loss(tree):
        rows = embedding_lookup(tree["table"], np.array([5, 1, 5]))
        stopped = jax.lax.stop_gradient(tree["stopped"])
        scale = tree["count"].astype(jnp.float32) + stopped
        return (rows @ tree["kernel"].T).sum(0) * scale * tree["bias"]

    return tree, loss


def test_gradients_are_those_of_jax_sparse_where_looked_up_and_none_where_there_is_none():
    tree, loss = model()
    found = Optimizer(optax.sgd(0.1), "opt").compute_gradients(loss, tree)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert [jax.tree_util.keystr(path) for _, path in found] == paths
    gradients = {path[-1].key: gradient for gradient, path in found}
    assert [name for name, g in gradients.items() if g is None] == ["count", "stopped", "unused"]
    assert is_indexed_slices(gradients["table"])
    assert gradients["table"].indices.tolist() == [5, 1, 5]
    names = ["bias", "kernel", "table"]
    expected = jax.grad(lambda part: loss(tree | part).sum())({name: tree[name] for name in names})
    gradients["table"] = gradients["table"].to_dense()
    for name in names:
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-6)


def test_var_list_takes_paths_and_makes_constants_of_the_rest():
    tree, loss = model()
    kernel = jax.tree_util.tree_leaves_with_path({"kernel": 0})[0][0]
    optimizer = Optimizer(optax.sgd(0.1), "opt")
    found = optimizer.compute_gradients(loss, tree, ["['table']", kernel, "['count']"])
    assert [path[-1].key for _, path in found] == ["table", "kernel", "count"]
    assert found[2][0] is None
    now, _, _ = optimizer.minimize(loss, tree, optimizer.init(tree), var_list=[kernel])
    assert [name for name in tree if not np.array_equal(now[name], tree[name])] == ["kernel"]


def test_grad_loss_is_the_cotangent_and_ones_by_default():
    tree, loss = model()
    optimizer = Optimizer(optax.sgd(0.1), "opt")
    seed = jnp.array([1.0, -2.0, 0.5])
    (given, _), (ones, _) = (
        optimizer.compute_gradients(loss, tree, ["['bias']"], grad_loss=c)[0] for c in (seed, None)
    )
    np.testing.assert_allclose(given, ones * seed, rtol=1e-6)
    _, _, value = optimizer.minimize(loss, tree, optimizer.init(tree), grad_loss=seed)
    assert np.array_equal(value, loss(tree))


def test_gates_never_change_numbers():
    tree, loss = model()
    optimizer = Optimizer(optax.sgd(0.1), "opt")
    words = {"none": 0, "op": 3, "graph": 1}
    assert list(words) == [optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH]
    results = []
    for word, barriers in words.items():

        def compute(tree, word=word):
            pairs = optimizer.compute_gradients(loss, tree, gate_gradients=word)
            return [gradient for gradient, _ in pairs]

        assert str(jax.make_jaxpr(compute)(tree)).count(" = optimization_barrier") == barriers
        results.append(jax.jit(compute)(tree))
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


@pytest.mark.parametrize("word", [None, "default", "add_n", "tree", "accumulate_n"])
def test_aggregation_methods_agree(word):
    tree, loss = model()
    optimizer = Optimizer(optax.sgd(0.1), "opt")
    found = optimizer.compute_gradients(loss, tree, ["['bias']"], aggregation_method=word)
    usual = optimizer.compute_gradients(loss, tree, ["['bias']"])
    assert np.array_equal(found[0][0], usual[0][0])


def test_minimize_is_compute_then_apply_and_returns_the_loss():
    tree, loss = model()
    optimizer = Optimizer(o.Adagrad(0.1), "opt")
    state = optimizer.init(tree)
    step = jax.jit(functools.partial(optimizer.minimize, loss))
    now, after, value = step(tree, state)
    gradients = optimizer.compute_gradients(loss, tree)
    expected, expected_state = optimizer.apply_gradients(gradients, tree, state)
    both = zip(
        jax.tree.leaves((now, after)), jax.tree.leaves((expected, expected_state)), strict=True
    )
    for a, b in both:
        np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_allclose(value, loss(tree), rtol=1e-6)
    step(now, after)
    assert step._cache_size() == 1
