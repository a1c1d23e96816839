"""Frames, which are tables with named columns, as batches of features.

Data often comes as pandas DataFrames, or as Arrow tables and record batches. Such a frame may stand
where a mapping of features is expected: each feature is the column of its name. Columns that are no
features, such as labels, are left alone.

Neither library is imported here: a frame is known by the names of its class and its base classes.

Input: anything. Output: whether it is a frame; and the columns that are asked for.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

from tpu_embed import _checks

_FRAMES = {("pandas", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}
"""Package and class."""


def is_frame(values: Any) -> bool:
    """Tell whether `values` is a pandas DataFrame, a pyarrow Table or a pyarrow RecordBatch.

    Example:
      >>> import pandas as pd
      >>> is_frame(pd.DataFrame({"user": [1, 2]})), is_frame({"user": [1, 2]})
      (True, False)
    """
    # pyarrow's classes are in pyarrow.lib, pandas' in pandas.core.frame or in pandas.
    classes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(values).__mro__)
    return not _FRAMES.isdisjoint(classes)


def select_columns(frame: Any, names: Iterable[Any]) -> dict[Any, Any]:
    """Return the columns of a frame with these names, as far as it has them.

    A DataFrame whose columns have several levels gives a DataFrame for a name of the first level,
    which matches a nested mapping of features.

    Raises:
      ValueError: several columns have one of the names.
    """
    # A DataFrame lists the names of its columns in `columns`, the Arrow classes in their schema.
    there = frame.schema.names if hasattr(frame, "schema") else frame.columns
    counts = collections.Counter(there) if getattr(there, "nlevels", 1) == 1 else {}
    found = [name for name in names if name in there]
    for name in found:
        if counts.get(name, 1) > 1:
            what, got = f"column {name!r} of a {type(frame).__name__}", f"{counts[name]} of it"
            raise ValueError(_checks.message(what, expected="one column of each name", got=got))
    return {name: frame[name] for name in found}
