"""The shapes that an engine has given to its batches, as a JSON value for a checkpoint.

A jagged feature has room for C events on a device, and C is remembered from batch to batch
(`rooms.py`). A network that sums over the places sums in an order that depends on C, so a run that
was restored has the bits of one that was not only if it remembers the same shapes.

Input: the specs of an engine's batches. Output: JSON; and back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from tpu_embed._checks import is_int, message
from tpu_embed.core.batch import BatchSpec, Routed, StackSpec
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import Layout


def encode_shapes(specs: list[BatchSpec]) -> list[Any]:
    """Return specs as a JSON value."""
    return [[{"spec": encode_spec(spec)} for spec in specs]]


def decode_shapes(value: Any, layout: Layout) -> list[BatchSpec]:
    """Return specs; none if they are of an engine with other features, stacks or devices.

    Raises:
      ValueError: it is not what `encode_shapes` returned.
    """
    try:
        # Version 0.2.0 has written several lists, and more of each spec.
        specs = [decode_spec(one["spec"]) for some in value for one in some]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        remedy = "give what get_state returned"
        text = message("shapes", expected="those of an engine", got=repr(error), remedy=remedy)
        raise ValueError(text) from error
    # Those of another layout are no error: a checkpoint may be restored on other devices or with
    # other features. The room of its batches is then found anew.
    return specs if all(_is_of(spec, layout) for spec in specs) else []


def encode_spec(spec: BatchSpec) -> dict[str, Any]:
    """Return a spec as a JSON value."""
    shapes, stacks = map(_fields, spec.feature_shapes), map(_fields, spec.stacks)
    numbers = {"replicas": spec.replicas, "routed": spec.routed}
    return numbers | {"feature_shapes": list(shapes), "stacks": list(stacks)}


def _fields(one: FeatureShape | StackSpec) -> dict[str, Any]:
    """Return the fields by name; JSON has lists in place of tuples."""
    fields = dataclasses.asdict(one)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


def decode_spec(one: dict[str, Any]) -> BatchSpec:
    """Return the spec that `encode_spec` was given."""
    if one["routed"] not in get_args(Routed):
        expected, got = f"one of {get_args(Routed)}", repr(one["routed"])
        raise ValueError(message("routed", expected=expected, got=got))
    shapes = tuple(_shape(**shape) for shape in one["feature_shapes"])
    stacks = tuple(_stack(**stack) for stack in one["stacks"])
    return BatchSpec(_count(one["replicas"]), shapes, stacks, one["routed"])


def _shape(
    *, batch: Any, inner: Any, combines: Any, width: Any, weighted: Any, capacity: Any
) -> FeatureShape:
    if not isinstance(combines, bool) or not isinstance(weighted, bool):
        got = f"{combines!r}, {weighted!r}"
        raise TypeError(message("combines, weighted", expected="bools", got=got))
    width, capacity = (None if n is None else _count(n) for n in (width, capacity))
    inner = tuple(map(_count, inner))
    return FeatureShape(_count(batch), inner, combines, width, weighted, capacity)


def _stack(*, features: Any, entries: Any = 0, **sizes: Any) -> StackSpec:
    del entries  # version 0.2.0 has written them
    return StackSpec(tuple(map(_count, features)), **{name: _count(n) for name, n in sizes.items()})


def _count(value: Any) -> int:
    # Devices number the places of a batch in 32 bits, so no room is larger. A position in which
    # a digit has changed must not make the next batch ask for all memory.
    if not is_int(value) or not 0 <= value < 2**31:
        raise ValueError(message("a size", expected="an integer in [0, 2³¹)", got=repr(value)))
    return int(value)


def _is_of(spec: BatchSpec, layout: Layout) -> bool:
    """Tell whether batches of an engine with this layout may have a spec."""
    # Capacities may be any, because they are what is remembered. The replicas that share a batch,
    # the features of each stack, and which of them are jagged are not.
    stacks = [stack.features for stack in spec.stacks]
    owned = [layout.features_of(g) for g in range(len(layout.stacks))]
    jagged = [shape.capacity is not None for shape in spec.feature_shapes]
    declared = [feature.config.jagged for feature in layout.features]
    return (spec.replicas, stacks, jagged) == (layout.axes.replicas, owned, declared)
