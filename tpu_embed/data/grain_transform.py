"""The last operation of a grain pipeline: place the batch.

Grain reads records, shuffles and batches them. `Place` ends such a pipeline, which then yields
placed batches. It has to run in the process that has the devices, not in grain's worker processes.

Input: the elements of a pipeline, which are batches. Output: placed batches.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tpu_embed._checks import refuse
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.data.items import ItemRules

try:
    from grain.transforms import Map
except ImportError as error:
    refuse(
        "tpu_embed.data.Place",
        expected="grain",
        got=f"{error}",
        remedy='pip install "tpu-embed[grain]"',
        error=ImportError,
        cause=error,
    )


class Place(Map):
    """A grain transform that places batches; the last operation of a pipeline.

    Its elements are those of a `Prefetcher`: features, or a tuple that begins with features. In a
    `grain.DataLoader` it follows `Batch` in `operations`, with `worker_count=0`; a dataset takes it
    by `dataset.map(Place(engine))`. Grain then places a batch when the loop asks for it. To place
    ahead, or to read with worker processes, leave it out, and wrap `Prefetcher` around the loader.

    Args:
      engine: places the batches.
      weighted: whether the elements are `(features, weights, …)`.
      spec: the exact shape of every batch; None: a shape of earlier batches if it fits one of them.
      training: False for batches that are only looked up.

    Example:
      >>> import grain, numpy as np, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=100, dim=2, name="item")
      >>> engine = tpu_embed.EmbeddingEngine({"x": tpu_embed.FeatureConfig(table)})
      >>> dataset = grain.MapDataset.range(32).map(lambda number: {"x": np.int32(number)})
      >>> dataset = dataset.batch(8).to_iter_dataset().map(Place(engine))
      >>> [batch.spec.sizes for batch in dataset]
      [(8,), (8,), (8,), (8,)]
    """

    def __init__(
        self,
        engine: EmbeddingEngine,
        *,
        weighted: bool = False,
        spec: BatchSpec | None = None,
        training: bool = True,
    ) -> None:
        self._engine, self._rules = engine, ItemRules(weighted, spec, training)

    def map(self, element: Any) -> Any:
        """Return the element with a `Batch` in place of its features.

        Raises:
          ValueError, TypeError: as `EmbeddingEngine.place`.
        """
        item, rules = self._rules.take_apart(element), self._rules
        batch = self._engine.place(
            item.features, item.weights, rules.spec, training=rules.training
        )
        return item.around(batch, self._engine)

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent to another process.

        Raises:
          TypeError: always.
        """
        refuse(
            "Place",
            expected="to run in the process that has the devices",
            got="pickling for another one",
            remedy="use worker_count=0, or no Place and tpu_embed.data.Prefetcher around "
            "the loader",
            error=TypeError,
        )
