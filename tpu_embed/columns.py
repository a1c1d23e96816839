"""Read columns as people have them: of pandas, polars, Arrow, or lists with missing values.

NumPy has no integer that means "missing". pandas and Arrow mark such entries beside the values, and
Python lists hold None or NaN among them. Here a column with missing entries becomes a masked array:
`[7, None, 5]` is the array `[7, …, 5]` with the mask `[False, True, False]`. What is masked among
ids is looked up by nobody: it is padding in a dense array, and left out of a bag.

pandas is never imported here; objects of its come from users who have it. polars and others hand
their columns over by the protocol of Arrow streams (`__arrow_c_stream__`), and pyarrow, which is
imported then, reads them.

Input: arrays, lists, and columns of pandas, Arrow and others. Output: NumPy arrays, masked where
entries are missing; lists of values as one list with the lists' lengths; dictionaries with their
codes.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tpu_embed._checks import refuse


class Lists(NamedTuple):
    """A column of lists: the items of all lists one after another, and the lists' lengths.

    Attributes:
      items: [N], a Python list or an Arrow array, not converted yet.
      lengths: int64 [B].
    """

    items: Any
    lengths: np.ndarray

    @property
    def row_splits(self) -> np.ndarray:
        """int64 [B + 1], where each list begins and ends: lengths 2 0 1 are the splits 0 2 2 3."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)


def read_column(what: str, value: Any) -> np.ndarray:
    """Return a column of numbers or strings as an array, masked where entries are missing.

    Args:
      what: its name, for messages.
      value: an array, a column of pandas, polars or Arrow, or (nested) lists. None, NaN beside
        other values, pandas.NA and NaT are missing.

    Returns:
      The array. Strings of lists, pandas and Arrow are objects; an empty list holds integers.

    Raises:
      ValueError: `value` is nested lists of different lengths.

    Example:
      >>> read_column("x", [7, None, 5]).tolist()
      [7, None, 5]
    """
    if isinstance(value, np.ndarray):
        return _of_array(value)
    arrow = as_arrow(value)
    if arrow is not None:
        return _of_arrow(arrow)
    if _is_of("pandas", value):
        return _of_pandas(value)
    if isinstance(value, (list, tuple, str, bytes)):
        return _of_lists(what, value)
    return np.asarray(value)


def to_array(what: str, value: Any) -> np.ndarray:
    """Return an array, or (nested) lists, as an array; an empty list holds integers.

    Args:
      what: its name, for messages.
      value: in which nothing is missing.

    Raises:
      ValueError: `value` is nested lists of different lengths.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        refuse(
            what,
            expected="an array",
            got="lists of different lengths",
            remedy="from_lists takes one flat list per example",
            cause=error,
        )
    # np.asarray([]) is float64.
    return array if array.size or hasattr(value, "dtype") else array.astype(np.int64)


def read_lists(what: str, value: Any) -> Lists | None:
    """Return a column of lists as `Lists`; None if it is a column of anything else.

    Args:
      what: its name, for messages.
      value: a list of lists, an array of objects or a pandas column that hold lists or arrays, or a
        column of lists of Arrow or polars. A list that is missing is empty.

    Raises:
      TypeError: some entries are lists and others are not.

    Example:
      >>> read_lists("x", [[7, 3], None, [5]]).row_splits.tolist()
      [0, 2, 2, 3]
    """
    arrow = as_arrow(value)
    if arrow is not None:
        return _of_arrow_lists(arrow)
    if not isinstance(value, (list, tuple)):
        # Only objects can be lists; a DataFrame has no dtype of its own.
        if getattr(value, "dtype", None) != np.dtype(object):
            return None
        value = np.asarray(value)
        if value.ndim != 1:
            return None
    first = next((item for item in value if not _is_missing(item)), None)
    if not isinstance(first, (list, tuple)) and getattr(first, "ndim", 0) < 1:
        return None
    return chain_lists(what, [() if _is_missing(item) else item for item in value])


def chain_lists(what: str, lists: Sequence[Sequence[Any]]) -> Lists:
    """Return the items of all lists in one list `[N]`, and the lists' lengths `[B]`.

    Raises:
      TypeError: an item has no length, or `lists` has none.
    """
    try:
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    except TypeError as error:
        # Name the item that has no length; an iterator as a whole has none either.
        items = lists if hasattr(lists, "__len__") else [lists]
        got = next(item for item in items if not hasattr(item, "__len__"))
        refuse(
            what,
            expected="a list of lists",
            got=repr(got),
            error=TypeError,
            cause=error,
        )
    return Lists(list(itertools.chain.from_iterable(lists)), lengths)


def read_dictionary(value: Any) -> tuple[Any, np.ndarray] | None:
    """Return a dictionary-encoded column as its dictionary and codes; None for any other column.

    Args:
      value: anything; Arrow dictionary arrays and categories of pandas and polars are
        dictionary-encoded.

    Returns:
      (dictionary, codes): entry i is `dictionary[codes[i]]`, or missing if `codes[i]` is -1. None
      too if the dictionary is longer than the column: then decoding is less work.
    """
    arrow = as_arrow(value)
    if arrow is not None and hasattr(arrow.type, "index_type"):
        array = _one_chunk(arrow)
        # The indices may be unsigned, so they are widened before -1 stands in for null.
        codes = array.indices.cast("int64").fill_null(-1)
        found = array.dictionary, codes.to_numpy(zero_copy_only=False)
    elif _is_of("pandas", value) and hasattr(
        getattr(value, "dtype", None), "categories"
    ):
        array = getattr(value, "array", value)
        found = array.categories, np.asarray(array.codes, np.int64)
    else:
        return None
    return found if len(found[0]) <= len(found[1]) else None


def mask_missing(values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return values with the missing ones masked, or as they are if none is missing.

    Args:
      values: an array of any dtype.
      missing: bool, in its shape.
    """
    if not missing.any():
        return values
    if values.dtype.kind not in "iu":
        return np.ma.masked_array(values, missing)
    # Should the mask get lost on the user's way, the largest integer is likely to be a bad id.
    most = int(np.iinfo(values.dtype).max)
    return np.ma.masked_array(np.where(missing, most, values), missing, fill_value=most)


