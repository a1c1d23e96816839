"""The right to place one batch, and the order in which batches are placed.

A `Turn` is drawn where the order of batches is decided, and may be used later, in another thread
(`processes/turns.py`). The order matters to several processes, which place their parts together,
and to maps of living vocabularies, which learn from one batch after another.

Input: calls that draw turns. Output: batches, placed in the order of the turns.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from tpu_embed._signals import SignalsDeferred
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.core.place.agreement import Agreement, Alone
from tpu_embed.core.place.placer import Placer
from tpu_embed.processes import Turns
from tpu_embed.vocabulary import Vocabularies


class Order:
    """The order in which the batches of an engine are placed; none where it does not matter.

    Args:
      agreement: with the other processes.
      vocabularies: the maps of living vocabularies; None without them.
    """

    def __init__(self, agreement: Agreement | Alone, vocabularies: Vocabularies | None) -> None:
        self._vocabularies, self._alone = vocabularies, agreement.alone
        self._turns: Turns | None = agreement.turns if vocabularies is None else vocabularies.turns

    def draw(self, *, training: bool) -> tuple[int, int]:
        """Return the number of the next turn, and the step of the maps that is admitted now.

        The step is pinned until the turn ends.

        Args:
          training: False for a batch that will only be looked up. Where no other process waits for
            it, no map changes by it and any time will do: nobody waits until it is placed.
        """
        if self._turns is None:
            return 0, 0
        number = self._turns.draw()
        step = 0 if self._vocabularies is None else self._vocabularies.pin(number)
        if self._alone and not training:
            self._turns.release(number)
        return number, step

    @contextlib.contextmanager
    def use(self, number: int, *, training: bool) -> Iterator[None]:
        """Wait for a turn, and end it with the block."""
        try:
            if self._turns is None or (self._alone and not training):
                yield  # there is no order, or the turn ended when it was drawn
            else:
                with self._turns.use(number):
                    yield
        finally:
            self._unpin(number)

    @contextlib.contextmanager
    def leave_out(self, number: int) -> Iterator[None]:
        """Use a turn to place nothing: wait for it if other processes are to be told so."""
        if self._alone:
            self.release(number)
            yield
        else:
            with self.use(number, training=True):
                yield

    def hold(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Note that this thread will use a turn before the block ends; see `Turns.hold`."""
        return contextlib.nullcontext() if self._turns is None else self._turns.hold(number)

    def release(self, number: int) -> None:
        """End a turn that will not be used; every process must do so."""
        if self._turns is not None:
            self._turns.release(number)
            self._unpin(number)

    def give_up(self, number: int) -> None:
        """End a turn that something has kept from being used; one that has ended is left alone."""
        if self._turns is not None:
            self._turns.give_up(number)
            self._unpin(number)

    def _unpin(self, number: int) -> None:
        if self._vocabularies is not None:
            self._vocabularies.unpin(number)


class Turn:
    """The right to place one batch, after all batches whose turns were drawn before.

    With several processes, each turn must be used in the same way by all of them, once: `place`,
    `refuse` or `end` talk to the other processes, `release` does not. A turn that is lost, because
    an interrupt came before it was used, is given up, so that later ones do not wait for it.

    Args:
      placer: makes the batch.
      order: draws the turn.
      training: False for a batch that is only looked up.

    Attributes:
      shapes: once it was used to place a batch: the shapes that batches get from then on, as JSON
        for `Intake.expect`; None if no feature is jagged.
    """

    def __init__(self, placer: Placer, order: Order, *, training: bool = True) -> None:
        self._placer, self._order, self._training = placer, order, training
        self.shapes: Any = None
        with SignalsDeferred():
            self._number, self._step = order.draw(training=training)
            self._if_lost = weakref.finalize(self, order.give_up, self._number)
            self._if_lost.atexit = False

    def place(
        self,
        features: PyTree,
        weights: PyTree | None = None,
        spec: BatchSpec | None = None,
        *,
        step: int = 0,
        as_of: int | None = None,
    ) -> Batch:
        """Place a batch; see `EmbeddingEngine.place`.

        Args:
          features: the ids.
          weights: their weights, or None.
          spec: the shape of the batch, or None.
          step: of living vocabularies, whose rows a batch that is only looked up gets: the training
            batches up to this one are admitted when it is looked up. It gets those of the step that
            was admitted when the turn was drawn if that is later.
          as_of: the step itself, in place of this choice; it is pinned until the batch is placed.
        """
        try:
            with self._order.use(self._number, training=self._training):
                if self._training:
                    batch = self._placer.place(features, weights, spec)
                else:
                    step = max(step, self._step) if as_of is None else as_of
                    batch = self._placer.place_lookup(features, weights, spec, step)
                self.shapes = self._placer.shapes()
                return batch
        except BaseException:
            self._order.give_up(self._number)  # it may not have come to be used
            raise
        finally:
            self._if_lost.detach()  # Python would drop a Ctrl-C that comes while it finalizes

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Note that this thread will use the turn before the block ends.

        In the block, whatever has to wait for a later turn raises `RuntimeError`: without that it
        would wait for ever.
        """
        return self._order.hold(self._number)

    def refuse(self, error: BaseException) -> None:
        """Place nothing because of an error; the other processes raise it."""
        with self._order.leave_out(self._number):
            self._placer.agreement.refuse(error)

    def end(self) -> None:
        """Place nothing because there are no more batches.

        Raises:
          ValueError: another process has one.
        """
        with self._order.leave_out(self._number):
            self._placer.agreement.end()

    def release(self) -> None:
        """Place nothing, and tell the other processes nothing; they must release the turn too."""
        self._order.release(self._number)
