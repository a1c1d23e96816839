"""Several inputs of one layer, looked up together: histories and candidates of the same table.

A layer's engine has one feature, and its lookup is one equation with one float result. Inputs that
are placed together, by name, have an engine of their own, with a feature for each and the same
table. What it looks up is packed in one array: for each replica the vectors of one input after
those of another. With 2 replicas, 3 events of a history each (C = 3) and 4 candidates, `[4, D]`,

    history [2, 3, D], candidates [4, D] = [2, 2, D]     packed [2, 5, D]

Input: ids by name, and the engine of a layer. Output: activations by name; gradients likewise.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import Array
from tpu_embed.config import FeatureConfig
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import read_ids
from tpu_embed.core.lookup import Jagged, row_splits
from tpu_embed.core.state import TableState

_Kinds = tuple[tuple[str, bool], ...]
_engines: weakref.WeakKeyDictionary[EmbeddingEngine, dict[_Kinds, EmbeddingEngine]]
_engines = weakref.WeakKeyDictionary()
"""By the engine of a layer, those of inputs by name: each name, and whether it has one id each."""
_several: weakref.WeakSet[EmbeddingEngine] = weakref.WeakSet()


def engine_of_inputs(own: EmbeddingEngine, inputs: Mapping[str, Any]) -> EmbeddingEngine:
    """Return the engine for inputs by name; it is made when names come for the first time.

    Args:
      own: the engine of a layer.
      inputs: the ids of each input. One id per example, `[B]`, is looked up as it is, whatever the
        layer makes of bags; anything else as the layer's own ids.

    Raises:
      ValueError: there are no inputs, or a name is not a string.
    """
    if not inputs or not all(isinstance(name, str) for name in inputs):
        got = f"{list(inputs)}"
        raise ValueError(message("ids", expected="ids by name, a string", got=got))
    kinds = tuple((name, _is_single(name, inputs[name])) for name in sorted(inputs))
    made = _engines.setdefault(own, {})
    if kinds not in made:
        config, axes = own.layout.features[0].config, own.layout.axes
        single = dataclasses.replace(config, jagged=False, max_sequence_length=0, keep="first")
        features = {name: single if is_single else config for name, is_single in kinds}
        made[kinds] = _make(features, own, axes)
        _several.add(made[kinds])
    return made[kinds]


def _make(features: dict[str, FeatureConfig], own: EmbeddingEngine, axes: Any) -> EmbeddingEngine:
    optimizer, blocks = own.layout.stacks[0].optimizer, own.layout.sum_blocks
    return EmbeddingEngine(
        features,
        optimizer,
        mesh=axes.mesh,
        batch_axes=axes.batch_axes,
        sum_blocks=blocks,
        vocabularies=own.vocabularies,
    )


def _is_single(name: str, ids: Any) -> bool:
    read = read_ids(f"ids {name!r}", ids)
    return isinstance(read, np.ndarray) and read.ndim == 1


def engine_of_batch(own: EmbeddingEngine, batch: Batch) -> EmbeddingEngine:
    """Return the engine that placed a batch: a layer's own, or one for inputs by name."""
    for one in _engines.get(own, {}).values():
        if batch.placed_for in (one.layout.placed_for(updates=u) for u in (False, True)):
            return one
    return own


def is_several(engine: EmbeddingEngine) -> bool:
    """Tell whether an engine is one for inputs by name."""
    return engine in _several


def pack(found: Mapping[str, Any], engine: EmbeddingEngine) -> Array:
    """Return the activations of all inputs in one array `[S, n, D]`."""
    axes = engine.layout.axes
    dim = engine.layout.stacks[0].dim
    parts = []
    for name in sorted(found):
        one = found[name]
        if isinstance(one, Jagged):
            parts.append(one.values)
        else:
            size = one.size // (axes.replicas * dim)
            parts.append(axes.reshape(one, (axes.replicas, size, dim)))
    return jnp.concatenate(parts, axis=1)


def unpack(packed: Array, spec: BatchSpec, engine: EmbeddingEngine) -> dict[str, Array]:
    """Return the arrays of the inputs by name: `[S, C, D]` of a jagged one, else `[B, …, D]`."""
    axes, at, found = engine.layout.axes, 0, {}
    for feature, shape in zip(engine.layout.features, spec.feature_shapes, strict=True):
        size = shape.capacity or 0
        if not shape.has_places:
            size = shape.batch // axes.replicas * shape.bags
        part = packed[:, at : at + size]
        at += size
        if not shape.has_places:
            part = axes.reshape(part, (shape.batch, *shape.inner, packed.shape[-1]))
        found[feature.path] = part
    return found


def name_activations(packed: Array, batch: Batch, engine: EmbeddingEngine) -> dict[str, Any]:
    """Return the activations by name, jagged ones as `Jagged`."""
    arrays = unpack(packed, batch.spec, engine)
    splits = row_splits(batch, batch.layout_in(engine.layout))
    names = [feature.path for feature in engine.layout.features]
    jagged = {names[f]: Jagged(arrays[names[f]], one) for f, one in splits.items()}
    return {**arrays, **jagged}


def update(engine: EmbeddingEngine, state: TableState, batch: Batch, gradient: Array) -> TableState:
    """Return the state after an update by the gradient of what `pack` has returned.

    Args:
      engine: an engine for inputs by name.
      state: of the layer, whose counters are of one feature.
      batch: the batch.
      gradient: `[S, n, D]`.
    """
    # The ids of a placed batch are valid: there are none to be counted.
    zeros = jnp.zeros(len(engine.layout.features), jnp.int32)
    own = dataclasses.replace(state, counters={**state.counters, "bad_ids": zeros})
    new = engine.update(own, batch, unpack(gradient, batch.spec, engine))
    counters = {**new.counters, "bad_ids": state.counters["bad_ids"]}
    return dataclasses.replace(new, counters=counters)
