"""Conversations of the processes about one batch after the other: all place their part, or none.

Input: what a process has to say of its part of a batch: nothing, an error, or that it has no more
batches. Output: what the others say, or an error in every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from tpu_embed._checks import refuse
from tpu_embed.processes.departures import client
from tpu_embed.processes.messages import WAIT_SECONDS, exchange, tell_refusal
from tpu_embed.processes.order import order_of

_END = "no more batches"


class Conversation:
    """What the processes tell each other of batches; where there is one process, nothing.

    Args:
      name: of the conversation, the same in all processes.

    Attributes:
      alone: whether there is one process.
      order: of the calls, the same in all processes; all who take part in a conversation here share
        it.
    """

    def __init__(self, name: str) -> None:
        self._name, self.alone, self.order = name, jax.process_count() == 1, order_of(name)
        if not self.alone:
            client()  # from now on, the others are told if this process ends

    def exchange(self, news: Any) -> dict[int, Any]:
        """Return what the processes say that have news; None is no news.

        Raises:
          ValueError, TypeError, RuntimeError: another process refused its part, or has no more
            batches; raised by every process.
        """
        said = exchange(
            "place",
            self._name,
            news,
            WAIT_SECONDS,
            refused="place: process {} refused its part of the batch",
        )
        ended = [process for process, one in said.items() if one == _END]
        if ended and len(ended) < jax.process_count():
            refuse(
                "place",
                expected="a batch in every process, or in none",
                got=f"no more batches in process {', '.join(map(str, ended))}",
                remedy="give every process equally many batches, and leave their loops at the "
                "same batch",
            )
        return said

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
        if not self.alone:
            tell_refusal("place", self._name, error, WAIT_SECONDS)

    def end(self, reason: BaseException | None = None) -> None:
        """Tell the other processes that this one has no more batches, or why.

        Raises:
          ValueError: another process has one; raised by every process.
          ValueError, TypeError, RuntimeError: another process refused its part.
        """
        if reason is not None:
            self.refuse(reason)
        elif not self.alone:
            self.exchange(_END)
