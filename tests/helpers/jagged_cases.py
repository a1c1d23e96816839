"""Jagged sequences of known values, for tests: lengths, a maker and a reader."""

import jax.numpy as jnp
import numpy as np

from tpu_embed import Jagged

S, N, C, D, LONGEST = 2, 3, 13, 2, 4  # N examples on each of S replicas; C >= N * LONGEST
B = S * N
FULL = [LONGEST] * B
SOME = [2, 0, 3, 0, 0, 4]


def make(lengths, seed=0, capacity=C, shape=(D,)):
    """Return a `Jagged` of quarters, whose sums are exact; NaN where no method may read."""
    lengths = np.reshape(lengths, (-1, N))
    splits = np.concatenate([np.zeros((len(lengths), 1)), lengths.cumsum(1)], 1).astype(np.int32)
    rng = np.random.default_rng(seed)
    values = (rng.integers(-40, 40, (len(lengths), capacity, *shape)) / 4).astype(np.float32)
    for part, ends in zip(values, splits[:, -1], strict=True):
        part[ends:] = np.nan
    return Jagged(jnp.asarray(values), jnp.asarray(splits))


def rows_of(jagged):
    """Return the values of each example, in the order of the batch."""
    pairs = zip(np.asarray(jagged.values), np.asarray(jagged.row_splits), strict=True)
    return [values[splits[e] : splits[e + 1]] for values, splits in pairs for e in range(N)]
