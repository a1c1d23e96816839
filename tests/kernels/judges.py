"""Checks that `sanitized_calls.py` makes on results."""

import bfloat16_cases
import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed.kernels import storage


def same_as(meaning):
    """Return a judge: the bits of `meaning`, where operands are valid."""
    meaning = jax.jit(meaning)

    def judge(found, operands, valid):
        if valid:
            for got, wanted in zip(found, jax.tree.leaves(meaning(*operands)), strict=True):
                np.testing.assert_array_equal(got, wanted)

    return judge


def gradient_sums(rows, ids, bags, weights, gradients, options):
    """Return the sums `[rows, D]`, by blocks of bags in ascending order, and which are touched."""
    counts, starts, rounds = options.values()

    def rounded(sums):
        return storage.widened(bfloat16_cases.rounded(sums)) if rounds else sums

    flat, ends = np.concatenate(gradients), np.cumsum(counts)
    found = {}
    for i, row in enumerate(ids):
        bag = i if bags is None else int(bags[i])
        if not (0 <= row < rows and 0 <= bag < len(flat)):
            continue
        feature = int(np.searchsorted(ends, bag, side="right"))
        block = sum(bag >= start for start in starts[feature]) if starts else 0
        weight = np.float32(1) if weights is None else weights[i]
        parts = found.setdefault(int(row), {})
        part = parts.setdefault(block, np.zeros(flat.shape[1], np.float32))
        part += flat[bag] * weight if weight else 0
    totals, touched = np.zeros((rows, flat.shape[1]), np.float32), np.zeros(rows, bool)
    for row, parts in found.items():
        touched[row] = True
        for block in sorted(parts):
            totals[row] = totals[row] + rounded(parts[block])
    return totals, touched


def update_judge(optimizer, options):
    """Return a judge of updates: untouched rows to the bit, others where operands are valid."""
    rule = jax.jit(optimizer.update_rows)

    def judge(found, operands, valid):
        draws, table, slots, *given = operands
        if len(given) > 4:  # routed, by numbers without a meaning: only the sanitizers judge
            return
        with np.errstate(all="ignore"):
            sums, touched = gradient_sums(len(table), *given, options)
        names = optimizer.compiled_rule(jnp.int32(3), jnp.float32(0.1)).slots
        for got, was in zip(found, [table, *(slots[name] for name in names)], strict=True):
            np.testing.assert_array_equal(got[~touched], was[~touched])
        if valid:
            rows, new = rule(storage.widened(table), slots, sums, jnp.int32(3), jnp.float32(0.1))
            for got, wanted in zip(found, [rows, *(new[name] for name in names)], strict=True):
                # bfloat16 has 8 bits, and at random either neighbour is right; XLA may round once
                # where the kernel rounds twice.
                close = 1e-4 if got.dtype == np.float32 else 2.0**-7 if draws is None else 2.0**-6
                got, wanted = storage.widened(got)[touched], wanted[touched]
                np.testing.assert_allclose(got, wanted, rtol=close, atol=1e-5)

    return judge
