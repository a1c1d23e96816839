"""One update per occurrence of a row: rounds of distinct rows, in batch order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import make_stack

from tpu_embed import optimizers as o
from tpu_embed.core.batch import LocalIds
from tpu_embed.core.state import StackShard
from tpu_embed.core.update.sharded import CHUNK, apply_each

V, D = 7, 2


@functools.cache
def program(optimizer):
    stack = make_stack([V], 1, dim=D, optimizer=optimizer)

    def apply(table, slots, rows, gradients, rate):
        held = StackShard(table, slots)
        return apply_each(held, by_row(rows), gradients, stack, jnp.int32(1), rate)

    return jax.jit(apply)


def by_row(rows):
    """Return occurrences of rows sorted as `apply_each` takes them; each has a bag of its own."""
    rows = jnp.where(rows < 0, np.iinfo(np.int32).max, rows)
    order = jnp.argsort(rows, stable=True)
    return LocalIds(rows[order], order.astype(jnp.int32), None)


def run(optimizer, rows, seed=0):
    """Return (found, expected): the engine's way, and one row after the other."""
    gradients = np.random.default_rng(seed).normal(size=(len(rows), D)).astype(np.float32)
    table = np.zeros((V, D), np.float32)
    slots = {"accumulators": np.full((V, D), 0.1, np.float32)}
    received = np.array(rows, np.int32), gradients
    found = program(optimizer)(table, slots, *received, jnp.float32(0.5))
    table, accumulators = table.astype(float), slots["accumulators"].astype(float)
    for row, gradient in zip(rows, gradients.astype(float), strict=True):
        if row >= 0:
            accumulators[row] += gradient**2
            table[row] = 0.9 * table[row] - 0.5 * gradient / np.sqrt(accumulators[row])
    return (found.table, found.slots["accumulators"]), (table, accumulators)


ADAGRAD = o.Adagrad(0.5, use_gradient_accumulation=False, weight_decay_factor=0.1)


def check(rows, seed=0):
    for found, expected in zip(*run(ADAGRAD, rows, seed), strict=True):
        # at most twenty updates of a row, each a few roundings of numbers below ten
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=25)
@given(st.lists(st.integers(-1, V - 1), min_size=20, max_size=20), st.integers(0, 9))
def test_every_occurrence_updates_in_order(rows, seed):
    check(rows, seed)


@pytest.mark.parametrize("rows", [[-1] * 20, [3] * 20, [*range(V)] * 2 + [-1] * 6, [3], [-1]])
def test_few_rows_and_one_row(rows):
    check(rows)


def test_a_round_larger_than_a_chunk():
    stack = make_stack([3 * CHUNK], 1, dim=D, optimizer=o.SGD(1.0))
    rows = np.tile(np.arange(2 * CHUNK + 5, dtype=np.int32), 2)
    values = np.arange(rows.size * D, dtype=np.float32).reshape(-1, D)
    held = StackShard(jnp.zeros((stack.num_rows, D)), {})
    ids, values = by_row(jnp.asarray(rows)), jnp.asarray(values)
    done = apply_each(held, ids, values, stack, jnp.int32(1), jnp.float32(1.0))
    expected = np.zeros((stack.num_rows, D), np.float32)
    np.add.at(expected, rows, -values)
    np.testing.assert_array_equal(done.table, expected)
