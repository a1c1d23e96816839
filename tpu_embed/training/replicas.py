"""Data parallelism: each replica computes gradients of its part of the batch; these are summed.

`Replicas` holds the mesh axes over which gradients are summed, whether the loss is a mean or a sum
over the replicas, and the groups of replicas that are summed with each other.

Input: the gradients of this replica, inside a `shard_map` or another program that binds the axes.
Output: their sum over all replicas, or over the replicas of this replica's group.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, final, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_choice, is_int, refuse, warn_user
from tpu_embed._types import Array, PyTree
from tpu_embed.kernels.tracing import as_varying, varying_axes
from tpu_embed.sparse import IndexedSlices, is_indexed_slices

AxisName = str | Sequence[str]
"""The name of a mesh axis, or several names, which count as one axis."""

Reduction = Literal["mean", "sum"]
"""Whether the global loss is the mean or the sum of the replicas' losses."""

Groups = tuple[tuple[int, ...], ...]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """Sum gradients over mesh axes. Without axes there is one replica.

    Args:
      what: the name of the optimizer, for messages.
      names: the axes, which count as one axis.
      mean: whether losses are divided by the number of replicas that are summed.
      groups: for each group its replicas, by their row-major index over the axes. Replicas of a
        group are summed with each other; with one group or none, all are.
    """

    what: str
    names: tuple[str, ...]
    mean: bool
    groups: Groups
    _said: list[str] = dataclasses.field(default_factory=list, repr=False)

    def scaled(self, x: Any) -> Any:
        """Return a loss or a gradient, divided by the number of summed replicas under a mean.

        These are the replicas of a group, or all replicas.

        Raises:
          ValueError: only some of the axes are bound, or the groups do not hold each replica once.
        """
        # 8 replicas in 2 groups: sums are over 4. Groups have equal lengths.
        count = self._size() // max(len(self.groups), 1) if self.mean else 1
        return x if count <= 1 else x / count

    def local(self, tree: PyTree) -> PyTree:
        """Return the same arrays, marked as different on each replica.

        `jax.grad` by such parameters gives this replica's own gradients. By parameters that are
        marked as equal on all replicas it gives the sum over the replicas.

        Raises:
          ValueError: see `scaled`.
        """
        if not self._size() or not self._tracked():
            return tree
        # The backward pass of the mark is a psum, which then stands outside of what is
        # differentiated: gradients can still be clipped before they are summed.
        return jax.tree.map(lambda x: as_varying(x, frozenset(self.names)), tree)

    def summed(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """Return the sum of every gradient over the replicas.

        Args:
          gradients: arrays and `IndexedSlices` by the label of their variable. The entries of
            `IndexedSlices` are concatenated in the order of the replicas; entries of the same row
            are not summed here.

        Raises:
          ValueError: a gradient is the same on all replicas already, or see `scaled`.
        """
        if not self._size():
            return gradients
        # Where the program does not track it, nothing says whether a gradient is summed.
        for label, gradient in gradients.items() if self._tracked() else ():
            numbers = gradient.values if is_indexed_slices(gradient) else gradient
            missing = [name for name in self.names if name not in varying_axes(numbers)]
            if missing:
                refuse(
                    f"{self.what}: gradient of {label or 'the parameter'}",
                    expected=f"this replica's own, varying over {self.names}",
                    got=f"one that is the same over {missing}, as jax.grad by a replicated "
                    "parameter gives it: already summed",
                    remedy="take it from compute_gradients, or pass "
                    "skip_gradients_aggregation=True",
                )
        with jax.named_scope("sum_over_shards"):
            return {label: self._sum(g) for label, g in gradients.items()}

    def _sum(self, gradient: Any) -> Any:
        # values [n, D] and indices [n] on each of S replicas -> [S·n, D] and [S·n].
        if is_indexed_slices(gradient):
            values, indices = (
                self._gathered(gradient.values),
                self._gathered(gradient.indices),
            )
            return IndexedSlices(values, indices, gradient.dense_shape)
        if len(self.groups) <= 1:
            return jax.lax.psum(gradient, self.names)
        return jnp.sum(self._of_my_group(gradient), axis=0)

    def _gathered(self, x: Array) -> Array:
        """Return the arrays `[n, …]` of all summed replicas, concatenated in their order."""
        x = self.local(x)
        if len(self.groups) > 1:
            every = self._of_my_group(x)  # [group size, n, …]
            return every.reshape(-1, *x.shape[1:])
        # All replicas now hold the same array. Where the program tracks what varies, its type must
        # say so, or the updated parameters could not be replicated outputs.
        to = "invarying" if self._tracked() else "varying"
        return jax.lax.all_gather(x, self.names, tiled=True, to=to)

    def _of_my_group(self, x: Array) -> Array:
        """Return `[group size, …]`: the arrays of this replica's group, in the order of replicas.

        Collectives with `axis_index_groups` do not work in a `shard_map` that tracks which arrays
        vary over the axes, so this gathers the arrays of all replicas and selects.
        """
        # groups ((2, 0), (1, 3)): members [[0, 2], [1, 3]], group_of [0, 1, 0, 1]. Replica 2 has
        # me = 0 and takes entries 0 and 2. Sorted, because a sum must not depend on how the user
        # ordered a group.
        members = np.sort(np.asarray(self.groups, np.int32), axis=1)
        group_of = np.zeros(members.size, np.int32)
        group_of[members] = np.arange(len(members), dtype=np.int32)[:, None]
        me = jnp.asarray(group_of)[jax.lax.axis_index(self.names)]
        return jax.lax.all_gather(x, self.names)[jnp.asarray(members)[me]]

    def _size(self) -> int:
        """Return the number of replicas, 0 where no axis is bound."""
        # names ("data", "model") of sizes [2, 4]: 8 replicas. 0 is the size of an unbound axis.
        sizes = [_axis_size(name) for name in self.names]
        unbound = [
            name for name, size in zip(self.names, sizes, strict=True) if not size
        ]
        if unbound and any(sizes):
            refuse(
                f"{self.what}: axis_name {self.names}",
                expected="all axes bound, or none",
                got=f"{unbound} unbound",
                remedy="run it inside a shard_map over all of them",
            )
        size, count = math.prod(sizes), sum(map(len, self.groups))
        if self.groups and count != (size or 1):
            refuse(
                f"{self.what}: group_assignment",
                expected=f"each of {size or 1} replicas once",
                got=f"{count} ids: {self.groups}",
                remedy="leave it out for one group of all",
            )
        # One warning per optimizer, not per trace: the list is the only mutable part of this class.
        if unbound and not self._said:
            self._said.append("unbound")
            warn_user(
                f"{self.what}: no axis named {', '.join(self.names)} is bound here, so nothing is "
                "scaled or summed; run it inside a shard_map over it"
            )
        return size if self.names else 0

    def _tracked(self) -> bool:
        """Return whether the program tracks which arrays differ between replicas (`check_vma`).

        The axes must be bound.
        """
        # The index of a replica differs on all of them; if its type does not say so, none does.
        return bool(varying_axes(jax.lax.axis_index(self.names[0])))


def make_replicas(
    what: str,
    axis_name: AxisName | None,
    reduction: Reduction,
    group_assignment: Iterable[Iterable[int]] | None = None,
    *,
    required: bool = True,
) -> Replicas:
    """Return the replicas that a user describes.

    Args:
      what: the name of the optimizer, for messages.
      axis_name: the name of a mesh axis, several names that count as one axis, or None.
      reduction: "mean" or "sum".
      group_assignment: lists of equal length that together hold the index of every replica once.
        With None or [] all replicas are one group.
      required: whether `axis_name` may not be None, which stands for one replica.

    Raises:
      ValueError: an unknown reduction, a name that is not a non-empty string, a repeated name, or
        groups that are not such lists.

    Example:
      >>> make_replicas("opt", "replicas", "mean", [[0, 2], [1, 3]]).groups
      ((0, 2), (1, 3))
    """
    check_choice(f"{what}: reduction", reduction, get_args(Reduction))
    # "x" -> ("x",), ["x", "y"] -> ("x", "y").
    names: Any = (
        tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    )
    good = all(isinstance(name, str) and name for name in names) and len(
        {*names}
    ) == len(names)
    if axis_name is None and not required:
        names = ()
    elif not good or not names:
        refuse(
            f"{what}: axis_name",
            expected="the name of a mesh axis, or different ones",
            got=repr(axis_name),
            remedy="give names of Mesh(devices, names); without an axis use the Optimizer alone",
        )
    groups: Any = () if group_assignment is None else group_assignment
    try:
        groups = tuple(tuple(group) for group in groups)
    except TypeError:
        groups = ((group_assignment,),)  # not a list of lists: ids that are no integers
    fault = _fault(groups)
    if fault:
        refuse(
            f"{what}: group_assignment",
            expected="lists of equal length with each replica's index once",
            got=f"{fault}: {group_assignment!r}",
            remedy="as [[0, 1], [2, 3]] of 4 replicas",
        )
    ids = tuple(tuple(int(i) for i in group) for group in groups)
    return Replicas(what, names, reduction == "mean", ids)


def _fault(groups: Groups) -> str:
    """Return what is wrong with the groups, or an empty string."""
    # [[0, 1], [1, 4]]: repeated [1]; absent [2, 3], since four ids must be 0 to 3.
    ids, sizes = (
        [i for group in groups for i in group],
        sorted({len(group) for group in groups}),
    )
    if not all(is_int(i) for i in ids):
        return "ids that are no integers"
    if len(sizes) > 1:
        return f"lists of {sizes} ids"
    repeated = sorted(i for i, n in collections.Counter(ids).items() if n > 1)
    if repeated:
        return f"{repeated} more than once"
    absent = sorted({*range(len(ids))} - {*ids})
    if absent:
        return f"{absent} in none"
    return "lists without ids" if groups and not ids else ""


def _axis_size(name: str) -> int:
    """Return the size of a mesh axis, 0 if it is not bound."""
    try:
        return int(jax.lax.axis_size(name))
    except (NameError, KeyError):
        return 0
