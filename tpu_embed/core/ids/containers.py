"""Two ways to write down bags of different lengths: coordinates (COO) and ragged rows.

The bags [7, 3], [] and [5] are, as coordinates, the ids 7, 3, 5 at (0, 0), (0, 1), (2, 0); as
ragged rows, the ids 7, 3, 5 with the row splits 0, 2, 2, 3. The containers only hold the arrays.
`host_ids.py` validates them, because it knows the feature's path and table for the messages.

Input: arrays and columns, or what the constructors convert: Python lists, scipy, BCOO and Arrow.
Output: NumPy arrays inside a container; ids that are missing are masked (see `columns.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tpu_embed._checks import check_int, refuse
from tpu_embed.columns import (
    Lists,
    as_arrow,
    chain_lists,
    read_column,
    read_lists,
    to_array,
)


@dataclasses.dataclass(frozen=True, eq=False)
class SparseIds:
    """Hold ids by coordinates: entry i says that `values[i]` stands at `indices[i]`.

    The last coordinate is the position in a bag; those before it say which bag.

    Args:
      indices: [N, 2] integers (example, position), sorted by example, then by position, without
        duplicates; [N, rank] for many bags per example.
      values: [N] ids, or strings for `hash_ids`; floats when the container is given as `weights=`.
        An array, a list, or a column of pandas, polars or Arrow. What is missing among them, or
        masked, leaves its bag like an id that `on_bad_id="drop"` drops.
      dense_shape: (B, H), or (B, K, …, H) for many bags per example.
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
        indices, shape = (
            _unmasked("SparseIds.indices", self.indices),
            np.asarray(self.dense_shape),
        )
        if shape.ndim != 1:
            refuse(
                "SparseIds.dense_shape",
                expected="(B, H), or (B, K, ..., H)",
                got=repr(self.dense_shape),
            )
        # No entries at all: an empty list has shape [0], but `indices` must be [0, rank].
        if not indices.size and indices.ndim < 2:
            indices = indices.reshape(0, len(shape))
        sizes = tuple(
            check_int(f"SparseIds.dense_shape[{i}]", n, minimum=0)
            for i, n in enumerate(shape.tolist())
        )
        _store(self, indices=indices, dense_shape=sizes)

    @classmethod
    def from_lists(
        cls,
        bags: Sequence[Sequence[Any]],
        *,
        width: int | None = None,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> SparseIds:
        """Return the ids of one list per example; an id's column is its position in the list.

        Args:
          bags: B lists of ids, or of strings for `hash_ids`; None among them is missing.
          width: H of `dense_shape`. None: the length of the longest list, at least 1.
          weights: B lists of the same lengths, or None.

        Raises:
          ValueError: a list of weights is not as long as its bag.

        Example:
          >>> SparseIds.from_lists([[7, 3], [], [5]]).indices.tolist()
          [[0, 0], [0, 1], [2, 0]]
        """
        ragged = RaggedIds.from_lists(bags, weights=weights)
        lengths = np.diff(ragged.row_splits)
        # Lengths 2 0 1: examples 0 0 2.
        rows = np.repeat(np.arange(len(lengths)), lengths)
        indices = np.stack([rows, positions_in_rows(ragged.row_splits)], axis=1)
        width = int(lengths.max(initial=1)) if width is None else width
        return cls(indices, ragged.values, (len(lengths), width), ragged.weights)

    @classmethod
    def from_scipy(cls, ids: Any, *, weights: Any = None) -> SparseIds:
        """Return the stored entries of a scipy sparse [B, H] matrix, whose data are the ids.

        The id 0 must be a stored entry: scipy drops zeros when it converts a dense matrix. For a
        multi-hot matrix [B, V], whose columns are the ids, see `RaggedIds.from_multi_hot`.

        Args:
          ids: scipy sparse matrix or array of rank 2, any format, integer data.
          weights: a sparse matrix of the weights, with entries at the same places; or None.

        Raises:
          ValueError: the entries of `weights` are at other places than those of `ids`.

        Example:
          >>> import scipy.sparse
          >>> matrix = scipy.sparse.coo_array(([5, 7], ([1, 0], [0, 2])), shape=(2, 3))
          >>> SparseIds.from_scipy(matrix).values.tolist()
          [7, 5]
        """
        indices, values = _scipy_entries(ids)
        data = None
        if weights is not None:
            # Both lists of entries are sorted, so equal places stand at equal positions.
            places, data = _scipy_entries(weights)
            if weights.shape != ids.shape or not np.array_equal(places, indices):
                refuse(
                    "SparseIds.from_scipy: weights",
                    expected="entries where the ids are",
                    got="others",
                )
        return cls(indices, values, tuple(ids.shape), data)

    @classmethod
    def from_bcoo(cls, ids: Any) -> SparseIds:
        """Return the entries of a `jax.experimental.sparse.BCOO` [B, …, H], whose data are the ids.

        Args:
          ids: BCOO without batch or dense dims. Its padding (entries whose indices are outside
            the shape) is left out.

        Raises:
          ValueError: `ids` has batch or dense dims.

        Example:
          >>> import jax.experimental.sparse as jsparse, jax.numpy as jnp
          >>> ids = jsparse.BCOO((jnp.array([4, 9]), jnp.array([[0, 0], [1, 2]])), shape=(2, 3))
          >>> SparseIds.from_bcoo(ids).values.tolist()
          [4, 9]
        """
        if ids.n_batch or ids.n_dense:
            refuse(
                "SparseIds.from_bcoo",
                expected="a BCOO without batch and dense dims",
                got=f"{ids.n_batch} and {ids.n_dense}",
            )
        indices, values = np.asarray(ids.indices), np.asarray(ids.data)
        # BCOO fills unused entries with indices equal to the shape: (3, 2) in a matrix [3, 2].
        inside = (indices < np.asarray(ids.shape)).all(axis=1)
        return cls(*_sorted(indices[inside], values[inside]), tuple(ids.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class RaggedIds:
    """Hold bags of any length: bag i is `values[row_splits[i] : row_splits[i + 1]]`.

    Args:
      values: [N] ids, or strings for `hash_ids`; floats when the container is given as `weights=`.
        An array, a list, or a column of pandas, polars or Arrow. What is missing among them, or
        masked, leaves its bag like an id that `on_bad_id="drop"` drops.
      row_splits: [B + 1] integers, from 0 to N, non-decreasing.
      weights: [N], or None for all ones.

    Example:
      >>> RaggedIds([7, 3, 5], [0, 2, 2, 3]).row_splits.tolist()
      [0, 2, 2, 3]
    """

    values: Any
    row_splits: Any
    weights: Any = None

    def __post_init__(self) -> None:
        _store(self, row_splits=_unmasked("RaggedIds.row_splits", self.row_splits))

    @classmethod
    def from_lists(
        cls,
        bags: Sequence[Sequence[Any]],
        *,
        weights: Sequence[Sequence[float]] | None = None,
    ) -> RaggedIds:
        """Return the ids of one list per example.

        Args:
          bags: B lists of ids, or of strings for `hash_ids`; None among them is missing.
          weights: B lists of the same lengths, or None.

        Raises:
          ValueError: a list of weights is not as long as its bag.

        Example:
          >>> RaggedIds.from_lists([[7, 3], [], [5]]).row_splits.tolist()
          [0, 2, 2, 3]
        """
        return cls(*_read_bags("RaggedIds.from_lists", chain_lists, bags, weights))

    @classmethod
    def from_multi_hot(cls, matrix: Any) -> RaggedIds:
        """Return the bags of a scipy sparse [B, V] matrix: columns are ids, data are their weights.

        Args:
          matrix: scipy sparse matrix or array of rank 2, any format.

        Example:
          >>> import scipy.sparse
          >>> bags = RaggedIds.from_multi_hot(scipy.sparse.csr_array([[0, 2.0, 1.0], [0, 0, 0]]))
          >>> bags.values.tolist(), bags.row_splits.tolist(), bags.weights.tolist()
          ([1, 2], [0, 2, 2], [2.0, 1.0])
        """
        # Entries in the rows 0 0 2, which are sorted: row r begins where r would, at 0 2 2 3.
        indices, data = _scipy_entries(matrix)
        splits = np.searchsorted(indices[:, 0], np.arange(matrix.shape[0] + 1))
        return cls(indices[:, 1], splits, data)

    @classmethod
    def from_arrow(cls, bags: Any, *, weights: Any = None) -> RaggedIds:
        """Return the ids of a pyarrow list array; a null list is an empty bag.

        Args:
          bags: ListArray, LargeListArray, FixedSizeListArray, or a ChunkedArray of them, of
            integers, or of strings for `hash_ids`; may be a slice. A null in a list is missing.
          weights: such an array of numbers, with lists of the same lengths; or None.

        Raises:
          TypeError: `bags` or `weights` is not a list array.
          ValueError: a list of weights is not as long as its bag.

        Example:
          >>> import pyarrow
          >>> RaggedIds.from_arrow(pyarrow.array([[7, 3], None, [5]])).row_splits.tolist()
          [0, 2, 2, 3]
        """
        return cls(*_read_bags("RaggedIds.from_arrow", _arrow_lists, bags, weights))


def read_ids(what: str, value: Any) -> np.ndarray | SparseIds | RaggedIds:
    """Return one feature's ids as an array, masked where ids are missing, or as a container.

    Args:
      what: their name, for messages.
      value: an array, a container, or a column of a data set: a list, a Series of pandas or polars,
        an Arrow array. Columns of lists become `RaggedIds`.

    Raises:
      TypeError: some entries are lists and others are not.

    Example:
      >>> read_ids("x", [[7, 3], [], [5]]).row_splits.tolist()
      [0, 2, 2, 3]
    """
    if values_of(value) is not value:
        return value
    bags = read_lists(what, value)
    return (
        read_column(what, value)
        if bags is None
        else RaggedIds(bags.items, bags.row_splits)
    )


def positions_in_rows(row_splits: np.ndarray) -> np.ndarray:
    """Return the position of every id in its row, int64 `[N]`; the splits are `[R + 1]`."""
    # Splits 0 2 2 3: positions 0 1 2 - 0 0 2 = 0 1 0.
    splits = row_splits.astype(np.int64, copy=False)
    return np.arange(splits[-1]) - np.repeat(splits[:-1], np.diff(splits))


def values_of(ids: Any) -> Any:
    """Return the values of a container; an array as it is."""
    return ids.values if isinstance(ids, (SparseIds, RaggedIds)) else ids


def refuse_masked(what: str, value: Any) -> None:
    """Refuse a NumPy masked array, because its mask would be lost.

    Raises:
      TypeError: `value` is a masked array.
    """
    if isinstance(value, np.ma.MaskedArray):
        refuse(
            what,
            expected="an array",
            got="a masked array",
            remedy="fill it: ids with -1, weights with 0",
            error=TypeError,
        )


def _unmasked(what: str, value: Any) -> np.ndarray:
    refuse_masked(what, value)
    return to_array(what, value)


def _store(ids: SparseIds | RaggedIds, **fields: Any) -> None:
    """Set fields of a container that is being made, and those that both kinds have."""
    kind = type(ids).__name__
    fields["values"] = read_column(f"{kind}.values", ids.values)
    if ids.weights is not None:
        fields["weights"] = _unmasked(f"{kind}.weights", ids.weights)
    for name, value in fields.items():
        object.__setattr__(ids, name, value)


def _read_bags(
    what: str, read: Callable[[str, Any], Lists], bags: Any, weights: Any
) -> tuple[Any, np.ndarray, Any]:
    """Return the ids of bags `[N]`, their row splits `[B + 1]`, and their weights `[N]` or None.

    Raises:
      ValueError: a list of weights is not as long as its bag.
    """
    found = read(what, bags)
    if weights is None:
        return found.items, found.row_splits, None
    what = f"{what}: weights"
    scales = read(what, weights)
    counts, lengths = scales.lengths, found.lengths
    if not np.array_equal(counts, lengths):
        expected, got = f"{len(lengths)} lists", len(counts)
        if len(counts) == len(lengths):
            row = (counts != lengths).argmax()
            expected, got = f"{lengths[row]} weights for bag {row}", counts[row]
        refuse(what, expected=expected, got=got)
    return found.items, found.row_splits, scales.items


def _scipy_entries(matrix: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted indices `[N, 2]` and the data `[N]` of a scipy sparse matrix."""
    entries = matrix.tocoo()
    return _sorted(
        np.stack([entries.row, entries.col], axis=1).astype(np.int64), entries.data
    )


def _sorted(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # lexsort sorts by its last key first. The columns go in reverse, so that the example is the
    # first key and the position in the bag decides between entries of one example.
    order = np.lexsort(indices.T[::-1])
    return indices[order], values[order]


def _arrow_lists(what: str, lists: Any) -> Lists:
    """Return the lists of a pyarrow list array.

    Raises:
      TypeError: it is none.
    """
    found = None if as_arrow(lists) is None else read_lists(what, lists)
    if found is None:
        refuse(
            what,
            expected="a pyarrow array of lists",
            got=getattr(lists, "type", type(lists).__name__),
            error=TypeError,
        )
    return found
