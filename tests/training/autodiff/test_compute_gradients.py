"""Optimizer.compute_gradients, and minimize, which applies its result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embed import optimizers as o
from tpu_embed.sparse import embedding_lookup, is_indexed_slices
from tpu_embed.training import Optimizer

V, D = 7, 2
RNG = np.random.default_rng(3)
PARAMS = {"bias": (3,), "kernel": (3, D), "table": (V, D)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in PARAMS.items()}


def model():
    tree = jax.tree.map(jnp.asarray, PARAMS)
    tree |= {"count": jnp.int32(4), "unused": jnp.ones(2), "stopped": jnp.ones(())}

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


def test_gates_and_aggregation_never_change_numbers():
    tree, loss = model()
    optimizer = Optimizer(optax.sgd(0.1), "opt")
    words = {"none": 0, "op": 3, "graph": 1}
    assert list(words) == [optimizer.GATE_NONE, optimizer.GATE_OP, optimizer.GATE_GRAPH]
    first = None
    for word, barriers in words.items():
        options = {"gate_gradients": word, "aggregation_method": "add_n"}
        compute = functools.partial(optimizer.compute_gradients, loss, **options)
        arrays = jax.jit(lambda tree, compute=compute: [gradient for gradient, _ in compute(tree)])
        assert str(jax.make_jaxpr(arrays)(tree)).count(" = optimization_barrier") == barriers
        first = arrays(tree) if first is None else first
        jax.tree.map(np.testing.assert_array_equal, arrays(tree), first)


def test_minimize_is_compute_then_apply_and_returns_the_loss():
    tree, loss = model()
    optimizer = Optimizer(o.Adagrad(0.1), "opt")
    state = optimizer.init(tree)
    step = jax.jit(functools.partial(optimizer.minimize, loss))
    now, after, value = step(tree, state)

    @jax.jit
    def by_hand(tree, state):
        pairs = optimizer.compute_gradients(loss, tree)
        return *optimizer.apply_gradients(pairs, tree, state), loss(tree)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, (now, after, value), by_hand(tree, state))
    step(now, after)
    assert step._cache_size() == 1
