"""Batches whose ids are all their number, and an engine that gives the number back."""

import functools
import itertools
import threading
import time

import jax
import numpy as np
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed.optimizers import SGD

ROWS, SIZE = 64, 4
"""Of the table; of a batch."""


@functools.cache
def engine():
    """Return an engine whose row r is [r, r]."""
    table = TableConfig(ROWS, 2, initializer=tpu_embed.initializers.RowIdInitializer())
    return tpu_embed.EmbeddingEngine({"x": FeatureConfig(table)}, SGD(0.5), mesh=mesh(2))


@functools.cache
def state():
    return engine().init(jax.random.key(0))


def batch(number):
    """Return features whose ids are all `number`, modulo the rows."""
    return {"x": np.full(SIZE, number % ROWS, np.int32)}


def source(count):
    """Yield `count` batches with their numbers; without a count, endlessly."""
    for number in itertools.count() if count is None else range(count):
        yield batch(number), number


def number_of(placed):
    """Return the number of a placed batch, which is what its ids are."""
    return int(engine().lookup(state(), placed)["x"][0, 0])


LONG = 60
"""Seconds after which a thread that waits has a deadlock."""


def threads():
    return [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def wait_for(condition):
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    assert condition()
