"""A trial of one kernel: what it is given, and what must come out.

Input: a function and arrays. Output: a `Trial`, which `kernels.py` runs on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Trial(NamedTuple):
    """A kernel, what it is given, and what must come out.

    Attributes:
      kernel: a function of the operands.
      operands: arrays.
      right: what each result is, and its right value.
      tolerance: as for `Findings.compare`.
    """

    kernel: Callable[..., Any]
    operands: Sequence[Any]
    right: Sequence[tuple[str, np.ndarray]]
    tolerance: float = 0
