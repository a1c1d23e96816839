"""What a part of the check has found: what is wrong, where, and figures.

Input: arrays that should agree, or an exception. Output: a `PartReport`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FLOAT32 = 2e-4
"""How far float32 may be from float64: the formulas round 0.999 and 1 - 0.999 to 24 bits, which
alone moves a velocity by 5e-5. Wrong rows or rules differ by far more."""

BFLOAT16 = 2.0**-7
"""Rows of bfloat16 have 8 bits, of which the last may differ where float32 is nearly a tie."""

_LINES, _FAULTS = 12, 8
"""Lines of an exception's message, and faults of a part, that are shown."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
      where: for example "table 'films', Adam, slot 'momenta'".
      expected: what would have been right.
      got: what was found.
      trace: the traceback of an exception, or "".
    """

    where: str
    expected: str
    got: str
    trace: str = ""


@dataclasses.dataclass
class PartReport:
    """What one part found; it fills while the part runs.

    Attributes:
      name: the name of the part.
      seconds: how long it ran.
      what: what was compared or measured, as text; "" if the part did not come to its end.
      faults: what is wrong.
      figures: what was measured, by name.
    """

    name: str
    seconds: float = 0.0
    what: str = ""
    faults: list[Fault] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def explain(self, *, verbose: bool = False) -> str:
        """Return the part as text: a line for the part, and three lines for each fault.

        Args:
          verbose: whether the traceback of an exception is shown.
        """
        state = "ok" if self.ok else "FAILED"
        lines = [f"{self.name:12}{state:8}{self.seconds:6.1f} s  {self.what}".rstrip()]
        for fault in self.faults[:_FAULTS]:
            lines += [f"  {fault.where}", f"    expected {fault.expected}", f"    got {fault.got}"]
            lines += [fault.trace] if verbose and fault.trace else []
        if len(self.faults) > _FAULTS:
            lines.append(f"  and {len(self.faults) - _FAULTS} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the part as an object that JSON can hold."""
        return dataclasses.asdict(self) | {"ok": self.ok}

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
            self.faults.append(Fault(f"{where}, shape", f"{expected.shape}", f"{found.shape}"))
            return
        if tolerance:
            found, right = found.astype(np.float64), expected.astype(np.float64)
            scale = np.abs(right) + 0.01 * np.max(np.abs(right), initial=0.0)
            wrong = ~(np.abs(found - right) <= tolerance * scale)
        else:
            # Bits: the signs of zeros count, and a NaN equals itself.
            wrong = np.not_equal(
                *(np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (found, expected))
            )
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            count = f"{np.count_nonzero(wrong)} of {wrong.size} numbers differ, first at {first}"
            self.faults.append(Fault(f"{where}: {count}", f"{expected[first]}", f"{found[first]}"))

    @contextlib.contextmanager
    def during(self, where: str) -> Iterator[None]:
        """Note an exception, and go on after the block."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = "\n".join(lines[:_LINES] + ["…"] * (len(lines) > _LINES))
            frames = traceback.extract_tb(error.__traceback__)
            frame = next(one for one in reversed(frames) if one.name != "refuse")
            got = f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
            trace = "".join(traceback.format_exception(error))
            self.faults.append(Fault(where, "no exception", got, trace))
