"""Rows and sums of rows that are rounded to bfloat16 where they are made, to be sent so.

On a TPU with SparseCores the kernel that reads rows, or adds them up, rounds them in the memory of
its subcore, so nothing but words of two numbers is written. Everywhere else XLA rounds what the
kernels of `dispatch.py` return. Both give the same bits.

Input: rows in float32. Output: rows or sums in bfloat16, in the format in which they are sent.
"""

from __future__ import annotations

import jax.numpy as jnp

from tpu_embed._types import Array
from tpu_embed.kernels import dispatch
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import RowsToSum, SumLayout
from tpu_embed.kernels.sparsecore import LONGEST


def read_rows(
    array: Array, row_ids: Array, row_format: RowFormat, sent: RowFormat
) -> Array:
    """Return rows of a float32 table rounded to bfloat16, zeros where one is absent.

    Args:
      array: the table, in `row_format`.
      row_ids: integer `[N]`.
      row_format: how the rows lie in the array.
      sent: the format of the result.

    Returns:
      `[N, …]`, rows as `sent.pack_rounded` returns them.
    """

    def in_steps(array, row_ids):
        read = dispatch.read_rows(array, row_ids, row_format)
        return sent.pack_rounded(row_format.unpack(read))

    def in_kernel(array, row_ids):
        from tpu_embed.kernels import sparsecore_rows

        return sparsecore_rows.gather_rounded_rows(
            row_format.by_row(array), row_ids, sent.words
        )

    # The kernel reads whole rows of words; longer ones are cut into pieces by `gather_rows` only.
    fits = row_format.packed and row_format.words <= LONGEST
    sparse = in_kernel if fits and row_format.moved_by_sparse_cores else None
    return dispatch.choose(array, row_ids, otherwise=in_steps, sparse=sparse)


def gather_sum(rows: RowsToSum, layout: SumLayout, sent: RowFormat) -> Array:
    """Return sums of rows, each rounded to bfloat16; see `reference.gather_sum`.

    Args:
      rows: rows of float.
      layout: one feature.
      sent: the format of the result.

    Returns:
      `[n, …]`, rows as `sent.pack_rounded` returns them.
    """

    def in_steps(rows):
        (sums,) = dispatch.gather_sum(rows, layout)
        return sent.pack_rounded(sums)

    def in_kernel(rows):
        from tpu_embed.kernels import sparsecore_sums

        return sparsecore_sums.sum_rounded_rows(rows, layout, sent)

    # A very long row is summed in pieces, but a word has numbers from both halves of a row.
    fits = sent.packed and rows.source.shape[1] <= LONGEST
    able = fits and sent.packing == "words" and rows.source.dtype == jnp.float32
    return dispatch.choose(rows, otherwise=in_steps, sparse=in_kernel if able else None)
