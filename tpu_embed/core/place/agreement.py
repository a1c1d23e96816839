"""Agree between processes on the static shape of each batch.

With several processes, each one sees only its own part of a batch, but all must run the same
program. So before a batch is sent, the processes exchange the specs that their parts need, and all
use the union. If one process refuses its part, for example because of a bad id, all of them raise.

Input: the spec that this process's part needs, or the error it raises. Output: the spec that all
processes use.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax

from tpu_embed._checks import message
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.layout import Layout
from tpu_embed.core.place.rooms import Rooms, decode_spec, encode_spec
from tpu_embed.processes import (
    WAIT_SECONDS,
    Conversation,
    Monologue,
    check_all_have_a_batch,
    exchange_bytes,
)


class Alone(Monologue):
    """What `Agreement` is where there is one process: everybody agrees.

    Attributes:
      alone: True.
      turns: None; no other process waits.
    """

    turns: None = None

    def settle(self, needed: BatchSpec, requested: BatchSpec | None, rooms: Rooms) -> BatchSpec:
        """Return the spec that a batch gets; see `Agreement.settle`."""
        return requested or rooms.settle(needed)

    def share(self, part: bytes) -> list[bytes]:
        """Return the only part."""
        return [part]


class Agreement(Conversation):
    """Gives all processes the same spec for a batch, or an error on all of them.

    Usually every part fits the spec that was agreed last. Then no process has news to send, and
    the round costs one wait for all processes and one request to the key-value store.

    Args:
      layout: the engine's layout. Engines with the same tables and features on all processes form
        one conversation.

    Attributes:
      alone: False.
      turns: the order of calls, the same in all processes; all engines of one conversation share
        it.
    """

    def __init__(self, layout: Layout) -> None:
        tables = [(t.name, t.vocabulary_size) for stack in layout.stacks for t in stack.tables]
        known = repr((tables, [feature.path for feature in layout.features]))
        # The name must be the same on all processes, so it is made of what they declare alike.
        super().__init__(f"tpu_embed/{zlib.crc32(known.encode()):08x}")
        self._last: BatchSpec | None = None

    def settle(self, needed: BatchSpec, requested: BatchSpec | None, rooms: Rooms) -> BatchSpec:
        """Return the spec that a batch gets in all processes.

        Args:
          needed: what this process's part of the batch needs exactly.
          requested: the spec that the user gave, the same in all processes; None without one.
          rooms: the specs of earlier batches.

        Raises:
          ValueError, TypeError, RuntimeError: as for `agree`.
        """
        wanted = requested or rooms.propose(needed)
        agreed, exact = self.agree(wanted, exact=requested is not None)
        return agreed if exact else rooms.accept(agreed)

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
        # Silence means "what was agreed last is enough for me".
        new = exact or wanted != self._last
        news = json.dumps({"spec": encode_spec(wanted), "exact": exact}) if new else None
        said = self.exchange(news)
        check_all_have_a_batch(said)
        specs = {process: decode_spec(one["spec"]) for process, one in said.items()}
        # Key -1 holds the last agreed spec, for the processes that sent nothing.
        if self._last is not None and len(specs) < jax.process_count():
            specs[-1] = self._last
        exact = any(one["exact"] for one in said.values())
        self._last = _union(specs, exact=exact)
        return self._last, exact

    def share(self, part: bytes) -> list[bytes]:
        """Return the parts that all processes give, by process.

        A batch for which this is called is placed in two rounds: this one, then `agree`.

        Raises:
          ValueError, TypeError, RuntimeError: as for `agree`.
        """
        said = exchange_bytes("place", self.name, _PART + part, WAIT_SECONDS)
        check_all_have_a_batch(_read(said))
        return [said[process][len(_PART) :] for process in sorted(said)]

    def exchange(self, news: str | None) -> dict[int, Any]:
        text = None if news is None else news.encode()
        return _read(exchange_bytes("place", self.name, text, WAIT_SECONDS))


_PART = b"\0"
"""What a part begins with; other messages are JSON, which never does."""


def _read(said: dict[int, bytes]) -> dict[int, Any]:
    """Return the messages of a round as JSON values; an empty one for a part."""
    return {p: {} if one.startswith(_PART) else json.loads(one) for p, one in said.items()}


def _union(specs: dict[int, BatchSpec], *, exact: bool) -> BatchSpec:
    """Return the union of the specs of all processes.

    Args:
      specs: by process; key -1 holds the last agreed spec, for processes that sent nothing.
      exact: whether the specs must be equal.

    Raises:
      ValueError: the specs have no union, or differ although they must be equal.
    """
    first = next(iter(specs.values()))
    try:
        agreed = BatchSpec.union(*specs.values())
    except ValueError as error:
        # The first feature whose parts differ in size speaks for all.
        by_feature = zip(*(one.sizes for one in specs.values()), strict=True)
        different = next((sorted({*sizes}) for sizes in by_feature if len({*sizes}) > 1), None)
        expected = "parts of one batch, as large on every device and of like shapes"
        got = f"batches of {different} in all" if different else f"{error}"
        remedy = "pad the shorter parts with tpu_embed.pad_batch"
        raise ValueError(message("place", expected=expected, got=got, remedy=remedy)) from error
    if exact and any(one != first for one in specs.values()):
        got, remedy = "different ones", "use BatchSpec.union of all processes' specs"
        text = message("spec", expected="the same on all processes", got=got, remedy=remedy)
        raise ValueError(text)
    return agreed
