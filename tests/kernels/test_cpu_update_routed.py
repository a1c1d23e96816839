"""The compiled update of ids that the host has routed, and of jagged features."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from kernel_cases import assert_same_bits, magnitudes, update_of
from update_cases import (
    RULES,
    STARTS,
    UPDATE_BAGS,
    UPDATE_PERIODS,
    R,
    compiled,
    draw_update,
    expected_update,
)

from tpu_embed.kernels import cpu, reference

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
    # By row, and then in batch order; a partial sum is a run of equal rows and blocks.
    present = np.flatnonzero((rows >= 0) & (rows < R))
    order = present[np.argsort(rows[present], kind="stable")]
    runs = np.stack([rows[order], np.searchsorted(STARTS, bags[order], side="right")])
    first = np.concatenate([[True], np.any(np.diff(runs), axis=0)])
    whole, merged = np.unique(runs[0, first], return_inverse=True)
    sums, merged = (first.cumsum() - 1).astype(np.int32), merged.astype(np.int32)
    # Bag b gets the number anew[b].
    anew = rng.permutation(UPDATE_BAGS).astype(np.int32)
    joined = np.asarray(reference.join_features(gradients, UPDATE_PERIODS))
    renumbered = (joined[np.argsort(anew)],)
    options = {"bags": (1,), "periods": UPDATE_BAGS, "rounds": rounds}
    run = functools.partial(update_of, rule=rule, **options)
    routed = whole.astype(np.int32), anew[bags[order]], weights[order], renumbered, sums, merged
    found = jax.jit(run)(table, slots, *routed)
    assert_same_bits(found, expected_update(table, slots, given, rule, STARTS, rounds))


def test_places_are_numbered_after_the_bags():
    """Gradients of jagged features, beside bags, give what one array of all gradients gives."""
    rng, rule = np.random.default_rng(13), compiled(RULES["adagrad"])
    table, slots, (rows, _, weights, gradients) = draw_update(rng, RULES["adagrad"], 20, "float32")
    # In the order of the features: 2 bags in a period, 30 places, none, 1 bag, 9 places.
    bags, places = (2, 0, 0, 1, 0), (0, 30, 0, 0, 9)
    jagged = [magnitudes(rng, (n, 20)) for n in (30, 0, 9)]
    apart = gradients[0], *jagged[:2], gradients[1], jagged[2]
    joined = np.asarray(reference.join_features(gradients, UPDATE_PERIODS))
    targets = np.sort(rng.integers(0, UPDATE_BAGS + 39, len(rows))).astype(np.int32)
    options = {"bags": bags, "periods": UPDATE_PERIODS, "places": places}
    run = functools.partial(update_of, rule=rule, blocks=STARTS, **options)
    found = jax.jit(run)(table, slots, rows, targets, weights, apart)
    whole = rows, targets, weights, (np.concatenate([joined, *jagged]),)
    assert_same_bits(found, expected_update(table, slots, whole, rule, STARTS))
