"""Rows that share lines, compared with the reference on one row per line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed.kernels import dispatch, lanes, reference
from tpu_embed.kernels.formats import RowFormat

ROWS = 64
WORDS = (32, 64)
FORMS = {words: RowFormat((words,), np.dtype(np.float32), "lanes") for words in WORDS}
TABLES = {
    words: np.random.default_rng(words).normal(size=(ROWS, words)).astype(np.float32)
    for words in WORDS
}
gather = jax.jit(lanes.gather_rows, static_argnums=2)
write = jax.jit(dispatch.write_rows, static_argnames="row_format")
write_ascending = jax.jit(dispatch.write_ascending_rows, static_argnames="row_format")


def lines(words):
    return jnp.asarray(TABLES[words].reshape(-1, 128))


@given(st.sampled_from(WORDS), st.lists(st.integers(-2, ROWS + 2), min_size=12, max_size=12))
def test_rows_are_read(words, rows):
    rows = jnp.asarray(rows, jnp.int32)
    wanted = reference.gather_rows(jnp.asarray(TABLES[words]), rows)
    np.testing.assert_array_equal(gather(lines(words), rows, words), wanted)


def check_written(write, words, rows):
    rows = np.asarray(rows, np.int32)
    values = np.arange(12 * words, dtype=np.float32).reshape(12, words)
    found = write(lines(words), jnp.asarray(rows), jnp.asarray(values), row_format=FORMS[words])
    wanted, present = TABLES[words].copy(), (rows >= 0) & (rows < ROWS)
    wanted[rows[present]] = values[present]
    np.testing.assert_array_equal(np.asarray(found).reshape(ROWS, words), wanted)


@given(st.sampled_from(WORDS), st.permutations(range(-3, ROWS + 3)))
def test_rows_are_written_in_any_order(words, rows):
    check_written(write, words, rows[:12])


def test_a_repeated_row_costs_no_other_row():
    rows = jnp.array([4] * 20 + [5], jnp.int32)
    values = jnp.ones((21, 32)).at[20].set(7)
    found = np.asarray(write(lines(32), rows, values, row_format=FORMS[32])).reshape(ROWS, 32)
    assert (found[4] == 1).all()
    assert (found[5] == 7).all()


@given(st.sampled_from(WORDS), st.sets(st.integers(0, ROWS - 1), max_size=12))
def test_ascending_rows_are_written(words, rows):
    check_written(write_ascending, words, [*sorted(rows), *[-1] * (12 - len(rows))])


@given(st.sampled_from(WORDS), st.integers(0, ROWS - 12), st.sets(st.integers(0, 11)))
def test_rows_in_their_places_are_written_around_absent_ones(words, first, absent):
    check_written(write_ascending, words, [-1 if i in absent else first + i for i in range(12)])


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0])
@pytest.mark.quick(1)
def test_the_other_rows_of_a_line_keep_their_bits(value):
    table = jnp.full((8, 128), value)
    new = jax.jit(lanes.set_rows)(table, jnp.array([3]), jnp.ones((1, 32)))
    bits = np.asarray(new).reshape(32, 32).view(np.uint32)
    assert np.all(np.delete(bits, 3, axis=0) == np.float32(value).view(np.uint32))
