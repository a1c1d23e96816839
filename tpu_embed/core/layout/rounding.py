"""Round sizes up, so that arrays of similar sizes have the same static shape.

A compiled program depends on the shapes of its arrays. If the number of ids in a batch were used
as it is, nearly every batch would need a program of its own; rounded up to one of a few sizes
("buckets"), batches share programs, at the cost of some padding.

Input: a number of rows or ids. Output: the size of the array that holds them.
"""

from __future__ import annotations

import math

ROW_MULTIPLE = 64
"""The number of rows in one call of an initializer or an optimizer's rule is a multiple of this.

Vectorised loops then have no remainder, in which rounding could differ from the loop's body.
"""


def round_up(n: int, multiple: int) -> int:
    """Return the least positive multiple of `multiple` that is at least `n`."""
    # -(-n // m) is n / m rounded up.
    return max(1, -(-n // multiple)) * multiple


def bucket(n: int) -> int:
    """Return `n` rounded up so that about one part in eight is padding at most.

    There are eight sizes between each power of two and the next: 64, 72, 80, …, 120, 128.

    Example:
      >>> [bucket(n) for n in (0, 7, 9, 100, 1000)]
      [0, 8, 9, 104, 1024]
    """
    if n == 0:
        return 0
    # 100 has 7 bits, so 64 <= n < 128, and the step is 2**(7 - 4) = 64 / 8 = 8.
    step = max(1, 2 ** max(0, n.bit_length() - 4))
    return max(8, -(-n // step) * step)


def roomy(n: int) -> int:
    """Return a bucket that has room for the next batches too.

    A count that is n in one batch varies by about √n from batch to batch, so 2√n is added.

    Example:
      >>> [roomy(n) for n in (0, 20, 1000, 100_000)]
      [0, 28, 1152, 106496]
    """
    return bucket(n + 2 * math.isqrt(n))
