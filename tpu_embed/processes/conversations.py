"""Conversations of the processes about one batch after the other: all place their part, or none.

Input: what a process has to say of its part of a batch: nothing, an error, or that it has no more
batches. Output: what the others say, or an error in every process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import jax

from tpu_embed._checks import message
from tpu_embed.processes.departures import listen
from tpu_embed.processes.messages import WAIT_SECONDS, exchange, raise_refusals, refusal_of
from tpu_embed.processes.turns import turns_of


class Monologue:
    """What `Conversation` is where there is one process: nobody is told anything."""

    alone = True

    def refusals(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def refuse(self, error: BaseException) -> None:
        """Tell nobody."""

    def end(self) -> None:
        """Tell nobody."""


class Conversation:
    """What the processes tell each other of the batches of an engine, or of a model.

    Args:
      name: of the conversation, the same in all processes.

    Attributes:
      alone: False.
      name: see above.
      turns: the order of calls, the same in all processes; all who take part in a conversation here
        share it.
    """

    alone = False

    def __init__(self, name: str) -> None:
        self.name, self.turns = name, turns_of(name)
        listen()

    def exchange(self, news: str | None) -> dict[int, Any]:
        """Return what the processes with news say, by process."""
        return exchange("place", self.name, news, WAIT_SECONDS)

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
        self.exchange(refusal_of(error))

    def end(self) -> None:
        """Tell the other processes that this one has no more batches.

        Raises:
          ValueError: another process has one; raised by every process.
          ValueError, TypeError, RuntimeError: another process refused its part.
        """
        said = self.exchange(json.dumps({"end": True}))
        if not all(said.get(process, {}).get("end") for process in range(jax.process_count())):
            check_all_have_a_batch(said)


def check_all_have_a_batch(said: dict[int, Any]) -> None:
    """Raise the error of a process that refused its part, or that some have no more batches.

    Args:
      said: the messages, by process.
    """
    raise_refusals("place", "refused its part of the batch", said)
    ended = [process for process, one in sorted(said.items()) if "end" in one]
    if ended:
        which = f"process{'es' if len(ended) > 1 else ''} {', '.join(map(str, ended))}"
        expected, got = "a batch in every process, or in none", f"no more batches in {which}"
        remedy = "give every process equally many batches, and leave their loops at the same batch"
        raise ValueError(message("place", expected=expected, got=got, remedy=remedy))
