"""Agree between processes on the static shape of each batch.

With several processes, each one sees only its own part of a batch, but all must run the same
program. So before a batch is sent, the processes exchange the specs that their parts need, and all
use the union. If one process refuses its part, for example because of a bad id, all of them raise.

Input: the spec that this process's part needs, or the error it raises. Output: the spec that all
processes use.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.core.batch import BatchSpec, Routed
from tpu_embed.core.layout import Layout
from tpu_embed.processes import Conversation


class Agreement(Conversation):
    """Gives all processes the same spec for a batch, or an error on all of them.

    Usually every part fits the spec that was agreed last. Then no process has news to send, and
    the round costs one wait for all processes and one request to the key-value store.

    Args:
      layout: the engine's layout. Engines with the same tables and features on all processes form
        one conversation for each kind of batch.
      routed: what of these batches is routed.

    Attributes:
      alone, order: see `Conversation`.
    """

    def __init__(self, layout: Layout, routed: Routed) -> None:
        tables = [(t.name, t.vocabulary_size) for stack in layout.stacks for t in stack.tables]
        known = repr((tables, [feature.path for feature in layout.features], routed))
        # The name must be the same on all processes, so it is made of what they declare alike.
        super().__init__(f"tpu_embed/{zlib.crc32(known.encode()):08x}")
        self._last: BatchSpec | None = None

    def agree(self, wanted: BatchSpec, *, exact: bool) -> tuple[BatchSpec, bool]:
        """Return the union of the specs that all processes want, and whether it must be exact.

        Both are the same on each process.

        Args:
          wanted: the spec of the global batch that this process's part fits.
          exact: whether all processes must want the same spec.

        Raises:
          ValueError, TypeError, RuntimeError: another process refused its part or has no more
            batches, or the wanted specs have no union; raised by every process.
          RuntimeError: a process did not come within `WAIT_SECONDS`, or ended.
        """
        if self.alone:
            return wanted, exact
        # Silence means "what was agreed last is enough for me".
        new = exact or wanted != self._last
        said = self.exchange((wanted, exact) if new else None)
        specs = {process: spec for process, (spec, _) in said.items()}
        # Key -1 holds the last agreed spec, for the processes that sent nothing.
        if self._last is not None and len(specs) < jax.process_count():
            specs[-1] = self._last
        exact = any(one for _, one in said.values())
        self._last = _union(specs, exact=exact)
        return self._last, exact

    def share(self, arrays: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
        """Return the arrays `[n]` that all processes give, by process.

        A batch for which this is called is placed in two rounds: this one, then `agree`. They
        cannot be one: the room that a part needs depends on the rows of its keys, and what rows
        unknown keys get depends on those of all parts.

        Args:
          arrays: as many in every process.

        Raises:
          ValueError, TypeError, RuntimeError: as for `agree`.
        """
        if self.alone:
            return [arrays]
        return [one["arrays"] for one in self.exchange({"arrays": arrays}).values()]


def _union(specs: dict[int, BatchSpec], *, exact: bool) -> BatchSpec:
    """Return the union of the specs of all processes.

    Args:
      specs: by process; key -1 holds the last agreed spec, for processes that sent nothing.
      exact: whether the specs must be equal.

    Raises:
      ValueError: the specs have no union, or differ although they must be equal.
    """
    try:
        agreed = BatchSpec.union(*specs.values())
    except ValueError as error:
        # The first feature whose parts differ in size speaks for all.
        by_feature = zip(*(one.sizes for one in specs.values()), strict=True)
        different = next((sorted({*sizes}) for sizes in by_feature if len({*sizes}) > 1), None)
        refuse(
            "place",
            expected="parts of one batch, as large on every device and of like shapes",
            got=f"batches of {different} in all" if different else f"{error}",
            remedy="pad the shorter parts with tpu_embed.pad_batch",
            cause=error,
        )
    if exact and any(one != agreed for one in specs.values()):
        refuse(
            "spec",
            expected="the same on all processes",
            got="different ones",
            remedy="use BatchSpec.union of all processes' specs",
        )
    return agreed
