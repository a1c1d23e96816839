"""Let several processes place the batches of a model alike: all of them, or none.

Each layer's engine agrees with its counterparts on the shape of its part. But a batch may be
refused before the first of them is asked, or name other layers in one process than in another; then
a process would wait for a conversation that does not come. So the processes exchange a message
before: "as last time", or the layers that are named, or the error.

Input: the layers that this process's part of a batch names, or the error that it raises. Output:
nothing, or an error in every process.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence

import jax

from tpu_embed._checks import message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.processes import Conversation, Monologue, Turns, check_all_have_a_batch


class Alone(Monologue):
    """What `ModelAgreement` is where there is one process: everybody agrees.

    Args:
      turns: the order of calls.
    """

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def settle(self, paths: Sequence[str]) -> None:
        """Tell nobody."""


class ModelAgreement(Conversation):
    """Lets all processes place a batch for the same layers, or raises an error in all of them.

    Args:
      name: of the conversation, the same in all processes.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._last: list[str] = []

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
        said = self.exchange(None if mine == self._last else json.dumps({"layers": mine}))
        check_all_have_a_batch(said)
        named = [said.get(p, {}).get("layers", self._last) for p in range(jax.process_count())]
        for process, theirs in enumerate(named):
            if theirs != named[0]:
                expected, got = f"layers {named[0]}", f"{theirs} in process {process}"
                remedy = "name the same layers in every process"
                raise ValueError(message("features", expected=expected, got=got, remedy=remedy))
        self._last = mine


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
