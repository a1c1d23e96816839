"""Over which mesh axes the gradients of replicas are summed, and how.

Enters: gradients of this replica, inside a `shard_map` or any other program that binds the axes.
Leaves: their sum over all replicas, or over those of this replica's group. Called by
`TreeOptimizer` and `cross_shard`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, final, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_choice, is_int, message
from tpu_embed._types import Array, PyTree
from tpu_embed.kernels.varying import as_varying, varying_axes
from tpu_embed.sparse import IndexedSlices, is_indexed_slices

__all__ = ["AxisName", "Reduction", "Replicas", "make_replicas"]

AxisName = str | Sequence[str]
"""A mesh axis, or several, which count as one."""

Reduction = Literal["mean", "sum"]
"""What the loss of all replicas is of theirs."""

Groups = tuple[tuple[int, ...], ...]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Replicas:
    """Sum gradients over mesh axes; no axes: one replica.

    Args:
      what: who asks, for messages.
      names: the axes, which count as one.
      mean: whether losses are divided by the number of replicas that are summed.
      groups: replicas that are summed with each other, by their row-major index over the axes; one
        group or none: all.
    """

    what: str
    names: tuple[str, ...]
    mean: bool
    groups: Groups
    _said: list[str] = dataclasses.field(default_factory=list, repr=False)

    def count(self) -> int:
        """Return how many replicas are summed: those of a group, or all.

        Raises:
          ValueError: only some of the axes are bound, or the groups do not fit their size.
        """
        size = self._size()
        return size // max(len(self.groups), 1)

    def scaled(self, x: Any) -> Any:
        """Return a loss or a gradient divided by `count` under mean, otherwise as it is."""
        count = self.count() if self.mean else 1
        return x if count == 1 else x / count

    def local(self, tree: PyTree) -> PyTree:
        """Return arrays that count as different on each replica.

        `jax.grad` by such parameters gives this replica's own gradients; by others, their sum.

        Raises:
          ValueError: see `count`.
        """
        self._size()
        if not self._tracked():
            return tree
        return jax.tree.map(lambda x: as_varying(x, frozenset(self.names)), tree)

    def summed(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """Return the sum over replicas of every gradient, by its variable.

        Args:
          gradients: arrays and `IndexedSlices`, not None. The entries of the latter are put
            together, in the order of the replicas; equal rows are left to the consumer.

        Raises:
          ValueError: a gradient is the same on all replicas already, or see `count`.
        """
        self._size()
        if not self._bound():
            return gradients
        self._refuse_summed(gradients)
        with jax.named_scope("sum_over_shards"):
            return {label: self._sum(g) for label, g in gradients.items()}

    def _sum(self, gradient: Any) -> Any:
        if is_indexed_slices(gradient):
            values, indices = self._gathered(gradient.values), self._gathered(gradient.indices)
            return IndexedSlices(values, indices, gradient.dense_shape)
        if len(self.groups) <= 1:
            return jax.lax.psum(gradient, self.names)
        return jnp.sum(self._of_my_group(gradient), axis=0)

    def _gathered(self, x: Array) -> Array:
        """Return arrays `[N, …]` of all replicas, or of this group's, joined in their order."""
        x = self.local(x)
        if len(self.groups) > 1:
            every = self._of_my_group(x)
            return every.reshape(-1, *x.shape[1:])
        to = "invarying" if self._tracked() else "varying"
        return jax.lax.all_gather(x, self.names, tiled=True, to=to)

    def _of_my_group(self, x: Array) -> Array:
        """Return `[group size, …]`: this group's arrays, in the order of its replicas.

        Collectives with `axis_index_groups` do not work in a `shard_map` that keeps count of what
        varies; gathering all and selecting does.
        """
        members = np.sort(np.asarray(self.groups, np.int32), axis=1)
        group_of = np.zeros(members.size, np.int32)
        group_of[members] = np.arange(len(members), dtype=np.int32)[:, None]
        me = jnp.asarray(group_of)[jax.lax.axis_index(self.names)]
        return jax.lax.all_gather(x, self.names)[jnp.asarray(members)[me]]

    def _size(self) -> int:
        """Return S, 1 where no axis is bound."""
        sizes = [_axis_size(name) for name in self.names]
        unbound = [name for name, size in zip(self.names, sizes, strict=True) if size is None]
        if unbound and len(unbound) < len(self.names):
            raise ValueError(
                message(
                    f"{self.what}: axis_name {self.names}",
                    expected="all axes bound, or none",
                    got=f"{unbound} unbound",
                    remedy="run it inside a shard_map over all of them",
                )
            )
        size = 1 if unbound else math.prod(size for size in sizes if size is not None)
        self._check_groups(size)
        if unbound:
            self._say_unbound()
        return size

    def _check_groups(self, size: int) -> None:
        count = sum(len(group) for group in self.groups)
        if self.groups and count != size:
            expected = f"each of {size} replicas once"
            got = f"{count} ids: {_listed(self.groups)}"
            what, remedy = f"{self.what}: group_assignment", "leave it out for one group of all"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))

    def _say_unbound(self) -> None:
        if not self._said:
            self._said.append("unbound")
            warnings.warn(
                f"{self.what}: no axis named {', '.join(self.names)} is bound here, so nothing is "
                "scaled or summed; run it inside a shard_map over it",
                stacklevel=4,
            )

    def _tracked(self) -> bool:
        """Tell whether the program keeps count of what differs between the replicas."""
        return self._bound() and bool(varying_axes(jax.lax.axis_index(self.names[0])))

    def _bound(self) -> bool:
        return bool(self.names) and _axis_size(self.names[0]) is not None

    def _refuse_summed(self, gradients: dict[str, Any]) -> None:
        if not self._tracked():
            return
        for label, gradient in gradients.items():
            numbers = gradient.values if is_indexed_slices(gradient) else gradient
            missing = [name for name in self.names if name not in varying_axes(numbers)]
            if missing:
                raise ValueError(
                    message(
                        f"{self.what}: gradient of {label or 'the parameter'}",
                        expected=f"this replica's own, varying over {self.names}",
                        got=f"one that is the same over {missing}, as jax.grad by a replicated "
                        "parameter gives it: already summed",
                        remedy="take it from compute_gradients, or pass "
                        "skip_gradients_aggregation=True",
                    )
                )


