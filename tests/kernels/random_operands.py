"""Valid and invalid operands for `sanitized_calls.py`."""

import jax.numpy as jnp
import numpy as np

from tpu_embed.kernels import storage
from tpu_embed.kernels.stochastic import Draws, RowPlaces
from tpu_embed.optimizers import FTRL, SGD, Adagrad, Adam, Momentum, RowWiseAdagrad

RULES = [
    lambda **o: SGD(0.1, **o),
    lambda **o: Momentum(0.1, use_nesterov=bool(o.get("clipvalue")), **o),
    lambda **o: Adagrad(0.1, **o),
    lambda **o: RowWiseAdagrad(0.1, **o),
    lambda **o: Adam(0.1, sum_inside_sqrt=bool(o.get("clipvalue")), **o),
    lambda **o: FTRL(0.1, l1_regularization_strength=0.1, l2_regularization_strength=0.1, **o),
]
OPTIONS = [
    {},
    {"clipvalue": (-0.5, None)},
    {"clip_weight_min": -1.0, "clip_weight_max": 0.5, "weight_decay_factor": 0.01},
]


def draw_size(rng):
    """Return a number of ids: mostly few, now and then enough for a parallel sort."""
    return int(rng.integers(16_385, 40_000) if rng.random() < 0.15 else rng.integers(1, 400))


def draw_ids(rng, n, rows, dtype):
    """Return ids in and around [0, rows), a fifth of them far outside."""
    limits = np.iinfo(dtype)
    wild = rng.choice(np.array([limits.min, limits.max, limits.min + 1, -rows, rows], dtype), n)
    return np.where(rng.random(n) < 0.2, wild, rng.integers(-1, rows + 1, n).astype(dtype))


def draw_numbers(rng, shape, *, tame, zeros=0.0):
    """Return float32 numbers; unless tame, with infinities and NaN among them."""
    numbers = rng.normal(size=shape).astype(np.float32)
    numbers[rng.random(shape) < zeros] = 0
    if not tame:
        wild = np.array([np.inf, -np.inf, np.nan, 3e38, 1e-45], np.float32)
        numbers = np.where(rng.random(shape) < 0.2, rng.choice(wild, shape), numbers)
    return numbers


def draw_table(rng, rows, dim, dtype, *, tame):
    table = jnp.asarray(draw_numbers(rng, (rows, dim), tame=tame))
    return np.asarray(storage.encode(table, dtype))


def draw_bags(rng, n, bags, *, tame):
    """Return bags in ascending order; unless tame, in any order and far outside."""
    drawn = draw_ids(rng, n, bags, np.int32) if not tame else rng.integers(0, bags + 1, n)
    drawn = drawn.astype(np.int32)
    return np.sort(drawn) if tame or rng.random() < 0.5 else drawn


def draw_optimizer(rng):
    """Return one of the rules that the kernels know, with its options."""
    return RULES[rng.integers(len(RULES))](**OPTIONS[rng.integers(len(OPTIONS))])


def draw_places(rng, rows):
    """Return which rows of one to three tables the local rows are, by any steps."""
    count = int(rng.integers(1, min(4, rows + 1)))
    firsts = (0, *np.sort(rng.choice(np.arange(1, rows), count - 1, replace=False)).tolist())
    steps = rng.integers(-(2**40), 2**40, count + 1).tolist()
    return RowPlaces(firsts, tuple(steps[1:]), steps[0])


def draw_draws(rng, places, rows, *, numbered):
    """Return what random bits depend on, the shard as `[1]`; `numbered`: a number of each row."""
    tables, shard = (rng.integers(0, 2**32, n, np.uint32) for n in (len(places.firsts), 1))
    numbers = rng.integers(0, 2**32, rows, np.uint32) if numbered else None
    return Draws(tables, shard, numbers)
