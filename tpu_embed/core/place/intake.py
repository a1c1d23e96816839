"""Take whatever a user gives as a batch, and turn it into ids that a compiled program can read.

There are three cases. Arrays on the host are validated, packed and sent to the devices. Ids traced
inside a user's jit have no values yet; only their shapes are checked here. A `Batch` that was
placed before is used as it is.

Input: features and weights in the user's nesting, or a `Batch`. Output: validated host ids; or a
`Batch` or `TracedIds`, which a program can read.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np

from tpu_embed._checks import check_type, refuse
from tpu_embed._types import PADDING_ID, PyTree, Tracer
from tpu_embed.core.batch import Batch, BatchSpec, Routed, TracedIds, make_traced
from tpu_embed.core.ids import HostIds, Structure, host_ids, part_of_feature
from tpu_embed.core.layout import Layout
from tpu_embed.core.place.keys import KeyedBatches
from tpu_embed.core.place.rooms import Agreement, Rooms
from tpu_embed.core.place.router import route
from tpu_embed.processes import Order
from tpu_embed.vocabulary import Pin, Vocabularies


class Intake:
    """The entrance for the batches of one engine.

    Args:
      declared: the feature configuration.
      layout: the engine's layout.
      vocabularies: the maps of its dynamic vocabularies; None without them.

    Attributes:
      agreements: with the other processes, by what of a batch is routed.
      vocabularies: see above.
    """

    def __init__(
        self,
        declared: Structure,
        layout: Layout,
        vocabularies: Vocabularies | None = None,
    ) -> None:
        self._declared, self._layout, self.vocabularies = declared, layout, vocabularies
        self._replicas = layout.axes.local_parts(layout.axes.batch_axes).size
        # The features as they are in this process's part of a batch.
        self._configs = [
            part_of_feature(one.config, self._replicas, layout.axes.replicas)
            for one in layout.features
        ]
        self.agreements: dict[Routed, Agreement] = {
            "update": Agreement(layout, "update"),
            "lookup": Agreement(layout, "lookup"),
        }
        self._keyed = None
        if vocabularies is not None:
            self._keyed = KeyedBatches(layout, vocabularies, self.agreements)
        # By the size of the small tables of lookups; 0 for batches without them.
        self._rooms = {0: Rooms(layout)}

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
        return self.place_ids(features, weights, spec, training=training)

    def place_ids(
        self,
        features: PyTree,
        weights: PyTree | None = None,
        spec: BatchSpec | None = None,
        *,
        training: bool,
        step: int | None = None,
    ) -> Batch:
        """Place a batch that was not placed before.

        Args:
          features, weights, spec, training: see `EmbeddingEngine.place`.
          step: of dynamic vocabularies, whose rows a batch that is only looked up gets. None: the
            step that is admitted now.
        """
        if not training and step is None:
            step = 0 if self.vocabularies is None else self.vocabularies.admitted
        of_step = None if training else step
        order = self.order(training=training)
        if order is None:
            return self.place_now(features, weights, spec, of_step)
        return order.run(lambda: self.place_now(features, weights, spec, of_step))

    def order(self, *, training: bool) -> Order | None:
        """Return the order in which batches are placed; None where any order will do.

        With one process, that is where no map learns. Engines that share maps share their order.
        """
        if training and self.vocabularies is not None:
            return self.vocabularies.order
        agreement = self.agreements["update" if training else "lookup"]
        return None if agreement.alone else agreement.order

    def pin(self) -> Pin | None:
        """Return the step that is admitted now, whose rows can be found while this is held."""
        return None if self.vocabularies is None else self.vocabularies.pin()

    def place_now(
        self,
        features: PyTree,
        weights: PyTree | None,
        spec: BatchSpec | None,
        step: int | None,
    ) -> Batch:
        """Return a batch, in its order; dynamic vocabularies learn from a training batch.

        Args:
          features: the ids; of a batch that is only looked up, mappings may leave out some.
          weights: their weights, or None.
          spec: see `route`.
          step: of a batch that is only looked up: the step whose rows it gets of dynamic
            vocabularies. None: a training batch.

        Raises:
          ValueError, TypeError: this process, or another one, refuses its part.
        """
        routed: Routed = "update" if step is None else "lookup"
        left_out = ()
        if spec is not None:
            check_type(
                "spec",
                spec,
                BatchSpec,
                expected="a BatchSpec",
                remedy="batch.spec of a placed batch is one",
                error=ValueError,
            )
            spec = dataclasses.replace(spec, routed=routed)
        with self.agreements[routed].refusals():
            if step is not None:
                features, weights, left_out = self._filled(features, weights)
            hosts = self.host_ids(features, weights)
        keyed = contextlib.nullcontext((hosts, {}))
        if self._keyed is not None:
            keyed = (
                self._keyed.learn(hosts)
                if step is None
                else self._keyed.find(hosts, step)
            )
        with keyed as (hosts, fields):
            number, agreement = fields.get("visit_rows", 0), self.agreements[routed]
            if number not in self._rooms:  # another thread may make one, too
                self._rooms.setdefault(number, Rooms(self._layout.visiting(number)))
            rooms = self._rooms[number]
            batch = route(hosts, spec, routed, rooms=rooms, agreement=agreement)
            return dataclasses.replace(batch, left_out=left_out, **fields)

    def _filled(
        self, features: PyTree, weights: PyTree | None
    ) -> tuple[PyTree, PyTree | None, tuple[str, ...]]:
        """Return features and weights with empty examples of those that are left out; their paths.

        Raises:
          ValueError, TypeError: as `Structure.match`.
        """
        declared, part = self._declared, self._declared.part(features)
        if part is declared:
            return features, weights, ()
        given = zip(*part.match_weighted(features, weights), strict=True)
        found = dict(zip(part.paths, given, strict=True))
        left_out = tuple(path for path in declared.paths if path not in found)
        for path, config in zip(declared.paths, self._configs, strict=True):
            if path in left_out:  # one example per replica, or as many as are declared
                bags = config.output_shape or (self._replicas,)
                found[path] = np.full((*bags, 1), PADDING_ID), None
        ids, scales = zip(*(found[path] for path in declared.paths), strict=True)
        return declared.unflatten(ids), declared.unflatten(scales), left_out

    def shapes(self) -> Any:
        """Return the shapes that batches get, as JSON; None if no feature is jagged."""
        jagged = any(feature.config.jagged for feature in self._layout.features)
        return self._rooms[0].copy() if jagged else None

    def expect(self, shapes: Any) -> None:
        """Give the next batches shapes that `shapes` returned; see `rooms.py`.

        Raises:
          ValueError: it is something else.
        """
        self._rooms[0].set(shapes)

    def host_ids(self, features: PyTree, weights: PyTree | None) -> list[HostIds]:
        """Return the validated ids of every feature; see `EmbeddingEngine.host_ids`."""
        if isinstance(features, Batch):
            refuse(
                "features",
                expected="ids on the host",
                got="a Batch, whose ids are on the devices",
                remedy="give the features themselves; a Batch needs no Prefetcher",
                error=TypeError,
            )
        given, scales = self._declared.match_weighted(features, weights)
        here = zip(self._layout.features, self._configs, given, scales, strict=True)
        return [
            host_ids(
                f"feature {feature.path!r}", config, feature.table.name, ids, scale
            )
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
            call is inside a `shard_map` or under another mesh; features hold keys of a dynamic
            vocabulary.
          TypeError: `place` refuses the batch.
        """
        self._layout.axes.check_context()
        if isinstance(batch, Batch):
            return self.own(batch, weights, spec)
        if self._layout.living:
            names = sorted(table.name for _, table in self._layout.living)
            what, expected = (
                f"keys of the tables {names}",
                "a Batch that was placed and admitted",
            )
            remedy = (
                "outside the jit: batch = engine.place(features), then state, batch = "
            )
            remedy += (
                "engine.admit(state, batch); the jit takes the batch as an argument"
            )
            refuse(what, expected=expected, got="features", remedy=remedy)
        given, scales = self._declared.match_weighted(batch, weights)
        # One traced leaf is enough: then the values of the batch are not known here.
        if not any(isinstance(leaf, Tracer) for leaf in (*given, *scales)):
            return self.place(batch, weights, spec)
        return make_traced(given, scales, spec, self._layout)

    def own(self, batch: Any, weights: PyTree | None = None, spec: Any = None) -> Batch:
        """Return a batch that was placed before, once it is known to be of this engine."""
        check_type(
            "batch",
            batch,
            Batch,
            expected="a Batch",
            remedy="give what place returned",
            error=ValueError,
        )
        if weights is not None or spec is not None:
            refuse(
                "weights and spec",
                expected="None with a Batch",
                got="a value",
                remedy="give them to place",
            )
        batch.check(self._layout)
        return batch
