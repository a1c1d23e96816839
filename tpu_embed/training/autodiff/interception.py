"""Gradients by activations, for a model that a loss function hides.

Enters: activations as a lookup gave them, and a loss of them. Leaves: the gradient of every
feature's activations, as `EmbeddingEngine.update` takes them. Zeros are added to the activations on
their way into the loss, one dummy a feature; the gradient by a dummy is that by the activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from tpu_embed._checks import message
from tpu_embed._snapshot import as_array
from tpu_embed._types import Array, PyTree
from tpu_embed.core.ids import structure as structures
from tpu_embed.sparse import tapped
from tpu_embed.training.autodiff.collect import checked_loss
from tpu_embed.training.autodiff.gradients import gradients, value_and_gradients
from tpu_embed.training.autodiff.tags import full

__all__ = [
    "create_dummy_table_variables",
    "get_gradients_through_compute_gradients",
    "get_gradients_through_dummy_table_variables",
    "hook",
]

Dummies = dict[str, dict[str, Array]]
"""Table name -> feature path -> zeros, shaped as the activations."""

_REMAKE = "make dummies of these activations with create_dummy_table_variables"


class ScalesLoss(Protocol):
    """What is asked of an optimizer here."""

    def scale_loss(self, loss: Array) -> Array:
        """Return the loss as the optimizer differentiates it."""
        ...

    def local(self, tree: PyTree) -> PyTree:
        """Return arrays whose gradients stay this replica's own."""
        ...


def create_dummy_table_variables(activations: PyTree, feature_config: Any = None) -> Dummies:
    """Return zeros like each activation, grouped by table.

    Args:
      activations: `[B, …, D]` a feature, nested as `feature_config`.
      feature_config: any nesting of `FeatureConfig`s, which say what features share a table. None:
        each activation counts as the only one of a table, called by its path.

    Returns:
      table name -> feature path (`user/history`) -> zeros of the activation's shape and dtype.
      Tables by first appearance, features in flattening order.

    Raises:
      TypeError: activations in a container of another type.
      ValueError: other keys or another size; two activations of one path.

    Example:
      >>> from tpu_embed import FeatureConfig, TableConfig
      >>> table = TableConfig(10, 2, name="item")
      >>> features = {"bought": FeatureConfig(table), "seen": FeatureConfig(table)}
      >>> activations = {"bought": jnp.ones((1, 2)), "seen": jnp.ones((1, 2))}
      >>> create_dummy_table_variables(activations, features)["item"]["seen"].tolist()
      [[0.0, 0.0]]
    """
    dummies: Dummies = {}
    for table, path, leaf in _features(activations, feature_config):
        dummies.setdefault(table, {})[path] = full(jax.typeof(jnp.asarray(leaf)), 0)
    return dummies


def hook(activations: PyTree, dummies: Mapping[str, Mapping[str, Array]]) -> PyTree:
    """Return the activations, bit for bit; the cotangent of each goes to its dummy too.

    Args:
      activations: as given to `create_dummy_table_variables`.
      dummies: as it returned them. Their values are not read.

    Raises:
      ValueError: other features than the dummies', or of another shape or dtype; two of one path.

    Example:
      >>> dummies = {"item": {"seen": jnp.zeros(2)}}
      >>> def loss(dummies):
      ...     return (hook({"seen": jnp.array([1.0, 2.0])}, dummies)["seen"] ** 2).sum()
      >>> jax.grad(loss)(dummies)["item"]["seen"].tolist()
      [2.0, 4.0]
    """
    by_path = {path: dummy for table in dummies.values() for path, dummy in table.items()}
    leaves = _by_path(activations)
    if by_path.keys() != leaves.keys():
        expected, got = f"features {sorted(by_path)}", f"{sorted(leaves)}"
        raise ValueError(message("hook: activations", expected=expected, got=got, remedy=_REMAKE))
    hooked = {}
    for path, leaf in leaves.items():
        activation, dummy = (as_array(x) for x in (leaf, by_path[path]))
        if (activation.shape, activation.dtype) != (dummy.shape, dummy.dtype):
            expected = f"{dummy.dtype} of shape {dummy.shape}, as its dummy"
            got = f"{activation.dtype} of shape {activation.shape}"
            what = f"hook: activations: {path}"
            raise ValueError(message(what, expected=expected, got=got, remedy=_REMAKE))
        hooked[path] = tapped(activation, dummy)
    return _rebuilt(activations, iter(hooked.values()))


