"""Take whatever a user gives as a batch, and turn it into ids that a compiled program can read.

There are three cases. Arrays on the host are validated, packed and sent to the devices. Ids traced
inside a user's jit have no values yet; only their shapes are checked here. A `Batch` that was
placed before is used as it is.

Input: features and weights in the user's nesting, or a `Batch`. Output: validated host ids; or a
`Batch` or `TracedIds`, which a program can read.
"""

from __future__ import annotations

from typing import Any

from tpu_embed._checks import message
from tpu_embed._types import PyTree, Tracer
from tpu_embed.core.batch import Batch, BatchSpec, TracedIds, make_traced
from tpu_embed.core.ids import HostIds, Structure
from tpu_embed.core.layout import Layout
from tpu_embed.core.place.placer import Placer
from tpu_embed.core.place.turn import Order, Turn
from tpu_embed.vocabulary import Vocabularies


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
        self._placer = Placer(declared, layout, vocabularies)
        self._order = Order(self._placer.agreement, vocabularies)

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
        return Turn(self._placer, self._order, training=training)

    def shapes(self) -> Any:
        """Return the shapes that batches get, as JSON; None if no feature is jagged."""
        return self._placer.shapes()

    def expect(self, shapes: Any) -> None:
        """Give the next batches shapes that `shapes`, or a turn, had; see `shapes.py`.

        Raises:
          ValueError: it is something else.
        """
        self._placer.expect(shapes)

    def host_ids(self, features: PyTree, weights: PyTree | None) -> list[HostIds]:
        """Return the validated ids of every feature; see `EmbeddingEngine.host_ids`."""
        return self._placer.host_ids(features, weights)

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