def as_arrow(value: Any) -> Any | None:
    """Return a column as an Arrow array, if Arrow's is its form; None for any other.

    Args:
      value: anything; pyarrow's arrays are returned as they are, and those of columns of pandas
        that keep them. What another library hands over as a stream becomes a chunked array.

    Raises:
      ImportError: a column of another library, and pyarrow is not there.
    """
    if (
        _is_of("pyarrow", value)
        and hasattr(value, "type")
        and hasattr(value, "to_numpy")
    ):
        return value
    dtype = getattr(value, "dtype", None)
    in_arrow = (
        hasattr(dtype, "pyarrow_dtype") or getattr(dtype, "storage", None) == "pyarrow"
    )
    if in_arrow and _is_of("pandas", value):
        return getattr(value, "array", value).__arrow_array__()
    streamed = read_stream(value)
    return None if hasattr(streamed, "schema") else streamed


def read_stream(value: Any) -> Any | None:
    """Return what a library other than pandas and pyarrow hands over as a stream of Arrow.

    Args:
      value: an object with `__arrow_c_stream__`: a Series or a DataFrame of polars, a relation of
        DuckDB.

    Returns:
      A column as a pyarrow ChunkedArray, a frame as a Table, in the object's own memory; None for
      anything else.

    Raises:
      ImportError: pyarrow is not there.
      TypeError: pyarrow does not know the type of a column.
    """
    # Arrays and frames of pyarrow need no stream.
    is_other = not _is_of("pandas", value) and not _is_of("pyarrow", value)
    if not (hasattr(value, "__arrow_c_stream__") and is_other):
        return None
    what = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    try:
        import pyarrow
    except ImportError as error:
        refuse(
            what,
            expected="pyarrow, which reads it",
            got="none",
            remedy="pip install pyarrow",
            error=ImportError,
            cause=error,
        )
    # The stream of a frame is one of structs, with a field per column.
    try:
        streamed = pyarrow.chunked_array(value)
    except pyarrow.ArrowException as error:
        refuse(
            what,
            expected="columns of types that pyarrow has",
            got=error,
            remedy="select those of the features",
            error=TypeError,
            cause=error,
        )
    is_frame = pyarrow.types.is_struct(streamed.type)
    return pyarrow.Table.from_struct_array(streamed) if is_frame else streamed


def is_column(value: Any) -> bool:
    """Tell whether a value, other than a list, has the looks of an array or a column."""
    known = hasattr(value, "__array__") or hasattr(value, "__arrow_c_stream__")
    # np.ndarray itself has `__array__`, too.
    return known and not isinstance(value, type)


_TIMES = (datetime.date, datetime.time, datetime.timedelta)
_WITHOUT_TIMES = (
    "times are no ids: give whole numbers, such as the hour of the day, or the days since a first "
    'one, (column - first) // np.timedelta64(1, "D")'
)


def describe_values(values: np.ndarray) -> tuple[str, str]:
    """Return what values are and, if they are times, what to do about them; for messages.

    Args:
      values: an array of any dtype.

    Returns:
      (kind, remedy): "float64" or "objects of datetime, str"; "" without a remedy.

    Example:
      >>> describe_values(np.array(["a", 1, None], object))
      ('objects of int, str', '')
    """
    kind, of_times = str(values.dtype), values.dtype.kind in "mM"
    if values.dtype == object:
        present = [
            one for one in np.ma.compressed(values).tolist() if not _is_missing(one)
        ]
        kind = "objects of " + ", ".join(
            sorted({type(one).__name__ for one in present})
        )
        of_times = any(isinstance(one, _TIMES) for one in present)
    return kind, _WITHOUT_TIMES if of_times else ""


def _is_of(package: str, value: Any) -> bool:
    """Tell whether a value's class, or a class that it inherits from, is defined in a package."""
    return any(
        kind.__module__.partition(".")[0] == package for kind in type(value).__mro__
    )


