"""Build a state from parts that were another one's: those of a checkpoint, or of another engine.

Rows are written into arrays that are blank at first. Everything else that training changes is
small, and all devices have it: counters, which are matched by the features that they count, and
what a state says of its maps.

Input: a layout, and what the other state had. Output: arrays on the devices of the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._types import Array, PyTree
from tpu_embed.core.layout import Layout, MeshAxes
from tpu_embed.core.state.new_rows import MAP_VERSION
from tpu_embed.vocabulary import MapStates


def put_everywhere(values: PyTree, axes: MeshAxes) -> PyTree:
    """Put NumPy arrays, equal in all processes, on every device; no process waits for another."""
    sharding = axes.sharding(())
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), values
    )


def matched_counters(
    found: Mapping[str, Any], paths: Sequence[str], forms: Mapping[str, Any], layout: Layout
) -> dict[str, np.ndarray]:
    """Return the counters of a state; 0 where there was none.

    Args:
      found: those of the other state, by name: a number, or one per feature.
      paths: the features of the other state, in the order of these numbers.
      forms: shape and dtype of the counters that are wanted, by name.
      layout: has the features that they count, which are matched by their paths.
    """
    wanted, counters = [feature.path for feature in layout.features], {}
    for name, form in forms.items():
        counters[name] = np.zeros(form.shape, form.dtype)
        count = found.get(name, 0)
        # found [F], in the order of `paths`; wanted [F'], in the order of `wanted`
        if np.shape(count) == (len(paths),) and form.shape == (len(wanted),):
            by_path = dict(zip(paths, count, strict=True))
            counters[name][:] = [by_path.get(path, 0) for path in wanted]
        elif np.shape(count) == form.shape:
            counters[name][...] = count
    return counters


def vocabulary_of_maps(
    states: MapStates, key: Mapping[str, np.ndarray] | None, layout: Layout
) -> dict[str, Array]:
    """Return the `vocabulary` of the state that belongs to maps.

    Args:
      states: of the maps.
      key: the data of the random key of new rows, by its kind; None: none is drawn any more.
      layout: the engine's layout.
    """
    (step,) = {int(one.step) for one in states.maps.values()}
    # When a row was taken last is not known; batches from before are refused anyway.
    steps = np.zeros(layout.version_size, np.int32)
    steps[: 2 + len(layout.living)] = step
    steps[1] = states.history
    return put_everywhere({**(key or _any_key()), MAP_VERSION: steps}, layout.axes)


def _any_key() -> dict[str, np.ndarray]:
    key = jax.random.key(0)
    return {f"{jax.random.key_impl(key)}": np.asarray(jax.random.key_data(key))}
