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
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.layout import Layout
from tpu_embed.core.place.rooms import decode_spec
from tpu_embed.processes import (
    WAIT_SECONDS,
    Conversation,
    Monologue,
    Turns,
    check_all_have_a_batch,
    exchange_bytes,
)


class Alone(Monologue):
    """What `Agreement` is where there is one process: everybody agrees.

    Attributes:
      alone: True.
      turns: an order that no other process waits for.
    """

    def __init__(self) -> None:
        self.turns = Turns(with_others=False)

    def agree(self, wanted: BatchSpec, *, exact: bool) -> tuple[BatchSpec, bool]:
        """Return what is wanted; see `Agreement.agree`."""
        return wanted, exact

    def share(self, arrays: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
        """Return the only arrays."""
        return [arrays]


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
        news = json.dumps({"spec": wanted, "exact": exact}, default=vars) if new else None
        said = self.exchange(news)
        check_all_have_a_batch(said)
        specs = {process: decode_spec(one["spec"]) for process, one in said.items()}
        # Key -1 holds the last agreed spec, for the processes that sent nothing.
        if self._last is not None and len(specs) < jax.process_count():
            specs[-1] = self._last
        exact = any(one["exact"] for one in said.values())
        self._last = _union(specs, exact=exact)
        return self._last, exact

    def share(self, arrays: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
        """Return the arrays `[n]` that all processes give, by process.

        A batch for which this is called is placed in two rounds: this one, then `agree`.

        Args:
          arrays: as many in every process.

        Raises:
          ValueError, TypeError, RuntimeError: as for `agree`.
        """
        # A line of JSON says how to take the bytes of the arrays apart that follow.
        head = json.dumps({"arrays": [(one.dtype.str, one.nbytes) for one in arrays]})
        news = b"".join([head.encode(), b"\n", *(one.tobytes() for one in arrays)])
        said = exchange_bytes("place", self.name, news, WAIT_SECONDS)
        heads = _heads(said)
        check_all_have_a_batch(heads)
        parts = []
        for process in sorted(said):
            at, part = said[process].index(b"\n") + 1, []
            for dtype, size in heads[process]["arrays"]:
                part.append(np.frombuffer(said[process][at : at + size], dtype))
                at += size
            parts.append(part)
        return parts

    def exchange(self, news: str | None) -> dict[int, Any]:
        text = None if news is None else news.encode()
        return _heads(exchange_bytes("place", self.name, text, WAIT_SECONDS))


def _heads(said: dict[int, bytes]) -> dict[int, Any]:
    """Return the first line of each message of a round: a JSON value, which may be all of it."""
    return {process: json.loads(one.partition(b"\n")[0]) for process, one in said.items()}


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
        expected = "parts of one batch, as large on every device and of like shapes"
        got = f"batches of {different} in all" if different else f"{error}"
        remedy = "pad the shorter parts with tpu_embed.pad_batch"
        raise ValueError(message("place", expected=expected, got=got, remedy=remedy)) from error
    if exact and any(one != agreed for one in specs.values()):
        got, remedy = "different ones", "use BatchSpec.union of all processes' specs"
        text = message("spec", expected="the same on all processes", got=got, remedy=remedy)
        raise ValueError(text)
    return agreed