def _is_missing(value: Any) -> bool:
    """Tell whether a Python object stands for a missing value; NaN is unequal to itself."""
    if value is None:
        return True
    if isinstance(value, (float, np.floating, np.datetime64)):
        return bool(value != value)
    return type(value).__name__ in ("NAType", "NaTType")


def _of_array(array: np.ndarray) -> np.ndarray:
    """Return an array as it is; one of objects as integers, where that is what they are."""
    return _of_objects(array.astype(object)) if array.dtype.kind in "OT" else array


def _of_objects(array: np.ndarray) -> np.ndarray:
    """Return objects that are all integers as integers, with the missing ones masked.

    Other objects stay objects: strings are for hashing, the rest for an error.
    """
    missing, values = np.ma.getmaskarray(array).copy(), np.ma.getdata(array)
    kinds = set(map(type, values.flat))
    odd = {
        kind
        for kind in kinds
        if kind is bool or not issubclass(kind, _STRINGS + _INTEGERS)
    }
    if odd:
        # Only objects of these types are looked at one by one.
        among = np.fromiter(
            map(odd.__contains__, map(type, values.flat)), bool, values.size
        )
        places = [at for at in np.flatnonzero(among) if _is_missing(values.flat[at])]
        missing.flat[places] = True
        if len(places) < np.count_nonzero(among):
            return array
    present = values[~missing]
    if any(issubclass(kind, _STRINGS) for kind in kinds):
        return mask_missing(values, missing)
    return _placed(_of_integers(present), values, missing)


def _placed(present: np.ndarray, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return integers `[n]` at their places among objects: 7 and 5 at 0 and 2 of [7, None, 5]."""
    if present.dtype == object:
        return mask_missing(values, missing)
    filled = np.zeros(values.shape, present.dtype)
    filled[~missing] = present
    return mask_missing(filled, missing)


def _of_integers(objects: np.ndarray) -> np.ndarray:
    """Return integers `[n]` as int64 or uint64; as objects, as they are, if neither holds all."""
    lowest, highest = min(objects, default=0), max(objects, default=0)
    for dtype in (np.int64, np.uint64):
        if lowest >= np.iinfo(dtype).min and highest <= np.iinfo(dtype).max:
            return objects.astype(dtype)
    return objects


_STRINGS, _INTEGERS = (str, bytes), (int, np.integer)


def _of_lists(what: str, value: Any) -> np.ndarray:
    """Return (nested) lists as an array; see `read_column`."""
    # NumPy's strings would drop trailing NULs.
    if isinstance(
        next((one for one in value if not _is_missing(one)), None), (str, bytes)
    ):
        return _of_objects(np.array(value, dtype=object))
    array = to_array(what, value)
    if array.dtype.kind in "iu":
        return array
    # NaN, and integers beyond int64, make floats of the integers beside them.
    objects = _of_objects(np.array(value, dtype=object))
    numbers = array.dtype.kind in "fb" and objects.dtype == object
    return array if numbers and not np.ma.is_masked(objects) else objects


def _of_pandas(value: Any) -> np.ndarray:
    """Return a Series, Index, extension array or DataFrame as an array; see `read_column`."""
    # Int64 and its kin hold NumPy values beside a mask.
    array = getattr(value, "array", value)
    own = getattr(getattr(array, "dtype", None), "numpy_dtype", None)
    if own is not None and own.kind in "iufb":
        return mask_missing(
            array.to_numpy(dtype=own, na_value=0), np.asarray(array.isna())
        )
    return _of_array(np.asarray(value))


def _one_chunk(value: Any) -> Any:
    """Return an Arrow array: a chunked one in one piece."""
    return value.combine_chunks() if hasattr(value, "combine_chunks") else value


def _of_arrow(value: Any) -> np.ndarray:
    """Return an Arrow array of numbers or strings as an array; see `read_column`."""
    import pyarrow.types as kinds

    array = _one_chunk(value)
    if kinds.is_dictionary(array.type):
        kind = str(array.dictionary.type)
        if kind in (
            "string_view",
            "binary_view",
        ):  # of polars; Arrow has no decoding for them
            words = array.dictionary.cast(f"large_{kind.removesuffix('_view')}")
            array = type(array).from_arrays(array.indices, words)
        array = array.dictionary_decode()
    if kinds.is_null(array.type):
        array = array.cast("int64")
    missing = array.is_null().to_numpy(zero_copy_only=False)
    # NumPy would make floats of integers with nulls.
    if kinds.is_integer(array.type):
        array = array.fill_null(0)
    return mask_missing(_of_array(array.to_numpy(zero_copy_only=False)), missing)


def _of_arrow_lists(value: Any) -> Lists | None:
    """Return Arrow lists as `Lists`; None for an Arrow array of anything else."""
    import pyarrow.compute
    import pyarrow.types as kinds

    is_list = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
    if not any(is_one(value.type) for is_one in is_list):
        return None
    array = _one_chunk(value)
    # `flatten` respects slices and skips the items under null lists; `array.values` does neither.
    lengths = pyarrow.compute.call_function("list_value_length", [array]).fill_null(0)
    return Lists(array.flatten(), np.asarray(lengths.to_numpy(), np.int64))
