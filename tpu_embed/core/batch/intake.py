"""Take whatever a user gives as a batch, and turn it into ids that a compiled program can read.

There are three cases. Arrays on the host are validated, packed and sent to the devices. Ids traced
inside a user's jit have no values yet; only their shapes are checked here. A `Batch` that was
placed before is used as it is.

A `Turn` is the right to place one batch. It is drawn where the order of batches is decided, and may
be used later, in another thread (`turns.py`).

Input: features and weights in the user's nesting, or a `Batch`. Output: validated host ids; or a
`Batch` or `TracedIds`, which a program can read.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from tpu_embed._checks import message
from tpu_embed._types import PyTree, Tracer
from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.placer import Placer
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.batch.traced import TracedIds, make_traced
from tpu_embed.core.batch.vocabularies import Vocabularies
from tpu_embed.core.ids import HostIds, Structure, host_ids
from tpu_embed.core.layout import Layout
from tpu_embed.interrupts import SignalsDeferred

__all__ = ["Intake", "Turn"]


class Intake:
    """The entrance for the batches of one engine.

    Args:
      declared: the feature configuration.
      layout: the engine's layout.
      vocabularies: the maps of its living vocabularies; None without them.
    """

    def __init__(
        self, declared: Structure, layout: Layout, vocabularies: Vocabularies | None = None
    ) -> None:
        self._declared, self._layout = declared, layout
        self._placer = Placer(layout, vocabularies)

    def place(
        self,
        features: PyTree,
        weights: PyTree | None,
        spec: BatchSpec | None,
        *,
        training: bool = True,
    ) -> Batch:
        """Validate a batch on the host, route it and send it; see `EmbeddingEngine.place`."""
        if isinstance(features, Batch):
            return self.own(features, weights, spec)
        return self.next_turn(training=training).place(features, weights, spec)

    def next_turn(self, *, training: bool = True) -> Turn:
        """Return the turn to place the next batch; see `EmbeddingEngine.next_turn`."""
        return Turn(self, self._placer, training=training)

    def host_ids(self, features: PyTree, weights: PyTree | None) -> list[HostIds]:
        """Return the validated ids of every feature, of this process's part of the batch."""
        if isinstance(features, Batch):
            expected, got = "ids on the host", "a Batch, whose ids are on the devices"
            remedy = "give the features themselves; a Batch needs no Prefetcher"
            raise TypeError(message("features", expected=expected, got=got, remedy=remedy))
        given, scales = self._declared.match_weighted(features, weights)
        here = zip(self._layout.features, self._placer.configs, given, scales, strict=True)
        return [
            host_ids(f"feature {feature.path!r}", config, feature.table.name, ids, scale)
            for feature, config, ids, scale in here
        ]

    def source(
        self, batch: PyTree, weights: PyTree | None, spec: BatchSpec | None
    ) -> Batch | TracedIds:
        """Return ids that a program can read.

        Args:
          batch: a `Batch`; or features, which are either traced arrays or host ids to be placed.
          weights: only with features.
          spec: only with features.

        Raises:
          ValueError: weights or a spec are given with a `Batch`, `place` refuses the batch, or the
            call is inside a `shard_map` or under another mesh; features hold keys of a living
            vocabulary.
          TypeError: `place` refuses the batch.
        """
        self._layout.axes.check_context()
        if isinstance(batch, Batch):
            return self.own(batch, weights, spec)
        if self._layout.living:
            names = sorted(table.name for _, table in self._layout.living)
            what, expected = f"keys of the tables {names}", "a Batch that was placed and admitted"
            remedy = "outside the jit: batch = engine.place(features), then state, batch = "
            remedy += "engine.admit(state, batch); the jit takes the batch as an argument"
            raise ValueError(message(what, expected=expected, got="features", remedy=remedy))
        given, scales = self._declared.match_weighted(batch, weights)
        # One traced leaf is enough: then the values of the batch are not known here.
        if not any(isinstance(leaf, Tracer) for leaf in (*given, *scales)):
            return self.place(batch, weights, spec)
        return make_traced(given, scales, spec, self._layout)

    def own(self, batch: Any, weights: PyTree | None = None, spec: Any = None) -> Batch:
        """Return a batch that was placed before, once it is known to be of this engine."""
        if not isinstance(batch, Batch):
            got, remedy = type(batch).__name__, "give what place returned"
            raise ValueError(message("batch", expected="a Batch", got=got, remedy=remedy))
        if weights is not None or spec is not None:
            what, remedy = "weights and spec", "give them to place"
            text = message(what, expected="None with a Batch", got="a value", remedy=remedy)
            raise ValueError(text)
        batch.check(self._layout)
        return batch


class Turn:
    """The right to place one batch, after all batches whose turns were drawn before.

    With several processes, each turn must be used in the same way by all of them, once: `place`,
    `refuse` or `end` talk to the other processes, `release` does not. A turn that is lost, because
    an interrupt came before it was used, is given up, so that later ones do not wait for it.

    Args:
      intake: draws the turn.
      placer: of the intake.
      training: False for a batch that is only looked up.
    """

    def __init__(self, intake: Intake, placer: Placer, *, training: bool = True) -> None:
        self._intake, self._placer, self._training = intake, placer, training
        with SignalsDeferred():
            self._number = placer.draw_turn(training=training)
            self._if_lost = weakref.finalize(self, placer.give_up, self._number)
            self._if_lost.atexit = False

    def place(
        self,
        features: PyTree,
        weights: PyTree | None = None,
        spec: BatchSpec | None = None,
        *,
        step: int | None = None,
    ) -> Batch:
        """Place a batch; see `EmbeddingEngine.place`, and `Placer.place` for `step`."""

        # The placer calls the function itself, so that it can tell other processes of an error.
        def validate() -> list[HostIds]:
            return self._intake.host_ids(features, weights)

        try:
            return self._placer.place(
                self._number, validate, spec, training=self._training, step=step
            )
        except BaseException:
            self._placer.give_up(self._number)  # it may not have come to be used
            raise
        finally:
            self._if_lost.detach()  # Python would drop a Ctrl-C that comes while it finalizes

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Note that this thread will use the turn before the block ends.

        In the block, whatever has to wait for a later turn raises `RuntimeError`: without that it
        would wait for ever.
        """
        return self._placer.hold(self._number)

    def refuse(self, error: BaseException) -> None:
        """Place nothing because of an error; the other processes raise it."""
        self._placer.place_none(self._number, error)

    def end(self) -> None:
        """Place nothing because there are no more batches.

        Raises:
          ValueError: another process has one.
        """
        self._placer.place_none(self._number, None)

    def release(self) -> None:
        """Place nothing, and tell the other processes nothing; they must release the turn too."""
        self._placer.release(self._number)
