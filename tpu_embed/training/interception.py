"""Gradients by the activations of a lookup, when all that is known of the model is its loss.

A dummy of zeros per feature is attached to the activations on their way into the loss. The gradient
of the loss by a dummy then equals its gradient by the activations.

Input: activations as a lookup returned them, and a function that computes a loss from them.
Output: the gradient by each feature's activations, in the form that `EmbeddingEngine.update` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpu_embed._checks import refuse, warn_user
from tpu_embed._types import Array, PyTree, as_array
from tpu_embed.core.ids import structure as structures
from tpu_embed.core.lookup import split_activations
from tpu_embed.sparse import full, tapped
from tpu_embed.training.autodiff import checked_loss, gradients, value_and_gradients
from tpu_embed.training.optimizer import TreeOptimizer

Dummies = dict[str, dict[str, Array]]
"""Table name -> feature path -> zeros in the shape of the activations."""

_REMAKE = "make dummies of these activations with create_dummy_table_variables"


def create_dummy_table_variables(
    activations: PyTree, feature_config: Any = None
) -> Dummies:
    """Return zeros like each activation, by table and feature.

    Args:
      activations: `[B, …, D]` per feature, nested as `feature_config`; a `Jagged` counts as its
        values `[S, C, D]`.
      feature_config: any nesting of `FeatureConfig`s, which say which features share a table. With
        None each activation counts as a table of its own, named by its path.

    Returns:
      table name -> feature path (`user/history`) -> zeros of the activation's shape and dtype.
      Tables are in the order of their first feature, features in flattening order.

    Raises:
      TypeError: the activations are in a container of another type than `feature_config`.
      ValueError: other keys or another size than `feature_config`; two activations with one path.

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
        dummies.setdefault(table, {})[path] = full(
            jax.typeof(jnp.asarray(split_activations(leaf)[0])), 0
        )
    return dummies


def hook(activations: PyTree, dummies: Mapping[str, Mapping[str, Array]]) -> PyTree:
    """Return the activations unchanged, and let the cotangent of each flow to its dummy too.

    Args:
      activations: as given to `create_dummy_table_variables`.
      dummies: as `create_dummy_table_variables` returned them. Their values are not read.

    Raises:
      ValueError: the activations have other features, shapes or dtypes than the dummies; two
        activations have one path.

    Example:
      >>> dummies = {"item": {"seen": jnp.zeros(2)}}
      >>> def loss(dummies):
      ...     return (hook({"seen": jnp.array([1.0, 2.0])}, dummies)["seen"] ** 2).sum()
      >>> jax.grad(loss)(dummies)["item"]["seen"].tolist()
      [2.0, 4.0]
    """
    # {"item": {"seen": z}} -> {"seen": z}: a feature path occurs in one table only.
    by_path = {
        path: dummy for table in dummies.values() for path, dummy in table.items()
    }
    leaves = _by_path(activations)
    if by_path.keys() != leaves.keys():
        refuse(
            "hook: activations",
            expected=f"features {sorted(by_path)}",
            got=f"{sorted(leaves)}",
            remedy=_REMAKE,
        )
    hooked = {}
    for path, leaf in leaves.items():
        values, rebuild = split_activations(leaf)
        activation, dummy = as_array(values), as_array(by_path[path])
        if (activation.shape, activation.dtype) != (dummy.shape, dummy.dtype):
            refuse(
                f"hook: activations: {path}",
                expected=f"{dummy.dtype} of shape {dummy.shape}, as its dummy",
                got=f"{activation.dtype} of shape {activation.shape}",
                remedy=_REMAKE,
            )
        hooked[path] = rebuild(tapped(activation, dummy))
    return structures.unflatten(activations, iter(hooked.values()))


