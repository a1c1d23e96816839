"""Where every logical row lives: stacks of tables, MOD / DIV / replicated placement, padding.

Enters: the resolved tables, in table order. Leaves: one `Stack` a stack, computed once and never
written back into the configs. Called by `resolve.py` when an engine is made; everything after it
only reads the `Layout`.

A stack is one physical array `[S * R, D]`, sharded over its first axis in S contiguous blocks of R
rows; for a TPU its rows are packed (`kernels/formats.py`). Row r of a table whose
first local row is `offset`, and which owns rows_per_shard = ceil(V / S) local rows, lives at

    MOD:  (r mod S) * R + offset + r div S
    DIV:  (r div rows_per_shard) * R + offset + r mod rows_per_shard

A replicated table is a MOD table with S = 1.
"""

from __future__ import annotations

import math

ROW_MULTIPLE = 64
"""Rows that an initializer or an optimizer's rule makes are padded to a multiple of this.

Vectorised loops then have no remainder, whose rounding could differ from the body's.
"""


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `n`, and at least `multiple`."""
    return max(1, -(-n // multiple)) * multiple


def bucket(n: int) -> int:
    """Round up so that at most one part in eight is padding: eight sizes an octave.

    Example:
      >>> [bucket(n) for n in (0, 7, 9, 100, 1000)]
      [0, 8, 9, 104, 1024]
    """
    if n == 0:
        return 0
    step = max(1, 2 ** max(0, n.bit_length() - 4))
    return max(8, -(-n // step) * step)


def roomy(n: int) -> int:
    """Return a bucket with room for the next batches.

    A count of n independent draws varies by about √n from batch to batch; twice that is added.

    Example:
      >>> [roomy(n) for n in (0, 20, 1000, 100_000)]
      [0, 28, 1152, 106496]
    """
    return bucket(n + 2 * math.isqrt(n))
