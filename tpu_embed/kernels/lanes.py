"""Rows that share lines of 128 words, read and written by a TPU's TensorCores.

Enters: lines, row numbers and the words of a row, a power of two below 128. Leaves: rows, or the
lines with some rows set. Called by `dispatch` for `RowFormat.in_lines`.

Lines are gathered and scattered whole, as TensorCores do it well. A line that is written has its
other rows from before.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_embed._types import PADDING_ID, Array
from tpu_embed.kernels import reference
from tpu_embed.kernels.formats import LINE


def gather_rows(lines: Array, rows: Array, words: int) -> Array:
    """Return rows, zeros where one is absent.

    Args:
      lines: `[L, 128]`.
      rows: integer `[N]`.
      words: of a row.

    Returns:
      `[N, words]`.
    """
    a_line = LINE // words
    found = reference.gather_rows(lines, _lines_of(rows, a_line, lines.shape[0]))
    place = (rows % a_line)[:, None]
    chosen = jnp.zeros((rows.shape[0], words), lines.dtype)
    for i in range(a_line):
        chosen = jnp.where(place == i, found[:, i * words : (i + 1) * words], chosen)
    return chosen


def set_rows(lines: Array, rows: Array, values: Array) -> Array:
    """Return the lines with `values` at `rows`; absent rows are not written.

    Args:
      lines: `[L, 128]`.
      rows: integer `[U]`; present ones ascending, none twice, and no two of them farther apart in
        `rows` than their numbers are.
      values: `[U, words]`, in the dtype of the lines.
    """
    words, a_line = values.shape[1], LINE // values.shape[1]
    line, place = _lines_of(rows, a_line, lines.shape[0]), (rows % a_line)[:, None]
    wide = jnp.concatenate([values] * a_line, axis=1)
    lane = jnp.arange(LINE) // words
    new = reference.gather_rows(lines, line)
    for shift in range(1 - a_line, a_line):
        same = (_shifted(line, shift, -1) == line)[:, None]
        here = same & (_shifted(place, shift, -1) == lane) & (line >= 0)[:, None]
        new = jnp.where(here, _shifted(wide, shift, 0), new)
    return reference.set_rows(lines, jnp.where(_first(line, a_line), line, PADDING_ID), new)


def _first(line: Array, a_line: int) -> Array:
    """Tell, bool `[U]`, where a line comes for the first time."""
    first = line >= 0
    for shift in range(1, a_line):
        first &= _shifted(line, -shift, -1) != line
    return first


def _lines_of(rows: Array, a_line: int, lines: int) -> Array:
    """Return the line of every row, `PADDING_ID` where a row is absent."""
    absent = (rows < 0) | (rows >= lines * a_line)
    return jnp.where(absent, jnp.asarray(PADDING_ID, rows.dtype), rows // a_line)


def _shifted(x: Array, by: int, outside: int) -> Array:
    """Return x with entry i + by at entry i, `outside` where there is none."""
    n = x.shape[0]
    edge = jnp.full((min(abs(by), n), *x.shape[1:]), outside, x.dtype)
    if by >= 0:
        return jnp.concatenate([x[by:], edge])
    return jnp.concatenate([edge, x[: max(0, n + by)]])
