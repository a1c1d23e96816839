"""The right to place one batch, in the order in which batches are placed.

A `Turn` is drawn where the order of batches is decided, and may be used later, in another thread
(`processes/turns.py`). The order matters to several processes, which place their parts together,
and to maps of living vocabularies, which learn from one batch after another.

Input: calls that draw turns. Output: batches, placed in the order of the turns.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

from tpu_embed._signals import SignalsDeferred
from tpu_embed._types import PyTree
from tpu_embed.core.batch import Batch, BatchSpec
from tpu_embed.processes import Turns
from tpu_embed.vocabulary import Vocabularies


class Turn:
    """The right to place one batch, after all batches whose turns were drawn before.

    With several processes, each turn must be used in the same way by all of them, once: `place`,
    `refuse` or `end` talk to the other processes, `release` does not. A turn that is lost, because
    an interrupt came before it was used, is given up, so that later ones do not wait for it.

    The step of the maps that is admitted when the turn is drawn is pinned until it ends.

    Args:
      intake: the `Intake`, which makes the batch.
      training: False for a batch that is only looked up. Where no other process waits for it, no
        map changes by it and any time will do: nobody waits until it is placed.

    Attributes:
      shapes: once it was used to place a batch: the shapes that batches get from then on, as JSON
        for `Intake.expect`; None if no feature is jagged.
    """

    def __init__(self, intake: Any, *, training: bool = True) -> None:
        self._intake, self._training = intake, training
        self.shapes: Any = None
        alone, maps = intake.agreement.alone, intake.vocabularies
        self._turns = intake.agreement.turns if maps is None else maps.turns
        self._waits = not alone or (training and maps is not None)
        with SignalsDeferred():
            self._number = self._turns.draw()
            self._step = 0 if maps is None else maps.pin(self._number)
            if not self._waits:
                self._turns.release(self._number)
            self._give_up = functools.partial(_give_up, self._turns, maps, self._number)
            self._if_lost = weakref.finalize(self, self._give_up)
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
            with self._turns.use(self._number) if self._waits else contextlib.nullcontext():
                of_step = max(step, self._step) if as_of is None else as_of
                of_step = None if self._training else of_step
                batch = self._intake.place_now(features, weights, spec, of_step)
                self.shapes = self._intake.shapes()
                return batch
        finally:
            self._give_up()  # it may not have come to be used
            self._if_lost.detach()  # Python would drop a Ctrl-C that comes while it finalizes

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Note that this thread will use the turn before the block ends.

        In the block, whatever has to wait for a later turn raises `RuntimeError`: without that it
        would wait for ever.
        """
        return self._turns.hold(self._number)

    def refuse(self, error: BaseException) -> None:
        """Place nothing because of an error; the other processes raise it."""
        self._leave_out(functools.partial(self._intake.agreement.refuse, error))

    def end(self) -> None:
        """Place nothing because there are no more batches.

        Raises:
          ValueError: another process has one.
        """
        self._leave_out(self._intake.agreement.end)

    def _leave_out(self, tell: Callable[[], None]) -> None:
        """Use the turn to place nothing: wait for it if other processes are to be told so."""
        try:
            if not self._intake.agreement.alone:
                with self._turns.use(self._number):
                    tell()
        finally:
            self.release()

    def release(self) -> None:
        """Place nothing, and tell the other processes nothing; they must release the turn too."""
        self._turns.release(self._number)
        self._give_up()


def _give_up(turns: Turns, vocabularies: Vocabularies | None, number: int) -> None:
    """End a turn that something has kept from being used; one that has ended is left alone."""
    turns.give_up(number)
    if vocabularies is not None:
        vocabularies.unpin(number)
