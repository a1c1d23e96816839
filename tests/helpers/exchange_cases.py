"""A training step with the exchange in bfloat16 as NumPy loops in float32, to compare bits with.

Bags are weighted sums, and the rule is SGD with a rate of a power of two, so every product and sum
is rounded once, in the order that the guide promises.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

RATE = np.float32(0.5)


def rounded(x):
    """Return float32 numbers rounded to bfloat16, to nearest even."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def looked_up(table, ids, weights, *, rounds):
    """Return activations `[B, D]` of ids `[B, H]`, where -1 is padding.

    Args:
      table: float32 `[V, D]`.
      ids: integers `[B, H]`.
      weights: float32 `[B, H]`.
      rounds: whether rows are rounded before they are weighted.
    """
    rows = rounded(table) if rounds else table
    found = np.zeros((len(ids), table.shape[1]), np.float32)
    for example, bag in enumerate(ids):
        for place, row in enumerate(bag):
            if row >= 0:
                found[example] = found[example] + rows[row] * weights[example, place]
    return found


def stepped(table, uses, *, blocks, rounds):
    """Return the table after one step of SGD with the rate `RATE`.

    Args:
      table: float32 `[V, D]`.
      uses: (ids `[B, H]`, weights `[B, H]`, gradients `[B, D]`) of each feature of the table, all
        of one batch size.
      blocks: G.
      rounds: whether each (row, block) partial sum is rounded.
    """
    partials, size = {}, len(uses[0][0])
    for example in range(size):
        for ids, weights, gradients in uses:
            for place, row in enumerate(ids[example]):
                if row >= 0:
                    of_row = partials.setdefault(int(row), {})
                    block = example * blocks // size
                    sum_so_far = of_row.get(block, np.zeros(table.shape[1], np.float32))
                    of_row[block] = sum_so_far + gradients[example] * weights[example, place]
    new = table.copy()
    for row, of_row in partials.items():
        total = np.zeros(table.shape[1], np.float32)
        for block in sorted(of_row):
            total = total + (rounded(of_row[block]) if rounds else of_row[block])
        new[row] = table[row] - RATE * total
    return new
