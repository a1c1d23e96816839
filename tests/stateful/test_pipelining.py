"""Which updates a batch sees, written by hand for every kind of loop.

The table starts at zero and is trained by SGD of rate 1; the gradient of batch k is 2^k. So an
activation is minus the sum of 2^k over the updates it has seen, which identifies them exactly.

A trace has one word per call: `e` enqueues the next training batch, `i` the next inference batch,
`d` dequeues, `a` applies. The expectation lists the updates that each dequeued batch sees.
"""

import functools

import jax
import numpy as np
import pytest
from facade_cases import make_embedding_of

import tpu_embed
from tpu_embed import optimizers as o

TABLE = tpu_embed.TableConfig(4, 2, jax.nn.initializers.zeros, name="t")
IDS = np.array([2, 1, 2, -1])
FULL = np.array([[1], [1], [1], [0]], np.float32)
"""Ones for the examples whose id is a row, which row 2 counts twice."""


def _make_embedding(pipelined):
    options = {"pipeline_execution_with_tensor_core": pipelined}
    return make_embedding_of(tpu_embed.FeatureConfig(TABLE), o.SGD(1.0), **options)


@functools.cache
def _engine():
    return _make_embedding(pipelined=False).engine


def _embedding(pipelined):
    embedding = _make_embedding(pipelined)
    embedding.engine = _engine()
    return embedding


def _expected(seen):
    """Return the activation [4, 2] that has seen these updates."""
    total = -float(sum(2**k for k in seen))
    return np.repeat(FULL * np.float32([[2], [1], [2], [0]]) * np.float32(total), 2, axis=1)


def _run(embedding, trace):
    """Run a trace; return the activations in order of dequeue."""
    enqueued, dequeued, found = 0, 0, []
    for word in trace.split():
        if word in "ei":
            enqueued += 1
            embedding.enqueue(IDS, training=word == "e")
        elif word == "d":
            dequeued += 1
            found.append(np.asarray(embedding.dequeue()))
        else:
            embedding.apply_gradients(np.full((4, 2), 2.0**dequeued, np.float32))
    return found


EVERY = [(), (1,), (1, 2), (1, 2, 3)]
STALE = [(), (), (1,), (1, 2)]

TRACES = {
    "in turn": ("e d a e d a e d a e d a", EVERY, EVERY),
    "one ahead": ("e e d a e d a e d a d a", EVERY, STALE),
    "all at once": ("e e e e d a d a d a d a", EVERY, STALE),
    "enqueued between dequeue and apply": ("e d e a d e a d e a d a", EVERY, STALE),
    "one ahead, then in turn": ("e e d a d a e d a e d a", EVERY, [(), (), (1, 2), (1, 2, 3)]),
    "in turn, then ahead": ("e d a e d a e e d a d a", EVERY, [(), (1,), (1, 2), (1, 2)]),
    "ahead, between": ("e d e a e d a e d a d a", EVERY, STALE),
    "inference between": ("e i e e d a d d a d a", [(), (1,), (1,), (1, 3)], [(), (), (1,), (1,)]),
    "inference first": ("i e e d d a d a", [(), (), (2,)], [(), (), ()]),
    "inference last": ("e e i d a d a d", [(), (1,), (1, 2)], [(), (), (1,)]),
    "inference in turn": ("e d a i d e d a", [(), (1,), (1,)], [(), (1,), (1,)]),
}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("case", TRACES)
@pytest.mark.quick(7)
def test_which_updates_are_seen(case, pipelined):
    """Pipelined, a loop that enqueues ahead is one step old."""
    trace, *expected = TRACES[case]
    found = _run(_embedding(pipelined), trace)
    np.testing.assert_array_equal(found, [_expected(seen) for seen in expected[pipelined]])


@pytest.mark.parametrize("pipelined", [False, True])
def test_pipelined_or_not_the_tables_are_the_same(pipelined):
    embedding = _embedding(pipelined)
    _run(embedding, TRACES["all at once"][0])
    total = -np.float32(2 + 4 + 8 + 16)
    expected = np.float32([[0], [1], [2], [0]]) * total
    np.testing.assert_array_equal(embedding.retrieve()[0]["t"], np.repeat(expected, 2, axis=1))
    assert int(embedding.state.step) == 4
