"""What a part of the check has found: what is wrong, where, and figures.

Input: arrays that should agree, or an exception. Output: `Findings`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FLOAT32 = 2e-4
"""How far float32 may be from float64: the formulas round 0.999 and 1 - 0.999 to 24 bits, which
alone moves a velocity by 5e-5. Wrong rows or rules differ by far more."""

BFLOAT16 = 2.0**-7
"""Rows of bfloat16 have 8 bits, of which the last may differ where float32 is nearly a tie."""

_LINES = 12
"""Lines of an exception's message that are shown."""


class Fault(NamedTuple):
    """One thing that is wrong.

    Attributes:
      where: for example "table 'Adam', slot 'momenta'".
      expected: what would have been right.
      got: what was found.
      trace: the traceback of an exception, or "".
    """

    where: str
    expected: str
    got: str
    trace: str = ""


class Findings:
    """The findings of one part, collected while it runs.

    Attributes:
      faults: what is wrong.
      figures: what was measured, by name.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.figures: dict[str, float] = {}

    def add(self, where: str, expected: Any, got: Any) -> None:
        """Note something wrong."""
        self.faults.append(Fault(where, str(expected), str(got)))

    def compare(
        self, where: str, expected: np.ndarray, got: Any, *, tolerance: float = FLOAT32
    ) -> None:
        """Note where two arrays differ.

        Args:
          where: what is compared.
          expected: the right numbers.
          got: an array, of NumPy or JAX, of any float dtype; integers are compared as they are.
          tolerance: the largest difference, relative to the number or, for small numbers, to the
            hundredth part of the largest; 0: the bits must be the same.
        """
        found = np.asarray(got)
        if found.shape != expected.shape:
            self.add(f"{where}, shape", expected.shape, found.shape)
            return
        if tolerance:
            found, right = found.astype(np.float64), expected.astype(np.float64)
            scale = np.abs(right) + 0.01 * np.max(np.abs(right), initial=0.0)
            wrong = ~(np.abs(found - right) <= tolerance * scale)
        else:
            right = expected
            # Signs of zeros count, and a NaN equals itself.
            wrong = _bits(found) != _bits(right)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            count = f"{np.count_nonzero(wrong)} of {wrong.size} numbers differ, first at {first}"
            self.add(f"{where}: {count}", right[first], found[first])

    @contextlib.contextmanager
    def during(self, where: str) -> Iterator[None]:
        """Note an exception, and go on after the block."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = "\n".join(lines[:_LINES] + ["…"] * (len(lines) > _LINES))
            frame = traceback.extract_tb(error.__traceback__)[-1]
            got = f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
            trace = "".join(traceback.format_exception(error))
            self.faults.append(Fault(where, "no exception", got, trace))


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
