"""What the processes of one run tell each other about every batch, beside the devices.

Enters: a text of this process, or None where it has nothing new to say. Leaves: what all of them
said in the same round. Called by `place.py` where there are many processes; the texts go through
the key-value store of `jax.distributed`, so that nothing waits for the devices.
"""

from __future__ import annotations

import collections
import json
import zlib
from typing import Any

import jax
from jax._src import distributed  # the client of the key-value store has no public name

from tpu_embed._checks import message
from tpu_embed.core.batch_spec import BatchSpec, GroupSpec
from tpu_embed.core.ids import FeatureForm
from tpu_embed.core.layout import Layout

WAIT_SECONDS = 600
"""How long a process waits for the others to place their parts of a batch."""

_ERRORS = {"ValueError": ValueError, "TypeError": TypeError}
_rounds: collections.Counter[str] = collections.Counter()


class Agreement:
    """One spec for every batch on all processes, and one process's refusal on all of them.

    A round in which every process finds that its part fits what was agreed last costs one wait for
    all of them and one question to the store; only a process whose part does not fit says more.

    Args:
      layout: the engine's; engines that are alike on all processes talk to each other.
    """

    def __init__(self, layout: Layout) -> None:
        tables = [(t.name, t.vocabulary_size) for group in layout.groups for t in group.tables]
        known = repr((tables, [feature.path for feature in layout.features]))
        self._name = f"tpu_embed/{zlib.crc32(known.encode()):08x}"
        self._last: BatchSpec | None = None

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
        said = _exchange(self._name, news)
        specs = {p: _decode(one["spec"]) for p, one in said.items() if "spec" in one}
        for process, one in sorted(said.items()):
            if "error" in one:
                what = f"place: process {process} refused its part of the batch"
                raise _ERRORS.get(one["kind"], RuntimeError)(f"{what}: {one['error']}")
        if self._last is not None and len(specs) < jax.process_count():
            specs[-1] = self._last
        agreed = _union(specs, exact=any(one["exact"] for one in said.values()))
        self._last = agreed
        return agreed

    def refuse(self, error: Exception) -> None:
        """Tell the other processes that this one raises an error instead of placing its part."""
        refusal = {"error": f"{error}", "kind": type(error).__name__}
        _exchange(self._name, json.dumps(refusal))


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


def _exchange(name: str, news: str | None) -> dict[int, Any]:
    """Wait for all processes; return the news of those that have some, by process."""
    client, number = distributed.global_state.client, _rounds[name]
    if client is None:
        expected, remedy = "jax.distributed", "call jax.distributed.initialize first"
        raise RuntimeError(message("place", expected=expected, got="no client", remedy=remedy))
    if news is not None:
        client.key_value_set(f"{name}/{number}/{jax.process_index()}", news)
    _rounds[name] += 1
    try:
        client.wait_at_barrier(name, WAIT_SECONDS * 1000)
        said = client.key_value_dir_get(f"{name}/{number}/")
    except jax.errors.JaxRuntimeError as error:
        expected = f"all {jax.process_count()} processes to place their parts of batch {number}"
        remedy = "call place, or enqueue, as often and in the same order on every process"
        text = message("place", expected=expected, got=f"{error}", remedy=remedy)
        raise RuntimeError(text) from error
    if number and not jax.process_index():  # all have read the round before this one
        client.key_value_delete(f"{name}/{number - 1}/")
    return {int(key.rsplit("/", 1)[-1]): json.loads(text) for key, text in said}


def _encode(spec: BatchSpec) -> Any:
    forms = [[f.batch, f.inner, f.combines, f.width, f.weighted] for f in spec.forms]
    groups = [[g.features, g.ids, g.rows, g.partials] for g in spec.groups]
    return [spec.replicas, forms, groups]


def _decode(encoded: Any) -> BatchSpec:
    replicas, forms, groups = encoded
    return BatchSpec(
        replicas,
        tuple(FeatureForm(batch, tuple(inner), *rest) for batch, inner, *rest in forms),
        tuple(GroupSpec(tuple(features), *rest) for features, *rest in groups),
    )
