"""Let several processes place the batches of a model alike: all of them, or none.

Each layer's engine agrees with its counterparts on the shape of its part. But a batch may be
refused before the first of them is asked, or name other layers in one process than in another; then
a process would wait for a conversation that does not come. So the processes exchange a message
before: "as last time", or the layers that are named, or the error.

Input: the layers that this process's part of a batch names, or the error that it raises. Output:
nothing, or an error in every process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from tpu_embed._checks import message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.processes import (
    WAIT_SECONDS,
    Turns,
    check_all_have_a_batch,
    exchange,
    listen,
    refusal_of,
    turns_of,
)


class Alone:
    """What `ModelAgreement` is where there is one process: everybody agrees.

    Args:
      turns: the order of calls.
    """

    alone = True

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def settle(self, paths: Sequence[str]) -> None:
        """Tell nobody."""

    def refusals(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def refuse(self, error: BaseException) -> None:
        """Tell nobody."""

    def end(self) -> None:
        """Tell nobody."""


class ModelAgreement:
    """Lets all processes place a batch for the same layers, or raises an error in all of them.

    Args:
      name: of the conversation, the same in all processes.

    Attributes:
      alone: False.
      turns: the order of calls, the same in all processes.
    """

    alone = False

    def __init__(self, name: str) -> None:
        self._name, self.turns = name, turns_of(name)
        self._last: list[str] = []
        listen()

    def settle(self, paths: Sequence[str]) -> None:
        """Check that all processes name the same layers.

        Args:
          paths: the layers of this process's part.

        Raises:
          ValueError: another process names others; raised by every process.
          ValueError, TypeError, RuntimeError: another process refused its part, or has no more
            batches.
          RuntimeError: a process did not come within `WAIT_SECONDS`, or ended.
        """
        mine = [*paths]
        said = self._exchange(None if mine == self._last else json.dumps({"layers": mine}))
        check_all_have_a_batch(said)
        named = [said.get(p, {}).get("layers", self._last) for p in range(jax.process_count())]
        for process, theirs in enumerate(named):
            if theirs != named[0]:
                expected, got = f"layers {named[0]}", f"{theirs} in process {process}"
                remedy = "name the same layers in every process"
                raise ValueError(message("features", expected=expected, got=got, remedy=remedy))
        self._last = mine

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Tell the other processes of an error in the block."""
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def refuse(self, error: BaseException) -> None:
        """Tell the other processes that this one raises an error and does not place its part."""
        self._exchange(refusal_of(error))

    def end(self) -> None:
        """Tell the other processes that this one has no more batches.

        Raises:
          ValueError: another process has one; raised by every process.
          ValueError, TypeError, RuntimeError: another process refused its part.
        """
        said = self._exchange(json.dumps({"end": True}))
        if not all(said.get(process, {}).get("end") for process in range(jax.process_count())):
            check_all_have_a_batch(said)

    def _exchange(self, news: str | None) -> dict[int, Any]:
        return exchange("place", self._name, news, WAIT_SECONDS)


def agreement_of(engines: Mapping[str, EmbeddingEngine]) -> ModelAgreement:
    """Return the agreement of a model; models of the same paths and tables have one together.

    Args:
      engines: those of its layers, by path.
    """
    known = [
        (path, name, table.vocabulary_size)
        for path, engine in engines.items()
        for name, table in engine.table_configs.items()
    ]
    return _agreement(f"tpu_embed/model/{zlib.crc32(repr(known).encode()):08x}")


@functools.cache
def _agreement(name: str) -> ModelAgreement:
    return ModelAgreement(name)
