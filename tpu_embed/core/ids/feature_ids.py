"""The checked ids of one feature: their static shape, and the two layouts that they come in.

Users give ids in many ways; the rest of the package knows only two. Dense ids are an array
`[B, bags, H]` in which -1 is padding. Flat ids are an array `[N]` in batch order without padding,
beside an array that says which bag each id belongs to. The bags [7, 3], [] and [5] are

    dense:  ids [[[7, 3]], [[-1, -1]], [[5, -1]]]
    flat:   ids [7, 3, 5], bags [0, 0, 2]

Input: a feature's config, and the shape of its ids. Output: `FeatureShape` and `HostIds`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpu_embed.config import FeatureConfig
from tpu_embed.core.ids.bad_ids import FeatureRules


@dataclasses.dataclass(frozen=True)
class FeatureShape:
    """The static shape of one feature of a batch; hashable.

    Args:
      batch: B, number of examples.
      inner: the activation's shape between B and D: () for one bag per example, (K, …) for many,
        (L,) for a sequence.
      combines: whether the ids of a bag are combined. False: every id has a bag of its own, and
        its weight scales its row (rank-1 ids, sequences, ragged rows that keep their first k ids).
      width: H, ids per bag of a dense feature; None for flat ids.
      weighted: whether the ids have weights.
      capacity: C of a jagged feature, the rows that its activation has room for on one device; 0
        before they are counted. None for any other feature.
    """

    batch: int
    inner: tuple[int, ...]
    combines: bool
    width: int | None
    weighted: bool
    capacity: int | None = None

    @property
    def bags(self) -> int:
        """Bags per example, the product of `inner`."""
        return math.prod(self.inner)

    def with_capacity(self, capacity: int) -> FeatureShape:
        """Return the shape with another C; of a feature that is not jagged, the shape itself."""
        return self if self.capacity is None else dataclasses.replace(self, capacity=capacity)

    @property
    def has_places(self) -> bool:
        """Whether every id has a place in a `Jagged`; ids traced inside a jit are padded first."""
        return self.capacity is not None and self.width is None

    @property
    def room_per_bag(self) -> int | None:
        """The ids of each bag, padding included; None if bags of any length are packed flat."""
        return 1 if self.has_places else self.width

    def bags_of(self, examples: int) -> int:
        """Return the bags of some examples on one device; of a jagged feature, all its places."""
        return (self.capacity or 0) if self.has_places else examples * self.bags


class JaggedRows(NamedTuple):
    """Where the ids of a jagged feature stand in its activation, of all examples.

    Rows are cut at `max_sequence_length`, and have room for ids that are left out. The rows [7, 3],
    [] and [5, bad, 8] have the splits 0 2 2 5, and the ids 7 3 5 8 have the places 0 1 2 4.

    Attributes:
      row_splits: int64 `[B + 1]`, where the row of each example begins; the last is their end.
      places: int32 `[N]`, the place of each id, ascending.
    """

    row_splits: np.ndarray
    places: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class HostIds:
    """The validated ids of one feature of one batch.

    Args:
      shape: the static shape.
      ids: int32, or int64 if the vocabulary needs it. Dense: [B, bags, width], where -1 is
        padding. Flat: [N] in batch order, none of them -1.
      bags: for flat ids, int32 [N], the bag of each id, in [0, B · bags), non-decreasing; None for
        dense ids.
      weights: shaped like `ids`, float32 (float64 for a float64 table), 0 at dense padding; None
        for all ones.
      padded: whether -1 may be among dense ids.
      rows: of a jagged feature, whose ids are flat and whose bags are examples; otherwise None.
      keys: for a dynamic vocabulary, or the ids of a table on the host: uint64 [n], all different,
        until rows are known: `ids` are positions in it. Not all keys need be looked up.
      first: int64 [n], where each key is first among the ids; None: not known, or some are not
        looked up.
    """

    shape: FeatureShape
    ids: np.ndarray
    bags: np.ndarray | None
    weights: np.ndarray | None
    padded: bool
    rows: JaggedRows | None = None
    keys: np.ndarray | None = None
    first: np.ndarray | None = None

    def only(self, kept: np.ndarray) -> HostIds:
        """Return the feature with some of its ids, and the weights of these.

        Args:
          kept: bool, in the shape of the ids; dense ids that are not kept are -1 already.
        """
        weights, rows = self.weights, self.rows
        if self.bags is None:
            # A weight at a padded position may be any number; it must not count in its bag.
            if weights is not None:
                weights = np.where(kept, weights, weights.dtype.type(0))
            return dataclasses.replace(self, weights=weights, padded=True)
        return dataclasses.replace(
            self,
            ids=self.ids[kept],
            bags=self.bags[kept],
            weights=None if weights is None else weights[kept],
            rows=rows and rows._replace(places=rows.places[kept]),
        )


def part_of_feature(config: FeatureConfig, part: int, whole: int) -> FeatureConfig:
    """Return the config of a feature for `part` of `whole` equal parts of the batch.

    Only a declared output shape depends on the batch: (64, 3) becomes (16, 3) for 2 of 8 parts.
    """
    shape = config.output_shape
    if shape is None or part == whole:
        return config
    return dataclasses.replace(config, output_shape=(shape[0] * part // whole, *shape[1:]))


def dense_shape(
    path: str, config: FeatureConfig, shape: Sequence[int], *, weighted: bool
) -> FeatureShape:
    """Return the static shape of a feature whose ids are a dense array of shape `shape`.

    The values of the ids are not needed, so this also works for ids traced inside a jit.

    Raises:
      ValueError: the rank is 0, a sequence's rank is not 2, or the shape does not agree with the
        declared output_shape.
    """
    feature, length = FeatureRules(path, config, ""), config.max_sequence_length
    if not shape:
        remedy = "give one id as [1]"
        raise feature.error(expected="ids of rank 1 or more", got="rank 0", remedy=remedy)
    sequence = length or config.jagged
    if sequence and len(shape) != 2:
        expected, remedy = "a sequence's ids as [B, H]", "give each example one row of ids"
        raise feature.error(expected=expected, got=f"rank {len(shape)}", remedy=remedy)
    # [B] has one bag per example that is not combined; [B, H] has inner (), [B, K, H] has (K,).
    # A sequence [B, H] is cut or padded to L bags of one id each: inner (L,), width 1.
    combines = len(shape) > 1 and not sequence
    feature.check_output_shape(tuple(shape[: max(1, len(shape) - 1)]))
    inner, capacity = (length,) if length else tuple(shape[1:-1]), None
    if config.jagged:
        # Every example gets room for all H ids; what is left of it is taken out at the end.
        inner, capacity = (min(length or shape[1], shape[1]),), 0
    width = shape[-1] if combines else 1
    return _shared_shape(shape[0], inner, combines, width, weighted, capacity)


_shared_shape = functools.lru_cache(4096)(FeatureShape)
"""`FeatureShape`, but equal arguments give the same object, so that comparing batches is fast."""