def get_gradients_through_dummy_table_variables(
    loss: Callable[..., Array],
    activations: PyTree,
    *args: Any,
    feature_config: Any = None,
    optimizer: TreeOptimizer | None = None,
) -> tuple[Array, PyTree]:
    """Return a loss, and its gradient by each feature's activations.

    A feature without a path to the loss gets zeros and a warning. A table none of whose features
    has a path to the loss is an error.

    Args:
      loss: `loss(activations, *args)`, which returns a float array; it is summed to be
        differentiated.
      activations: `[B, …, D]` per feature, or a `Jagged`, nested as `feature_config`.
      *args: further arguments of the loss, which are not differentiated.
      feature_config: as in `create_dummy_table_variables`; with None every activation must be used.
      optimizer: an optimizer that scales the loss before it is differentiated, as in its
        `compute_gradients`. Give it in a data-parallel step whose loss is a mean over replicas:
        `EmbeddingEngine.update`, which takes the gradients, sums over replicas and does not divide.

    Returns:
      (the loss, unscaled; gradients in the shapes of the activations, `[S, C, D]` for a `Jagged`,
      nested as `feature_config`, or as the activations if that is None).

    Raises:
      TypeError: the activations are in a container of another type than `feature_config`.
      ValueError: other keys or another size than `feature_config`; a loss that is not float; a
        table none of whose features the loss depends on.

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
    # The lookup's activations may be equal on all replicas (tables are shared): gradients must stay
    # this replica's own, since `update` sums them.
    if optimizer is not None:
        activations = optimizer.local(activations)
    dummies = create_dummy_table_variables(activations, feature_config)

    def hooked(dummies):
        value = checked_loss(loss(hook(activations, dummies), *args))
        return (value if optimizer is None else optimizer.scale_loss(value)), value

    # The dummies are one x, a nested dictionary: `found` has the same keys, None if not connected.
    (_, value), (found,) = value_and_gradients(hooked, [dummies])
    for i, name in enumerate(dummies):
        if all(gradient is None for gradient in found[name].values()):
            refuse(
                f"table {name!r} (index {i})",
                expected="a loss that depends on one of its features at least",
                got=f"none for {', '.join(found[name])}: activations computed but not used",
                remedy="use them, or leave the features out (feature_config says which share)",
            )
    by_path = {}
    for name, zeros in dummies.items():
        absent = [path for path, gradient in found[name].items() if gradient is None]
        if absent:
            unused = ", ".join(absent)
            warn_user(
                f"table {name!r}: the loss does not depend on {unused}: zero gradients"
            )
        by_path |= found[name] | {path: zeros[path] for path in absent}
    return value, structures.unflatten(
        nest, (by_path[path] for path, _ in _leaves(nest))
    )


def get_gradients_through_compute_gradients(
    optimizer: TreeOptimizer, loss: Callable[[PyTree], Array], activations: PyTree
) -> PyTree:
    """Return the gradients of a loss by each feature's activations, scaled as an optimizer does.

    Args:
      optimizer: an optimizer that scales the loss, as in its `compute_gradients`: by 1/S where it
        takes the mean over S replicas.
      loss: `loss(activations)`, which returns a float array; it is summed to be differentiated.
      activations: `[B, …, D]` per feature, or a `Jagged`, in any nesting that a feature
        configuration may have.

    Returns:
      gradients nested as the activations, `[S, C, D]` for a `Jagged`, None for a feature without a
      path to the loss.

    Raises:
      ValueError: the loss is not float.
    """
    activations = optimizer.local(activations)
    each = [split_activations(leaf) for _, leaf in _leaves(activations)]

    def scaled(*values):
        given = (
            rebuild(value) for value, (_, rebuild) in zip(values, each, strict=True)
        )
        return optimizer.scale_loss(
            checked_loss(loss(structures.unflatten(activations, given)))
        )

    found = gradients(scaled, [values for values, _ in each])
    return structures.unflatten(activations, iter(found))


def _features(
    activations: PyTree, feature_config: Any
) -> Iterator[tuple[str, str, Any]]:
    """Yield the table's name, the path and the activation of each feature, in flattening order."""
    if feature_config is None:  # the path of a feature is also the name of its table
        yield from ((path, path, leaf) for path, leaf in _by_path(activations).items())
        return
    structure = structures.flatten(feature_config)
    leaves = structure.match(activations, what="activations")
    for path, feature, leaf in zip(
        structure.paths, structure.features, leaves, strict=True
    ):
        yield structure.table_names[structure.table_index(feature)], path, leaf


def _by_path(activations: PyTree) -> dict[str, Any]:
    """Return the activations by path.

    Raises:
      ValueError: two activations have one path.
    """
    # {"a": {"b": x}, "a/b": y} has the path a/b twice.
    leaves = {}
    for path, leaf in _leaves(activations):
        if path in leaves:
            refuse(
                "activations",
                expected="a path of its own for each",
                got=f"several at {path!r}",
                remedy="rename keys that hold a slash",
            )
        leaves[path] = leaf
    return leaves


def _leaves(nest: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path, in the spelling of a `Structure`."""
    # {"user": {"seen": x, "age": y}} -> ("user/age", y), ("user/seen", x); x alone -> "feature".
    inner = structures.children(nest)
    if inner is None:
        yield path or "feature", nest
        return
    for key, child in inner:
        yield from _leaves(child, structures.join_path(path, key))
