"""Frames, which are tables with named columns, as batches of features.

Data often comes as DataFrames of pandas or polars, or as Arrow tables and record batches. Such a
frame may stand where a mapping of features is expected: each feature is the column of its name.
Columns that are no features, such as labels, are left alone.

Frames of pandas and pyarrow are known by the names of their class and its base classes, so that
neither library is imported here. Any other one is read as an Arrow stream (`columns.py`).

Input: anything. Output: the frame that it is, or None; and the columns that are asked for.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from tpu_embed import _checks, columns

_FRAMES = {("pandas", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}
"""Package and class."""


def as_frame(values: Any) -> Any | None:
    """Return a frame as one of pandas or pyarrow; None for anything else.

    Args:
      values: a pandas DataFrame, a pyarrow Table or RecordBatch is returned as it is; a frame of
        another library, such as polars, as a pyarrow Table.

    Raises:
      ImportError: a frame of another library, and pyarrow is not there.

    Example:
      >>> import pandas as pd
      >>> as_frame(pd.DataFrame({"user": [1, 2]})).shape, as_frame({"user": [1, 2]})
      ((2, 1), None)
    """
    # pyarrow's classes are in pyarrow.lib, pandas' in pandas.core.frame or in pandas.
    classes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(values).__mro__)
    if not _FRAMES.isdisjoint(classes):
        return values
    streamed = columns.read_stream(values)
    return streamed if hasattr(streamed, "schema") else None


def select_columns(values: Any, names: Iterable[Any]) -> Any:
    """Return the columns of a frame with these names, as far as it has them; other values as such.

    A DataFrame whose columns have several levels gives a DataFrame for a name of the first level,
    which matches a nested mapping of features.

    Raises:
      ValueError: several columns have one of the names.
      ImportError: as for `as_frame`.
    """
    frame = as_frame(values)
    if frame is None:
        return values
    # A DataFrame lists the names of its columns in `columns`, the Arrow classes in their schema.
    there = frame.schema.names if hasattr(frame, "schema") else frame.columns
    counts = collections.Counter(there) if getattr(there, "nlevels", 1) == 1 else {}
    found = [name for name in names if name in there]
    for name in found:
        if counts.get(name, 1) > 1:
            what, got = f"column {name!r} of a {type(frame).__name__}", f"{counts[name]} of it"
            raise ValueError(_checks.message(what, expected="one column of each name", got=got))
    return {name: frame[name] for name in found}
