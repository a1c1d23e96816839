"""The compiled update of ids that the host has routed, and of jagged features."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from kernel_cases import assert_same_bits, update_of
from update_cases import (
    COUNTS,
    RULES,
    STARTS,
    UPDATE_BAGS,
    R,
    compiled,
    draw_update,
    expected_update,
)

from tpu_embed.kernels import cpu

if cpu.load().path is None:
    pytest.skip(f"compiled library: {cpu.load().why_not}", allow_module_level=True)


@pytest.mark.parametrize(
    ("name", "rounds"), [("adagrad", False), ("rowwise", False), ("adagrad", True)]
)
def test_routed_entries_tell_their_partial_sums(name, rounds):
    """Their blocks are the partial sums of their route, however the bags are numbered."""
    rng, rule = np.random.default_rng(12), compiled(RULES[name])
    table, slots, given = draw_update(rng, RULES[name], 20, "float32")
    rows, bags, weights, gradients = given
    # By row, and then by block; a partial sum is a run of equal rows and blocks.
    present = np.flatnonzero((rows >= 0) & (rows < R))
    # Counted through both features, bags 0 to 6 and 100 to 102 are in block 0.
    first_bags = np.where(bags[:, None] < COUNTS[0], *map(np.array, STARTS))
    block = (bags[:, None] >= first_bags).sum(axis=1)
    order = present[np.lexsort((block[present], rows[present]))]
    runs = np.stack([rows[order], block[order]])
    first = np.concatenate([[True], np.any(np.diff(runs), axis=0)])
    whole, merged = np.unique(runs[0, first], return_inverse=True)
    sums, merged = (first.cumsum() - 1).astype(np.int32), merged.astype(np.int32)
    # Bag b gets the number anew[b].
    anew = rng.permutation(UPDATE_BAGS).astype(np.int32)
    joined = np.concatenate(gradients)
    renumbered = (joined[np.argsort(anew)],)
    options = {"bags": (UPDATE_BAGS,), "rounds": rounds}
    run = functools.partial(update_of, rule=rule, **options)
    routed = whole.astype(np.int32), anew[bags[order]], weights[order], renumbered, sums, merged
    found = jax.jit(run)(table, slots, *routed)
    assert_same_bits(found, expected_update(table, slots, given, rule, STARTS, rounds))
