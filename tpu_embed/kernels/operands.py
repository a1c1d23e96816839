"""What the kernels that sum and update rows take: arrays, what is static, and the rule.

Arrays stand in one tuple, and what is static in another. The compiled kernels have the rules of
common optimizers built in: a `CompiledRule` says which one to run, with which numbers, and which
bounds to apply before and after it.

Input: arrays of a device, and how bags are numbered. Output: operands of `gather_sum` and
`cpu.update_rows`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from tpu_embed._types import Array, ArrayLike


class RowsToSum(NamedTuple):
    """Rows, and the sum that each is added to.

    Attributes:
      source: `[R, D]` float, or bfloat16 stored as uint16, which is summed in float32.
      index: integer `[N]`, rows of `source`; absent ones are left out.
      segments: int32 `[N]`, the sum of each, non-decreasing; those past the last are left out.
      weights: the weight of each, `[N]`, finite; None: all ones. One of weight 0 adds nothing,
        whatever its row holds.
      packed: the source once more, packed for SparseCores, `[R, words]`, if it lies so already;
        XLA then drops the other one where they sum.
    """

    source: Array
    index: Array
    segments: Array
    weights: Array | None = None
    packed: Array | None = None


class SumLayout(NamedTuple):
    """How sums are numbered: feature after feature. A sum is that of a bag.

    Attributes:
      bags: for each feature, its bags.
      widths: the entries of each bag of each feature, if they are known: what `segments` say, for
        kernels that need not read them. (): only `segments` say it.
      filled: whether a sum of no entries must be zeros. False: nobody reads it, so it may be
        anything, and a kernel need not write it.
    """

    bags: tuple[int, ...]
    widths: tuple[int, ...] = ()
    filled: bool = True


class RowGradients(NamedTuple):
    """The gradients of a device's ids, not yet summed by row.

    Ids that were routed are sorted already: entry i belongs to the partial sum `sums[i]`, and that
    to the whole sum `merged[sums[i]]`, whose row is in `row_ids`.

    Attributes:
      row_ids: int32 or int64 `[N]`, the local row of each id; ids outside of the table are left
        out. With `sums`: `[U]`, the row of each whole sum.
      bags: int32 `[N]`, the bag of each id; None: position i has bag i.
      weights: float32 `[N]`, the weight of each id; None: all ones. A gradient of weight 0 adds
        nothing, whatever it is.
      gradients: the gradients of the bags, `[bags[f], D]` for feature f.
      sums: int32 `[N]`, non-decreasing; None: the ids are not routed.
      merged: int32 `[P]`, non-decreasing; None: every partial sum is a whole sum.
      blocks: int32 `[F * (G - 1)]`, for each feature the first bags of the second block of the
        batch and of all later ones, of ids that are not routed; None: there is one block. A row's
        gradients are summed within each block first, feature after feature, then over the blocks.
    """

    row_ids: Array
    bags: Array | None
    weights: Array | None
    gradients: tuple[Array, ...]
    sums: Array | None = None
    merged: Array | None = None
    blocks: Array | None = None


class GradientLayout(NamedTuple):
    """How the bags of gradients are numbered, and whether sums are rounded.

    Attributes:
      bags: for each feature, the number of its bags; they are numbered feature after feature.
      rounds: whether each partial sum, or the sum of each block, is rounded to bfloat16 (to nearest
        even) before they are added up.
    """

    bags: tuple[int, ...]
    rounds: bool = False


KINDS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "ftrl")
"""The rules of `native/loops.h`, in the order of its `RuleKind`."""


@dataclasses.dataclass(frozen=True)
class CompiledRule:
    """A rule that the compiled kernels know, with its numbers at one step.

    Attributes:
      kind: one of `KINDS`.
      slots: the names of its slots, in the order of the kernel.
      numbers: its scalars, in the order in which `native/loops.inc` reads them.
      flag: its switch, for rules that have one.
      keep: what the row is multiplied with before the rule, 1 - λ.
      gradient_bounds: lower and upper bound of the gradient; None: unbounded.
      weight_bounds: lower and upper bound of the new row; None: unbounded.
    """

    kind: str
    slots: tuple[str, ...] = ()
    numbers: tuple[ArrayLike, ...] = ()
    flag: bool = False
    keep: ArrayLike = 1.0
    gradient_bounds: tuple[float | None, float | None] = (None, None)
    weight_bounds: tuple[float | None, float | None] = (None, None)

    def operand(self) -> Array:
        """Return all numbers as one float32 array: the common ones, then the rule's own."""
        # [keep, gradient low, gradient high, row low, row high, own numbers …]
        bounds = (*_infinite(self.gradient_bounds), *_infinite(self.weight_bounds))
        numbers = [
            jnp.asarray(x, jnp.float32) for x in (self.keep, *bounds, *self.numbers)
        ]
        return jnp.stack(numbers)


def _infinite(bounds: tuple[float | None, float | None]) -> tuple[float, float]:
    low, high = bounds
    return -math.inf if low is None else low, math.inf if high is None else high
