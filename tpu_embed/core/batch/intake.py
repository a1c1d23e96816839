"""Whatever a user gives as a batch becomes ids that a program can read.

Input: features and weights in the user's nesting: host arrays, ids traced inside a jit, or a batch
that was placed before. Output: host ids, checked; or a `Batch` or `TracedIds`.
"""

from __future__ import annotations

from tpu_embed._checks import message
from tpu_embed._types import PyTree, Tracer
from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.placer import Placer
from tpu_embed.core.batch.spec import BatchSpec
from tpu_embed.core.batch.traced import TracedIds, make_traced
from tpu_embed.core.ids import HostIds, Structure, host_ids
from tpu_embed.core.layout import Layout, refuse_manual_axes

__all__ = ["Intake"]


class Intake:
    """Takes the batches of one engine.

    Args:
      declared: the feature configuration.
      layout: the engine's.
    """

    def __init__(self, declared: Structure, layout: Layout) -> None:
        self._declared, self._layout = declared, layout
        self._placer = Placer(layout)

    def place(self, features: PyTree, weights: PyTree | None, spec: BatchSpec | None) -> Batch:
        """Check a batch on the host and send it; see `EmbeddingEngine.place`."""
        return self._placer.place(lambda: self.host_ids(features, weights), spec)

    def host_ids(self, features: PyTree, weights: PyTree | None) -> list[HostIds]:
        """Return this process's checked ids of every feature, without sending them."""
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
          batch: a `Batch`, or features: traced arrays, or ids of the host, which are placed now.
          weights: beside features only.
          spec: beside features only.

        Raises:
          ValueError: weights or a spec beside a `Batch`; what `place` refuses.
          TypeError: what `place` refuses.
        """
        refuse_manual_axes()
        if isinstance(batch, Batch):
            if weights is not None or spec is not None:
                what, remedy = "weights and spec", "give them to place"
                text = message(what, expected="None with a Batch", got="a value", remedy=remedy)
                raise ValueError(text)
            batch.check(self._layout)
            return batch
        given, scales = self._declared.match_weighted(batch, weights)
        if not any(isinstance(leaf, Tracer) for leaf in (*given, *scales)):
            return self.place(batch, weights, spec)
        return make_traced(given, scales, spec, self._layout)
