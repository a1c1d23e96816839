"""Read and write rows that share lines of 128 words, on a TPU's TensorCores.

TensorCores gather and scatter whole lines well, but not parts of them. So a read gathers lines and
picks the rows out; a write gathers lines, replaces the rows in them, and scatters the lines.

Input: lines `[L, 128]`, row numbers, and the words of a row, a power of two below 128. Output:
rows, or the lines with some rows set.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.kernels import reference
from tpu_embed.kernels.formats import LINE


def gather_rows(lines: Array, row_ids: Array, words: int) -> Array:
    """Return rows, zeros where one is absent.

    Args:
      lines: `[L, 128]`.
      row_ids: integer `[N]`.
      words: the words of a row.

    Returns:
      `[N, words]`.
    """
    # With rows of 32 words a line has 4: row 6 is in line 1, in place 2, that is words 64 to 95.
    a_line = LINE // words
    found = reference.gather_rows(lines, _lines_of(row_ids, a_line, lines.shape[0]))
    place = (row_ids % a_line)[:, None]
    # Each of the (at most 4) places is a static slice [N, words]; every entry selects one of them.
    chosen = jnp.zeros((row_ids.shape[0], words), lines.dtype)
    for i in range(a_line):
        chosen = jnp.where(place == i, found[:, i * words : (i + 1) * words], chosen)
    return chosen


def set_rows(lines: Array, row_ids: Array, values: Array) -> Array:
    """Return the lines with `values` at `row_ids`; absent rows are not written.

    Args:
      lines: `[L, 128]`.
      row_ids: integer `[U]`; present ones ascend, none occurs twice, and if two of them are k
        positions apart, their numbers differ by at least k.
      values: `[U, words]`, in the dtype of the lines.
    """
    # Rows (5, 6, 9) of 32 words: lines (1, 1, 2), places (1, 2, 1). `wide` repeats each row's
    # values in all 4 places of a line, and `lane` is the place of each of the 128 words.
    words, a_line = values.shape[1], LINE // values.shape[1]
    line, place = (
        _lines_of(row_ids, a_line, lines.shape[0]),
        (row_ids % a_line)[:, None],
    )
    wide = jnp.concatenate([values] * a_line, axis=1)
    lane = jnp.arange(LINE)[None] // words
    new = reference.gather_rows(lines, line)
    # Rows of one line are at most a_line - 1 positions apart, because of the condition on
    # `row_ids`. So every entry looks that far to both sides, and takes over the values of its own
    # line: after this, the entries of rows 5 and 6 are both the whole new line 1.
    for shift in range(1 - a_line, a_line):
        same = (_shifted(line, shift, -1) == line)[:, None]
        here = same & (_shifted(place, shift, -1) == lane) & (line >= 0)[:, None]
        new = jnp.where(here, _shifted(wide, shift, 0), new)
    # Of several equal copies of a line one is written, because `set_rows` wants different rows.
    return reference.set_rows(
        lines, jnp.where(_first(line, a_line), line, PADDING_ID), new
    )


def _first(line: Array, a_line: int) -> Array:
    """Return where a line occurs for the first time, bool `[U]`."""
    first = line >= 0
    for shift in range(1, a_line):
        first &= _shifted(line, -shift, -1) != line
    return first


def _lines_of(row_ids: Array, a_line: int, lines: int) -> Array:
    """Return the line of every row, `PADDING_ID` where a row is absent."""
    absent = (row_ids < 0) | (row_ids >= lines * a_line)
    return jnp.where(absent, jnp.asarray(PADDING_ID, row_ids.dtype), row_ids // a_line)


def _shifted(x: Array, by: int, outside: int) -> Array:
    """Return an array whose entry i is x[i + by], or `outside` where x has no such entry."""
    # (a, b, c) by 1: (b, c, outside); by -1: (outside, a, b).
    n = x.shape[0]
    edge = jnp.full((min(abs(by), n), *x.shape[1:]), outside, x.dtype)
    if by >= 0:
        return jnp.concatenate([x[by:], edge])
    return jnp.concatenate([edge, x[: max(0, n + by)]])
