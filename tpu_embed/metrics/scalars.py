"""Write nested statistics as named scalars, such as TensorBoard plots them.

Input: nested dicts of numbers. Output: calls of a writer, one for each number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from tpu_embed import _checks


class ScalarWriter(Protocol):
    """An object that writes scalars, such as the `SummaryWriter` of tensorboardX or torch."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """Write one number."""


def write_scalars(writer: ScalarWriter, step: int, statistics: Mapping[str, Any]) -> None:
    """Write every number in nested statistics, tagged by its path such as `tables/films/norm`.

    Other values, such as lists of ids, are skipped. When there are several processes, only one
    should write.

    Args:
      writer: any object with `add_scalar(tag, value, step)`.
      step: the step that the statistics belong to.
      statistics: nested mappings of numbers.

    Example:
      >>> class Printer:
      ...     def add_scalar(self, tag, value, step):
      ...         print(step, tag, value)
      >>> write_scalars(Printer(), 3, {"tables": {"films": {"norm": 4.0}}})
      3 tables/films/norm 4.0
    """
    for tag, value in _scalars(statistics, ""):
        writer.add_scalar(tag, value, step)


def _scalars(nested: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif _checks.is_number(value):
            yield f"{prefix}{name}", value