def get_gradients_through_dummy_table_variables(
    loss: Callable[..., Array],
    activations: PyTree,
    *args: Any,
    feature_config: Any = None,
    optimizer: ScalesLoss | None = None,
) -> tuple[Array, PyTree]:
    """Return a loss, and its gradient by each feature's activations.

    A feature without a path to the loss gets zeros, unless its whole table goes unused.

    Args:
      loss: `loss(activations, *args)`, a float array; gradients are those of its sum.
      activations: `[B, …, D]` a feature, nested as `feature_config`.
      *args: for the loss, not differentiated.
      feature_config: as in `create_dummy_table_variables`; with None every activation must be used.
      optimizer: scales the loss before it is differentiated, as its `compute_gradients` does. Use
        it in a data-parallel step whose loss is a mean over replicas, when the gradients go to
        `EmbeddingEngine.update`, which sums.

    Returns:
      (the loss, unscaled; gradients of the activations' shapes, nested as `feature_config`, or as
      they are).

    Raises:
      TypeError: activations in a container of another type.
      ValueError: other keys or another size; a loss that is not float; a table none of whose
        features the loss depends on.

    Example:
      >>> from tpu_embed import FeatureConfig, TableConfig
      >>> features = {"seen": FeatureConfig(TableConfig(10, 2))}
      >>> value, found = get_gradients_through_dummy_table_variables(
      ...     lambda x: (x["seen"] ** 2).sum(), {"seen": jnp.ones((1, 2))}, feature_config=features
      ... )
      >>> float(value), found["seen"].tolist()
      (2.0, [[2.0, 2.0]])
    """
    nest = activations if feature_config is None else feature_config
    if optimizer is not None:
        activations = optimizer.local(activations)
    dummies = create_dummy_table_variables(activations, feature_config)

    def hooked(dummies: Dummies) -> tuple[Array, Array]:
        value = checked_loss(loss(hook(activations, dummies), *args))
        return (value if optimizer is None else optimizer.scale_loss(value)), value

    (_, value), (found,) = value_and_gradients(hooked, [dummies])
    for i, name in enumerate(dummies):
        _check_used(f"table {name!r} (index {i})", found[name])
    by_path: dict[str, Array] = {}
    for name in dummies:
        by_path |= _filled(name, found[name], dummies[name])
    return value, _rebuilt(nest, (by_path[path] for path, _ in _leaves(nest)))


def get_gradients_through_compute_gradients(
    optimizer: ScalesLoss, loss: Callable[[PyTree], Array], activations: PyTree
) -> PyTree:
    """Return the gradients of a loss, as scaled by an optimizer, by each feature's activations.

    Args:
      optimizer: scales the loss, as its `compute_gradients` does: by 1/S where it takes a mean over
        S devices.
      loss: `loss(activations)`, a float array; gradients are those of its sum.
      activations: `[B, …, D]` a feature, in any nesting that a feature configuration may have.

    Returns:
      gradients nested as the activations, None for one without a path to the loss.

    Raises:
      ValueError: a loss that is not float.
    """

    def scaled(*leaves: Array) -> Array:
        value = checked_loss(loss(_rebuilt(activations, iter(leaves))))
        return optimizer.scale_loss(value)

    activations = optimizer.local(activations)
    found = gradients(scaled, [leaf for _, leaf in _leaves(activations)])
    return _rebuilt(activations, iter(found))


def _features(activations: PyTree, feature_config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield table, path and activation of each feature, in flattening order."""
    if feature_config is None:
        yield from ((path, path, leaf) for path, leaf in _by_path(activations).items())
        return
    structure = structures.flatten(feature_config)
    leaves = structure.match(activations, what="activations")
    for path, feature, leaf in zip(structure.paths, structure.features, leaves, strict=True):
        yield structure.table_names[structure.table_index(feature)], path, leaf


def _by_path(activations: PyTree) -> dict[str, Any]:
    """Return the activations by path.

    Raises:
      ValueError: two have one path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in _leaves(activations):
        if path in leaves:
            expected, got = "a path of its own for each", f"several at {path!r}"
            remedy = "rename keys that hold a slash"
            raise ValueError(message("activations", expected=expected, got=got, remedy=remedy))
        leaves[path] = leaf
    return leaves


def _check_used(what: str, found: Mapping[str, Array | None]) -> None:
    if all(gradient is None for gradient in found.values()):
        raise ValueError(
            message(
                what,
                expected="a loss that depends on one of its features at least",
                got=f"none for {', '.join(found)}: activations computed but not used",
                remedy="use them, or leave the features out (feature_config says which share)",
            )
        )


def _filled(
    table: str, found: Mapping[str, Array | None], dummies: Mapping[str, Array]
) -> dict[str, Array]:
    """Return a table's gradients, its dummies (zeros) for those that are None."""
    absent = [path for path, gradient in found.items() if gradient is None]
    if absent:
        warnings.warn(
            f"table {table!r}: the loss does not depend on {', '.join(absent)}: zero gradients",
            stacklevel=3,
        )
    return {path: dummies[path] if g is None else g for path, g in found.items()}


def _leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each leaf, as a `Structure` has it, and the leaf."""
    inner = structures.children(nest)
    if inner is None:
        yield path or "feature", nest
        return
    for key, child in inner:
        yield from _leaves(child, f"{path}/{key}" if path else str(key))


def _rebuilt(nest: Any, leaves: Iterator[Any]) -> Any:
    inner = structures.children(nest)
    if inner is None:
        return next(leaves)
    return structures.rebuild(nest, {key: _rebuilt(child, leaves) for key, child in inner})
