"""Containers for the ids of a feature whose bags differ in length: COO and ragged rows.

They only hold host arrays; `ids.host_ids` judges them, where the feature's path and table are
known. Arrays pass from Python lists, scipy, JAX and Arrow through the constructors, which import
their library when called.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tpu_embed import _checks

__all__ = ["RaggedIds", "SparseIds", "refuse_masked", "to_array"]


@dataclasses.dataclass(frozen=True, eq=False)
class SparseIds:
    """Hold ids as coordinates, entry i the id `values[i]` at `indices[i]`; the last dim is the bag.

    Args:
      indices: [N, 2] integers (example, position), sorted by example, then position, none twice;
        [N, rank] for many bags an example.
      values: [N] ids; floats when the container stands in `weights=`.
      dense_shape: (B, H), or (B, K, …, H) for many bags an example.
      weights: [N], or None for all ones.

    Example:
      >>> ids = SparseIds([[0, 0], [0, 1], [2, 0]], [7, 3, 5], dense_shape=(3, 2))
      >>> ids.values.tolist(), ids.dense_shape
      ([7, 3, 5], (3, 2))
    """

    indices: Any
    values: Any
    dense_shape: tuple[int, ...]
    weights: Any = None

    def __post_init__(self) -> None:
        indices, shape = to_array("SparseIds.indices", self.indices), np.asarray(self.dense_shape)
        if shape.ndim != 1:
            expected, got = "(B, H), or (B, K, ..., H)", repr(self.dense_shape)
            raise ValueError(_checks.message("SparseIds.dense_shape", expected=expected, got=got))
        if not indices.size and indices.ndim < 2:
            indices = indices.reshape(0, len(shape))
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "values", to_array("SparseIds.values", self.values))
        sizes = tuple(
            _checks.check_int(f"SparseIds.dense_shape[{i}]", n, minimum=0)
            for i, n in enumerate(shape.tolist())
        )
        object.__setattr__(self, "dense_shape", sizes)
        if self.weights is not None:
            object.__setattr__(self, "weights", to_array("SparseIds.weights", self.weights))

    @classmethod
    def from_lists(
        cls,
        bags: Sequence[Sequence[int]],
        *,
        width: int | None = None,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> SparseIds:
        """Return the ids of one list an example, the position in the list as column.

        Args:
          bags: B lists of ids.
          width: H of `dense_shape`. None: the longest list's length, at least 1.
          weights: B lists of the same lengths, or None.

        Raises:
          ValueError: a list of weights has another length than its bag.

        Example:
          >>> SparseIds.from_lists([[7, 3], [], [5]]).indices.tolist()
          [[0, 0], [0, 1], [2, 0]]
        """
        ragged = RaggedIds.from_lists(bags, weights=weights)
        lengths = np.diff(ragged.row_splits)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        columns = np.arange(len(rows)) - np.repeat(ragged.row_splits[:-1], lengths)
        longest = int(lengths.max(initial=1))
        shape = (len(lengths), longest if width is None else width)
        return cls(np.stack([rows, columns], axis=1), ragged.values, shape, ragged.weights)

    @classmethod
    def from_scipy(cls, ids: Any, *, weights: Any = None) -> SparseIds:
        """Return the stored entries of a scipy sparse [B, H] matrix, whose data are the ids.

        An id 0 must be a stored entry: scipy drops zeros when it makes a matrix from a dense one.
        For a multi-hot matrix [B, V], whose columns are the ids, see `RaggedIds.from_multi_hot`.

        Args:
          ids: scipy sparse matrix or array of rank 2, any format, integer data.
          weights: the same with weights as data, its entries at the same places; or None.

        Raises:
          ValueError: `weights` has entries elsewhere.

        Example:
          >>> import scipy.sparse
          >>> matrix = scipy.sparse.coo_array(([5, 7], ([1, 0], [0, 2])), shape=(2, 3))
          >>> SparseIds.from_scipy(matrix).values.tolist()
          [7, 5]
        """
        indices, values = _scipy_entries(ids)
        if weights is None:
            return cls(indices, values, tuple(ids.shape))
        places, data = _scipy_entries(weights)
        if weights.shape != ids.shape or not np.array_equal(places, indices):
            raise ValueError(
                _checks.message(
                    "SparseIds.from_scipy: weights",
                    expected="entries where the ids are",
                    got="others",
                )
            )
        return cls(indices, values, tuple(ids.shape), data)

    @classmethod
    def from_bcoo(cls, ids: Any) -> SparseIds:
        """Return the entries of a `jax.experimental.sparse.BCOO` [B, …, H], whose data are the ids.

        Args:
          ids: BCOO without batch or dense dims; its padding (indices outside the shape) is left
            out.

        Raises:
          ValueError: `ids` has batch or dense dims.

        Example:
          >>> import jax.experimental.sparse as jsparse, jax.numpy as jnp
          >>> ids = jsparse.BCOO((jnp.array([4, 9]), jnp.array([[0, 0], [1, 2]])), shape=(2, 3))
          >>> SparseIds.from_bcoo(ids).values.tolist()
          [4, 9]
        """
        if ids.n_batch or ids.n_dense:
            got = f"{ids.n_batch} and {ids.n_dense}"
            expected = "a BCOO without batch and dense dims"
            raise ValueError(_checks.message("SparseIds.from_bcoo", expected=expected, got=got))
        indices, values = np.asarray(ids.indices), np.asarray(ids.data)
        inside = (indices < np.asarray(ids.shape)).all(axis=1)
        return cls(*_sorted(indices[inside], values[inside]), tuple(ids.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedIds:
    """Hold bags of any length: bag i is `values[row_splits[i] : row_splits[i + 1]]`.

    Args:
      values: [N] ids; floats when the container stands in `weights=`.
      row_splits: [B + 1] integers, from 0 to N, never falling.
      weights: [N], or None for all ones.

    Example:
      >>> RaggedIds([7, 3, 5], [0, 2, 2, 3]).row_splits.tolist()
      [0, 2, 2, 3]
    """

    values: Any
    row_splits: Any
    weights: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", to_array("RaggedIds.values", self.values))
        object.__setattr__(self, "row_splits", to_array("RaggedIds.row_splits", self.row_splits))
        if self.weights is not None:
            object.__setattr__(self, "weights", to_array("RaggedIds.weights", self.weights))

    @classmethod
    def from_lists(
        cls, bags: Sequence[Sequence[int]], *, weights: Sequence[Sequence[float]] | None = None
    ) -> RaggedIds:
        """Return the ids of one list an example.

        Args:
          bags: B lists of ids.
          weights: B lists of the same lengths, or None.

        Raises:
          ValueError: a list of weights has another length than its bag.

        Example:
          >>> RaggedIds.from_lists([[7, 3], [], [5]]).row_splits.tolist()
          [0, 2, 2, 3]
        """
        values, lengths = _chained("RaggedIds.from_lists", bags)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if weights is None:
            return cls(values, splits)
        numbers, counts = _chained("RaggedIds.from_lists: weights", weights)
        _check_lengths("RaggedIds.from_lists", counts, lengths)
        return cls(values, splits, numbers)

    @classmethod
    def from_multi_hot(cls, matrix: Any) -> RaggedIds:
        """Return the bags of a scipy sparse [B, V] matrix: columns are ids, data their weights.

        Args:
          matrix: scipy sparse matrix or array of rank 2, any format.

        Example:
          >>> import scipy.sparse
          >>> bags = RaggedIds.from_multi_hot(scipy.sparse.csr_array([[0, 2.0, 1.0], [0, 0, 0]]))
          >>> bags.values.tolist(), bags.row_splits.tolist(), bags.weights.tolist()
          ([1, 2], [0, 2, 2], [2.0, 1.0])
        """
        indices, data = _scipy_entries(matrix)
        counts = np.bincount(indices[:, 0], minlength=matrix.shape[0])
        return cls(indices[:, 1], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), data)

    @classmethod
    def from_arrow(cls, bags: Any, *, weights: Any = None) -> RaggedIds:
        """Return the ids of a pyarrow list array; a null list is an empty bag.

        Args:
          bags: ListArray, LargeListArray, FixedSizeListArray, or a ChunkedArray of them, of
            integers; may be a slice.
          weights: the same of numbers, with lists of the same lengths; or None.

        Raises:
          TypeError: not a list array.
          ValueError: an id is null, or a list of weights has another length than its bag.

        Example:
          >>> import pyarrow
          >>> RaggedIds.from_arrow(pyarrow.array([[7, 3], None, [5]])).row_splits.tolist()
          [0, 2, 2, 3]
        """
        values, lengths = _arrow_lists(bags)
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if weights is None:
            return cls(values, splits)
        numbers, counts = _arrow_lists(weights)
        _check_lengths("RaggedIds.from_arrow", counts, lengths)
        return cls(values, splits, numbers)


def to_array(what: str, value: Any) -> np.ndarray:
    """Return `value` as a NumPy array; an empty list as integers.

    Raises:
      TypeError: a masked array.
      ValueError: lists of different lengths.
    """
    refuse_masked(what, value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        remedy = "from_lists takes a flat list an example"
        expected, got = "an array", "lists of different lengths"
        raise ValueError(
            _checks.message(what, expected=expected, got=got, remedy=remedy)
        ) from error
    return array if array.size or hasattr(value, "dtype") else array.astype(np.int64)


def refuse_masked(what: str, value: Any) -> None:
    """Refuse a NumPy masked array, whose mask would be lost.

    Raises:
      TypeError: it is one.
    """
    if isinstance(value, np.ma.MaskedArray):
        got, remedy = "a masked array", "fill it: ids with -1, weights with 0"
        raise TypeError(_checks.message(what, expected="an array", got=got, remedy=remedy))


def _chained(what: str, lists: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    try:
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    except TypeError as error:
        items = lists if hasattr(lists, "__len__") else [lists]
        got = next(item for item in items if not hasattr(item, "__len__"))
        expected = "a list of lists"
        raise TypeError(_checks.message(what, expected=expected, got=repr(got))) from error
    return to_array(what, list(itertools.chain.from_iterable(lists))), lengths


def _check_lengths(what: str, counts: np.ndarray, lengths: np.ndarray) -> None:
    if np.array_equal(counts, lengths):
        return
    if len(counts) != len(lengths):
        expected, got = f"{len(lengths)} lists", f"{len(counts)}"
    else:
        row = int(np.argmax(counts != lengths))
        expected, got = f"{lengths[row]} weights for bag {row}", f"{counts[row]}"
    raise ValueError(_checks.message(f"{what}: weights", expected=expected, got=got))


def _scipy_entries(matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    entries = matrix.tocoo()
    return _sorted(np.stack([entries.row, entries.col], axis=1).astype(np.int64), entries.data)


def _sorted(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.lexsort(indices.T[::-1])
    return indices[order], values[order]


def _arrow_lists(lists: Any) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow
    import pyarrow.compute

    if isinstance(lists, pyarrow.ChunkedArray):
        lists = lists.combine_chunks()
    kinds = (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray)
    if not isinstance(lists, kinds):
        got = str(getattr(lists, "type", type(lists).__name__))
        expected = "a pyarrow array of lists"
        raise TypeError(_checks.message("RaggedIds.from_arrow", expected=expected, got=got))
    values = lists.flatten()  # of the slice only, without what lies under null lists
    if values.null_count:
        raise ValueError(
            _checks.message(
                "RaggedIds.from_arrow",
                expected="no null inside a list",
                got=f"{values.null_count}",
                remedy='fill them with -1 and set on_bad_id="drop"',
            )
        )
    lengths = pyarrow.compute.call_function("list_value_length", [lists]).fill_null(0)
    return values.to_numpy(zero_copy_only=False), np.asarray(lengths.to_numpy(), np.int64)
