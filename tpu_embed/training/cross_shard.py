"""Data-parallel optimizers: gradients are summed over all replicas, then applied on each.

Every replica starts from the same parameters and applies the same sum, so the replicas stay equal.

Input: another optimizer, and the mesh axes of the replicas.
Output: an optimizer with the same methods (`CrossShardOptimizer`), or an optax transform
(`cross_shard`), for use inside a `shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import jax
import optax
from jax.tree_util import keystr

from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.optimizers.base import TableOptimizer
from tpu_embed.sparse import is_indexed_slices
from tpu_embed.training.optimizer import Optimizer, TreeOptimizer, checked_name
from tpu_embed.training.replicas import AxisName, Reduction, make_replicas
from tpu_embed.training.update import DeclaredOptimizer, SumsItself, summed_twice

Groups = Iterable[Iterable[int]]


@final
class CrossShardOptimizer(TreeOptimizer):
    """Sum the gradients of all replicas, then let another optimizer apply them.

    Its methods are those of `TreeOptimizer`. With S replicas and their losses l, the optimizer sees
    the gradient of Σ l / S (mean) or of Σ l (sum). `compute_gradients` divides the loss and returns
    this replica's own gradients, so that they can be clipped before `apply_gradients` sums them.
    Use "mean" for a loss that is a mean over the replica's batch, "sum" for one that is a sum.

    In a `shard_map` that tracks what varies (`check_vma=True`), declare parameters and state as
    replicated outputs; with several groups, as outputs that vary from group to group.

    Args:
      opt: an `Optimizer` without an axis, or an optax transform.
      reduction: "mean" or "sum".
      axis_name: the mesh axes of the replicas; several count as one. Where none of them is bound
        there is one replica, and one warning is given.
      group_assignment: lists of equal length that together hold the index of every replica
        (row-major over the axes) once. Gradients are summed within a list, and the mean divides by
        its length. With None or [] all replicas are one group.
      name: the name of the optimizer.

    Raises:
      TypeError: `opt` is neither an `Optimizer` nor an optax transform.
      ValueError: `opt` has an axis of its own; an unknown reduction; groups that are not such
        lists.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("replicas",))
      >>> optimizer = CrossShardOptimizer(optax.sgd(0.5), axis_name="replicas")
      >>> def step(params, state, x):
      ...     return optimizer.minimize(lambda w: (w * x).mean(), params, state)[:2]
      >>> mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("replicas")), out_specs=P())
      >>> params = jnp.ones(())
      >>> params, state = jax.jit(mapped)(params, optimizer.init(params), jnp.array([1.0, 3.0]))
      >>> float(params), int(state.step)
      (0.0, 1)

    Reference:
      TensorFlow's `tf.compat.v1.tpu.CrossShardOptimizer`.
    """

    def __init__(
        self,
        opt: Optimizer | optax.GradientTransformation,
        reduction: Reduction = "mean",
        *,
        axis_name: AxisName,
        group_assignment: Groups | None = None,
        name: str = "CrossShardOptimizer",
    ) -> None:
        self._name = checked_name("CrossShardOptimizer", name)
        self._replicas = make_replicas(name, axis_name, reduction, group_assignment)
        if isinstance(opt, Optimizer):
            self._declared = opt.declared_for(name)
        else:
            _check_transform(name, opt)
            self._declared = DeclaredOptimizer(opt)


def cross_shard(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    reduction: Reduction = "mean",
    group_assignment: Groups | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that sums local gradients over replicas, then calls another.

    `update` divides the gradients by the number of replicas (mean), sums them, and calls `tx`. It
    takes this replica's own gradients of the unscaled loss. In a `shard_map` with `check_vma=True`
    these are the gradients by parameters that `jax.lax.pcast(…, axis_name, to="varying")` has made
    local.

    A clip of the norm at c that stands before `cross_shard` in a chain clips unscaled gradients. It
    equals a clip at c / S between `compute_gradients` and `apply_gradients` of
    `CrossShardOptimizer`, whose gradients are scaled already.

    Args:
      tx: an optax transform.
      axis_name: the mesh axes of the replicas.
      reduction: "mean" or "sum".
      group_assignment: as in `CrossShardOptimizer`.

    Raises:
      TypeError: `tx` is not an optax transform; at an update, a gradient is an `IndexedSlices`.
      ValueError: an unknown reduction, groups that are not as described, or a gradient that is the
        same on all replicas.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = cross_shard(optax.sgd(0.5), "replicas", reduction="sum")
      >>> w, gradients = jnp.ones(()), jnp.array([1.0, 3.0])
      >>> jax.vmap(lambda g: tx.update(g, tx.init(w))[0], axis_name="replicas")(gradients).tolist()
      [-2.0, -2.0]

    Reference:
      optax: a transform is a pair of pure functions, init and update.
    """
    _check_transform("cross_shard", tx)
    shards = make_replicas("cross_shard", axis_name, reduction, group_assignment)
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        # IndexedSlices are pytrees: without is_leaf their values and indices would be two leaves.
        pairs, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_indexed_slices)
        for path, gradient in pairs:
            if is_indexed_slices(gradient):
                raise TypeError(
                    message(
                        f"cross_shard: gradient of {keystr(path) or 'the parameter'}",
                        expected="an array, since optax transforms do not take IndexedSlices",
                        got="IndexedSlices",
                        remedy="CrossShardOptimizer(Optimizer(tx), axis_name=...) takes them",
                    )
                )
        summed = shards.summed({keystr(path): shards.scaled(g) for path, g in pairs})
        return inner.update(structure.unflatten(summed.values()), state, params, **extra)

    return SumsItself(tx.init, update)


def _check_transform(what: str, tx: Any) -> None:
    if isinstance(tx, SumsItself):
        raise summed_twice(f"{what}: opt", "cross_shard(...)")
    if isinstance(tx, optax.GradientTransformation):
        return
    name = type(tx).__name__
    remedies = {
        TableOptimizer: f"wrap it: Optimizer({name}(...)), or {name}(...).as_optax()",
        Optimizer: "CrossShardOptimizer takes an Optimizer",
        CrossShardOptimizer: "one is enough: give it the optimizer that this one wraps",
    }
    # Here `tx` is something else: name the remedy for what users most likely meant.
    likely = (words for kind, words in remedies.items() if isinstance(tx, kind))
    raise TypeError(
        message(
            f"{what}: opt",
            expected="an Optimizer or an optax transform",
            got=name,
            remedy=next(likely, "make one: optax.sgd(0.1)"),
        )
    )
