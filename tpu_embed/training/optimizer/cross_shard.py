"""Training on replicas: their gradients are summed, then applied.

Enters and leaves: what `Optimizer` takes and returns, inside a `shard_map`; or, as an optax
transform, local gradients and updates.
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
from tpu_embed.training.optimizer.declared import DeclaredOptimizer, SumsItself
from tpu_embed.training.optimizer.optimizer import Optimizer
from tpu_embed.training.optimizer.verbs import TreeOptimizer, checked_name
from tpu_embed.training.replicas import AxisName, Reduction, make_replicas

__all__ = ["CrossShardOptimizer", "cross_shard"]

Groups = Iterable[Iterable[int]]


@final
class CrossShardOptimizer(TreeOptimizer):
    """Sum the gradients of all replicas, then let another optimizer apply them.

    Its verbs are those of `TreeOptimizer`. Of S replicas with losses l: the optimizer sees the
    gradient of Σ l / S (mean) or of Σ l (sum). `compute_gradients` divides the loss and returns
    this replica's own gradients, so that they can be clipped before `apply_gradients` sums them. A
    loss that is a mean over the replica's batch wants "mean", a sum wants "sum".

    A `shard_map` that checks what varies (`check_vma=True`) must have parameters and state as
    replicated outputs; with several groups they vary from group to group.

    Args:
      opt: an `Optimizer` without an axis, or an optax transform.
      reduction: "mean" or "sum".
      axis_name: the mesh axes of the replicas; several count as one. Where none is bound there is
        one replica, and one warning.
      group_assignment: lists of equal length that hold every replica's index (row-major over the
        axes) once: sums are within a list, and the mean divides by its length. None or []: one
        group of all.
      name: of the optimizer.

    Raises:
      TypeError: `opt` is neither.
      ValueError: it has an axis of its own; another reduction; groups that are no such lists.

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
        axes = _checked_axis(name, axis_name)
        self._shards = make_replicas(name, axes, reduction, group_assignment)
        self._declared = _declared_of(name, opt)


def cross_shard(
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    reduction: Reduction = "mean",
    group_assignment: Groups | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that sums local gradients over replicas, then calls another.

    `update` divides by the number of replicas (mean), sums, and calls `tx`. It wants gradients of
    the unscaled loss, this replica's own: in a `shard_map` with `check_vma=True`, by parameters
    that `jax.lax.pcast(…, axis_name, to="varying")` has made local.

    A limit c on the norm of gradients in a chain before it is a limit on the unscaled ones: it
    equals c / S between `compute_gradients` and `apply_gradients` of `CrossShardOptimizer`.

    Args:
      tx: an optax transform.
      axis_name: the mesh axes of the replicas.
      reduction: "mean" or "sum".
      group_assignment: as in `CrossShardOptimizer`.

    Raises:
      TypeError: `tx` is no optax transform; at an update, an `IndexedSlices` among the gradients.
      ValueError: another reduction, groups, or a gradient that is the same on all replicas.

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
    names = _checked_axis("cross_shard", axis_name)
    shards = make_replicas("cross_shard", names, reduction, group_assignment)
    inner = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        pairs, structure = jax.tree_util.tree_flatten_with_path(updates, is_leaf=is_indexed_slices)
        gradients = {keystr(path): shards.scaled(g) for path, g in _dense_only(pairs)}
        summed = shards.summed(gradients)
        return inner.update(structure.unflatten(summed.values()), state, params, **extra)

    return SumsItself(tx.init, update)


def _dense_only(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    for path, gradient in pairs:
        if is_indexed_slices(gradient):
            raise TypeError(
                message(
                    f"cross_shard: gradient of {keystr(path) or 'the parameter'}",
                    expected="an array: optax transforms know no rows",
                    got="IndexedSlices",
                    remedy="CrossShardOptimizer(Optimizer(tx, name), axis_name=...) takes them",
                )
            )
    return pairs


def _checked_axis(what: str, axis_name: AxisName | None) -> AxisName:
    if axis_name is None:
        expected = "the name of a mesh axis, or different ones"
        remedy = "without an axis an Optimizer alone will do"
        raise ValueError(
            message(f"{what}: axis_name", expected=expected, got="None", remedy=remedy)
        )
    return axis_name


def _declared_of(what: str, opt: Any) -> DeclaredOptimizer:
    if isinstance(opt, Optimizer):
        return opt.lifts_for(what)
    _check_transform(what, opt)
    return DeclaredOptimizer(opt)


def _check_transform(what: str, tx: Any) -> None:
    if isinstance(tx, SumsItself):
        got, remedy = "cross_shard(...)", "give the transform inside it: gradients are summed once"
        expected = "an optimizer without an axis of its own"
        raise ValueError(message(f"{what}: opt", expected=expected, got=got, remedy=remedy))
    if isinstance(tx, optax.GradientTransformation):
        return
    name = type(tx).__name__
    remedies = {
        TableOptimizer: f"wrap it: Optimizer({name}(...), name), or {name}(...).as_optax()",
        Optimizer: "CrossShardOptimizer takes an Optimizer",
        CrossShardOptimizer: "one is enough: give it the optimizer that this one wraps",
    }
    made = "make one: optax.sgd(0.1)"
    remedy = next((words for kind, words in remedies.items() if isinstance(tx, kind)), made)
    expected = "an Optimizer or an optax transform"
    raise TypeError(message(f"{what}: opt", expected=expected, got=name, remedy=remedy))
