"""SparseCore kernels on four workers at once: nothing is read or written out of turn."""

import functools

import bfloat16_cases
import jax.numpy as jnp
import numpy as np
import pytest
from sparsecore_interpreter import CHUNK, RACES, WORKERS, compiled, found_races

from tpu_embed import optimizers as o
from tpu_embed.kernels import sparsecore_rows, sparsecore_sums, sparsecore_update
from tpu_embed.kernels.formats import RowFormat

ENTRIES, SUMS, ROWS, DIM = 5 * CHUNK, 40, 50, 16
"""Workers with one chunk and with two; the interpreter takes a millisecond for each vector."""
NUMBERS = np.arange(ENTRIES, dtype=np.int32)
SEGMENTS = {
    "segments of two": NUMBERS // 2,
    "a segment over three workers": np.digitize(NUMBERS, [12, 60]).astype(np.int32),
}
pytestmark = pytest.mark.whole


def rows_of(seed, count=ROWS):
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", SEGMENTS)
def test_sums(name):
    source, index, segments = rows_of(0), NUMBERS[::-1] % ROWS, SEGMENTS[name]
    run = functools.partial(sparsecore_sums.gather_sum, num_segments=SUMS)
    found = np.asarray(compiled(run, source, index, segments, late=RACES)(source, index, segments))
    assert not found_races()
    expected = np.zeros((segments.max() + 1, DIM))
    np.add.at(expected, segments, source[index])
    np.testing.assert_allclose(found[: len(expected)], expected, atol=1e-5)


@pytest.mark.parametrize("name", SEGMENTS)
def test_updates(name):
    optimizer, rate, sums = o.Momentum(0.5, momentum=0.0), np.float32(0.5), rows_of(1, ENTRIES)
    table, slot, segments = rows_of(2), np.zeros((ROWS, DIM), np.float32), SEGMENTS[name]
    rows = np.random.default_rng(3).permutation(ROWS)[:SUMS].astype(np.int32)
    rows[segments.max() + 1 :] = -1

    def run(sums, table, slot, rate):
        rule = optimizer.compiled_rule(jnp.int32(1), rate)
        route = (jnp.asarray(x) for x in (NUMBERS, segments, rows))
        return sparsecore_update.merge_update(sums, *route, table, [slot], rule, DIM, None)

    operands = sums, table, slot, rate
    found, (moved,) = compiled(run, *operands, late=RACES)(*operands)
    assert not found_races()
    expected = np.zeros((ROWS, DIM))
    np.add.at(expected, rows[segments], sums)
    np.testing.assert_allclose(moved, expected, atol=1e-5)
    np.testing.assert_allclose(found, table - 0.5 * expected, atol=1e-5)


def test_rounded_rows():
    table, ids = rows_of(4), (NUMBERS * 7 % ROWS).astype(np.int32)
    sent = RowFormat((DIM,), np.dtype(jnp.bfloat16), "words")
    run = functools.partial(sparsecore_rows.gather_rounded_rows, words=sent.words)
    found = compiled(run, table, ids, late=RACES)(table, ids)
    assert not found_races()
    np.testing.assert_array_equal(found, bfloat16_cases.packed(table[ids], sent.words))


def test_a_race_is_found(monkeypatch):
    """Two workers that write the same row, as they would with wrong bounds."""
    monkeypatch.setattr(
        sparsecore_sums,
        "worker_bounds",
        lambda segments, workers, count: jnp.asarray([0, 40, 80, 80, *[80] * 16], jnp.int32),
    )
    run = functools.partial(sparsecore_sums.gather_sum, num_segments=SUMS)
    segments = NUMBERS * 0
    operands = rows_of(0), NUMBERS % ROWS, segments
    compiled(run, *operands, late=RACES)(*operands)
    assert WORKERS == 4
    assert found_races()
