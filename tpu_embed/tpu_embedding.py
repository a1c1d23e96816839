"""The stateful door: `TPUEmbedding`, the TPU-embedding mid-level API over the functional engine.

It holds a `TableState` and a queue, unpacks, calls the engine and writes back. Nothing is computed
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed import _checks
from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.tables import TableState
from tpu_embed.enqueue import BatchQueue, Enqueued


class TPUEmbedding:
    """Train embedding tables by enqueueing ids, dequeueing activations and applying their
    gradients.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dict, list, tuple, namedtuple, dataclass.
      optimizer: for tables without one of their own; None: none (serving).
      pipeline_execution_with_tensor_core: look the next batch up before this one's update, if it is
        enqueued already: its activations are then one step old, and its exchange overlaps the dense
        part of the step.
      mesh: the devices; None: one axis over all of them.
      batch_axes: mesh axes that split the batch; None: all.
      seed: of the tables, as `engine.init(jax.random.key(seed))`.

    Raises:
      ValueError: what `EmbeddingEngine` refuses.

    Example:
      >>> import tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=8, dim=2, name="item")
      >>> embedding = TPUEmbedding(tpu_embed.FeatureConfig(table), tpu_embed.optimizers.SGD(0.1))
      >>> ids = np.zeros(jax.device_count(), np.int32)
      >>> embedding.enqueue(ids)
      >>> activations = embedding.dequeue()
      >>> embedding.apply_gradients(activations)
    """

    def __init__(
        self,
        feature_config: PyTree,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool = False,
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        self.engine = EmbeddingEngine(feature_config, optimizer, mesh=mesh, batch_axes=batch_axes)
        self._seed = seed
        self._pipelined = bool(pipeline_execution_with_tensor_core)
        self._update = jax.jit(self.engine.update, donate_argnums=0)
        self._queue = BatchQueue(self._lookup, ahead=self._pipelined)
        self._state: TableState | None = None
        self._per_replica: int | None = None
        self._dequeued: Enqueued | None = None
        self._failure: str | None = None

    def build(self, per_replica_batch_size: int | None = None) -> None:
        """Create tables and slots.

        Args:
          per_replica_batch_size: examples of a training batch on one device; None: the first
            training `enqueue` sets it.

        Raises:
          ValueError: it was built with another size, or the size is not an integer of at least 1.
        """
        if per_replica_batch_size is not None:
            size = _checks.check_int("per_replica_batch_size", per_replica_batch_size, minimum=1)
            self._check_size(size, "build")
            self._per_replica = size
        if self._state is None:
            self._state = self.engine.init(jax.random.key(self._seed))

    def enqueue(
        self,
        features: PyTree,
        weights: PyTree | None = None,
        training: bool = True,
        name: str | None = None,
    ) -> None:
        """Append a batch; its transfer to the devices starts here.

        Args:
          features: the global batch, in the structure of the features.
          weights: a weight an id, in the same structure, None where all are one.
          training: gradients will be applied; such batches all have the built size.
          name: labels profiles and errors.

        Raises:
          ValueError, TypeError: bad ids, weights, structure or batch size; nothing is enqueued
          then.
        """
        self._check_alive()
        if training:
            self.engine.check_trainable("enqueue(training=True)")
        batch = self.engine.place(features, weights)
        size = batch.spec.local_batch
        if training:
            self._check_size(size, "enqueue" if name is None else f"enqueue {name!r}")
        self.build(size if training else None)
        self._queue.push(Enqueued(batch, training, name))

    def dequeue(self, name: str | None = None) -> PyTree:
        """Return the activations of the oldest batch, batch dimension sharded.

        Args:
          name: labels profiles and errors.

        Raises:
          RuntimeError: nothing is enqueued, or the last training batch still waits for its
            gradients.
        """
        what = "dequeue" if name is None else f"dequeue {name!r}"
        self._check_alive()
        if self._dequeued is not None and self._dequeued.training:
            raise RuntimeError(
                f"{what}: the training batch dequeued before has no gradients yet; call apply_gradients"
            )
        if not len(self._queue):
            raise RuntimeError(f"{what}: nothing is enqueued; call enqueue first")
        with jax.profiler.TraceAnnotation(what):
            item = self._queue.pop()
        activations = item.activations
        self._dequeued = item
        return activations

    def apply_gradients(self, gradients: PyTree, name: str | None = None) -> None:
        """Update the tables with the gradients of the last dequeued training batch.

        Args:
          gradients: of its activations, in their structure; None for a feature is a zero gradient.
          name: labels profiles and errors.

        Raises:
          RuntimeError: not built, or no training batch was dequeued since the last call.
          ValueError, TypeError: a gradient of another shape, or another structure; nothing changes
          then.
        """
        what = "apply_gradients" if name is None else f"apply_gradients {name!r}"
        self._check_alive()
        state = self._state
        if state is None:
            raise RuntimeError(f"{what}: not built; call build or enqueue first")
        item = self._dequeued
        if item is None:
            raise RuntimeError(
                f"{what}: no training batch was dequeued since the last call; call dequeue first"
            )
        if not item.training:
            raise RuntimeError(f"{what}: the batch dequeued last was enqueued with training=False")
        rates = self.engine.learning_rates()
        try:
            with jax.profiler.TraceAnnotation(what):
                self._state = self._update(state, item.batch, gradients, learning_rates=rates)
        except jax.errors.JaxRuntimeError as error:
            self._failure = f"{what}: {error}"
            raise
        self._dequeued = None

    @property
    def state(self) -> TableState:
        """The tables' state, for the functional door; the next `apply_gradients` donates it."""
        self._check_alive()
        self.build()
        assert self._state is not None
        return self._state

    @property
    def embedding_tables(self) -> dict[TableConfig, Array]:
        """The logical tables `[V, D]`, by `TableConfig`: gathered, so each read costs a copy of all
        tables.
        """
        by_name = self.engine.tables(self.state)
        return {config: by_name[name] for name, config in self.engine.table_configs.items()}

    def load(
        self, tables: Mapping[str, Any], slots: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Replace tables, and slots, by host arrays; waiting lookups are issued again.

        Args:
          tables: `[V, D]` by name, any of them.
          slots: by table name, then slot name, any of them.

        Raises:
          ValueError: an unknown name, or another shape; nothing changes then.
        """
        self._failure = None
        self.build()
        assert self._state is not None
        self._state = self.engine.load_arrays(self._state, tables, slots)
        self._queue.issue_again()

    def retrieve(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return tables and slots as host arrays, by name."""
        state = self.state
        return jax.tree.map(np.asarray, (self.engine.tables(state), self.engine.slots(state)))

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration as plain objects: the engine's, batch size and
        pipelining.
        """
        return {
            **self.engine.describe(),
            "per_replica_batch_size": self._per_replica,
            "pipelined": self._pipelined,
        }

    def _lookup(self, batch: Any) -> PyTree:
        assert self._state is not None
        return self.engine.lookup(self._state, batch)

    def _check_size(self, size: int, what: str) -> None:
        if self._per_replica not in (None, size):
            raise ValueError(
                message(
                    f"{what}: batch size per replica",
                    expected=f"{self._per_replica}, the size it was built with",
                    got=f"{size}",
                    remedy="pad the batch (tpu_embed.pad_batch), or enqueue it with training=False",
                )
            )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"the tables are invalid after a device error ({self._failure}); load or restore them"
            )
