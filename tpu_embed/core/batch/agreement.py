"""What the processes of one run tell each other, beside the devices: shapes, and what went wrong.

Enters: a text of this process, or None where it has nothing new to say. Leaves: what all of them
said in the same round. Called by `place.py` for every batch, and by `io/` where files are written
and read. The texts go through the key-value store of `jax.distributed`, so that nothing waits for
the devices.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax

from tpu_embed import departures
from tpu_embed._checks import message
from tpu_embed.core.batch.spec import BatchSpec, StackSpec
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import Layout
from tpu_embed.processes import WAIT_SECONDS, exchange, raise_refusals, refusal_of


class Agreement:
    """One spec for every batch on all processes, and one process's refusal on all of them.

    A round in which every process finds that its part fits what was agreed last costs one wait for
    all of them and one question to the store; only a process whose part does not fit says more.

    Args:
      layout: the engine's; engines that are alike on all processes talk to each other.
    """

    def __init__(self, layout: Layout) -> None:
        tables = [(t.name, t.vocabulary_size) for stack in layout.stacks for t in stack.tables]
        known = repr((tables, [feature.path for feature in layout.features]))
        self._name = f"tpu_embed/{zlib.crc32(known.encode()):08x}"
        self._last: BatchSpec | None = None
        departures.listen()

    def agree(self, wanted: BatchSpec, *, exact: bool) -> BatchSpec:
        """Return the union of what all processes want; the same on each.

        Args:
          wanted: what this process's part fits, of the global batch.
          exact: refuse what is not wanted by all.

        Raises:
          ValueError, TypeError, RuntimeError: another process refused its part, or wants what does
            not go with this; raised by every process.
          RuntimeError: a process did not come within `WAIT_SECONDS`, or ended.
        """
        new = exact or wanted != self._last
        news = json.dumps({"spec": _encode(wanted), "exact": exact}) if new else None
        said = exchange("place", self._name, news, WAIT_SECONDS)
        raise_refusals("place", "refused its part of the batch", said)
        specs = {process: _decode(one["spec"]) for process, one in said.items()}
        if self._last is not None and len(specs) < jax.process_count():
            specs[-1] = self._last
        agreed = _union(specs, exact=any(one["exact"] for one in said.values()))
        self._last = agreed
        return agreed

    def refuse(self, error: Exception) -> None:
        """Tell the other processes that this one raises an error instead of placing its part."""
        exchange("place", self._name, refusal_of(error), WAIT_SECONDS)


def _union(specs: dict[int, BatchSpec], *, exact: bool) -> BatchSpec:
    """Return the union of specs by process; -1 stands for the others.

    Raises:
      ValueError: they are of batches that do not go together, or differ where they must not.
    """
    first = next(iter(specs.values()))
    try:
        agreed = BatchSpec.union(*specs.values())
    except ValueError as error:
        sizes = {one.batch for one in specs.values()}
        expected = "parts of one batch, as large on every device and of like shapes"
        got = f"batches of {sorted(sizes)} in all" if len(sizes) > 1 else f"{error}"
        remedy = "pad the shorter parts with tpu_embed.pad_batch"
        raise ValueError(message("place", expected=expected, got=got, remedy=remedy)) from error
    if exact and any(one != first for one in specs.values()):
        got, remedy = "different ones", "use BatchSpec.union of all processes' specs"
        text = message("spec", expected="the same on all processes", got=got, remedy=remedy)
        raise ValueError(text)
    return agreed


def _encode(spec: BatchSpec) -> Any:
    forms = [[f.batch, f.inner, f.combines, f.width, f.weighted] for f in spec.feature_shapes]
    stacks = [[g.features, g.ids, g.row_capacity, g.partials] for g in spec.stacks]
    return [spec.replicas, forms, stacks]


def _decode(encoded: Any) -> BatchSpec:
    replicas, forms, stacks = encoded
    return BatchSpec(
        replicas,
        tuple(FeatureShape(batch, tuple(inner), *rest) for batch, inner, *rest in forms),
        tuple(StackSpec(tuple(features), *rest) for features, *rest in stacks),
    )