def make_replicas(
    what: str,
    axis_name: AxisName | None,
    reduction: Reduction,
    group_assignment: Iterable[Iterable[int]] | None = None,
) -> Replicas:
    """Return the shards that a user describes.

    Args:
      what: who asks, for messages.
      axis_name: an axis, several that count as one, or None.
      reduction: "mean" or "sum".
      group_assignment: lists of equal length that hold every replica's index once; None, []: one
        group.

    Raises:
      ValueError: another reduction, names that are none, or groups that are not such lists.

    Example:
      >>> make_replicas("opt", "replicas", "mean", [[0, 2], [1, 3]]).groups
      ((0, 2), (1, 3))
    """
    check_choice(f"{what}: reduction", reduction, get_args(Reduction))
    given: Any = () if axis_name is None else axis_name
    names = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    good = all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
    if not good or (axis_name is not None and not names):
        expected = "the name of a mesh axis, or different ones"
        remedy = "Mesh(devices, names) has them"
        raise ValueError(
            message(f"{what}: axis_name", expected=expected, got=repr(axis_name), remedy=remedy)
        )
    return Replicas(what, names, reduction == "mean", _checked_groups(what, group_assignment))


def _axis_size(name: str) -> int | None:
    """Return the size of an axis, None if it is not bound."""
    try:
        return int(jax.lax.axis_size(name))
    except (NameError, KeyError):
        return None


def _checked_groups(what: str, given: Any) -> Groups:
    if given is None:
        return ()
    try:
        groups = tuple(tuple(group) for group in given)
    except TypeError:
        groups = ((given,),)
    fault = _fault(groups)
    if fault:
        expected = "lists of equal length with each replica's index once"
        got, remedy = f"{fault}: {given!r}", "as [[0, 1], [2, 3]] of 4 replicas"
        what = f"{what}: group_assignment"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return tuple(tuple(int(i) for i in group) for group in groups)


def _fault(groups: tuple[tuple[Any, ...], ...]) -> str:
    """Return what is wrong with groups, or nothing."""
    ids = [i for group in groups for i in group]
    if not all(is_int(i) for i in ids):
        return "ids that are no integers"
    if len({len(group) for group in groups}) > 1:
        return f"lists of {sorted({len(group) for group in groups})} ids"
    repeated = sorted(i for i, n in collections.Counter(ids).items() if n > 1)
    if repeated:
        return f"{repeated} more than once"
    absent = sorted(set(range(len(ids))) - set(ids))
    if absent:
        return f"{absent} in none"
    return "lists without ids" if groups and not ids else ""


def _listed(groups: Groups) -> str:
    return str([list(group) for group in groups])
