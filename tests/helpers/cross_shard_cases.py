"""A model on 8 replicas, and float64 loops of one device with the whole batch to compare with.

The loss of an example is Σ tanh(row · kernel + x). There are few rows, so replicas share them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optimizer_cases
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpu_embed.sparse import embedding_lookup

S, B, V, D = 8, 16, 11, 2
RNG = np.random.default_rng(8)
PARAMS = {
    "kernel": RNG.normal(size=(D,)).astype(np.float32),
    "table": RNG.normal(size=(V, D)).astype(np.float32),
}
IDS = RNG.integers(0, 5, B).astype(np.int32)
X = RNG.normal(size=(B, D)).astype(np.float32)
GROUPS = [[0, 3, 5, 6], [7, 1, 2, 4]]
MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])


def params():
    return jax.tree.map(jnp.asarray, PARAMS)


def example_losses(params, ids, x):
    return jnp.tanh(embedding_lookup(params["table"], ids) * params["kernel"] + x).sum(-1)


def loss_of(reduction, ids, x):
    return lambda params: getattr(jnp, reduction)(example_losses(params, ids, x))


def on_replicas(step, check_vma, *, out_specs=P(), sizes=None):  # noqa: B008
    """Jit a step `(params, ids, x) -> …` on replicas, each with its part of the batch."""
    names, shape = zip(*(sizes or {"r": S}).items(), strict=True)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    options = {"in_specs": (P(), P(names), P(names)), "out_specs": out_specs}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **options))


def train(optimizer, reduction, tree, ids, x, *, steps=1):
    """Return parameters and slots after some steps."""
    state = optimizer.init(tree)
    for _ in range(steps):
        tree, state, _ = optimizer.minimize(loss_of(reduction, ids, x), tree, state)
    names = optimizer.get_slot_names(state)
    slots = {
        path: {name: optimizer.get_slot(state, f"['{path}']", name) for name in names}
        for path in tree
    }
    return tree, slots


def expected(rule, reduction, examples=slice(None), *, steps=1):
    """Return the parameters and slots of one device with some examples, by float64 loops."""
    first = rows = np.array([PARAMS["kernel"], *PARAMS["table"]], np.float64)
    gradients = []
    for _ in range(steps):
        gradients.append(row_gradients(rows, reduction, examples))
        *_, (rows, slots) = optimizer_cases.oracle_steps(rule, first, gradients)
    parts = {"kernel": 0, "table": slice(1, None)}
    tree = {name: rows[at] for name, at in parts.items()}
    return tree, {name: {s: x[at] for s, x in slots.items()} for name, at in parts.items()}


def row_gradients(rows, reduction, examples, seeds=None):
    """Return {0: the gradient of the kernel, i + 1: that of row i of the table}.

    `seeds` are the cotangents of the examples' losses, ones by default.
    """
    sums = {0: np.zeros(D)}
    ids, inputs = IDS[examples], X[examples].astype(np.float64)
    seeds = np.ones(len(ids)) if seeds is None else seeds.astype(np.float64)
    for row, x, seed in zip((ids + 1).tolist(), inputs, seeds, strict=True):
        slope = seed * (1 - np.tanh(rows[row] * rows[0] + x) ** 2)
        sums[0] = sums[0] + slope * rows[row]
        sums[row] = sums.get(row, 0.0) + slope * rows[0]
    count = len(ids) if reduction == "mean" else 1
    return {row: g / count for row, g in sums.items()}


def part(group):
    """Return the examples of the replicas in a group."""
    return np.arange(B).reshape(S, -1)[sorted(group)].reshape(-1)


def assert_close(got, wanted):
    """Compare float32 with float64 numbers."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-6)
