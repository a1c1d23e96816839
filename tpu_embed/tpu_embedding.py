"""The stateful door: `TPUEmbedding`, the TPU-embedding mid-level API over the functional engine.

It holds a `TableState` and a queue, unpacks, calls the engine and writes back. Nothing is computed
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed import _checks
from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core import retrieve, structure
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.guard import OnBadGradient
from tpu_embed.core.state_checks import check_state
from tpu_embed.core.tables import TableState
from tpu_embed.enqueue import BatchQueue, Enqueued
from tpu_embed.planning.placement import resolve

_STATUSES = ("INTERNAL: ", "INVALID_ARGUMENT: ", "RESOURCE_EXHAUSTED: ", "UNKNOWN: ", "ABORTED: ")
"""How messages of XLA's runtime begin."""


class TPUEmbedding:
    """Train embedding tables: enqueue ids, dequeue activations, apply their gradients.

    An exception raised by a check, or while a program is traced, leaves tables, slots, queue and
    step as they were. After a device error the state is invalid: every call says so until `load`
    has succeeded or `state` is set.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dict, list, tuple, namedtuple, dataclass;
        `placement="auto"` is resolved by `tpu_embed.planning.resolve`.
      optimizer: for tables without one of their own; None: none (serving).
      pipeline_execution_with_tensor_core: look the next batch up before this one's update, if it is
        enqueued already: its activations are then one step old, and its exchange overlaps the dense
        part of the step.
      mesh: the devices; None: one axis over all of them.
      batch_axes: mesh axes that split the batch; None: all.
      seed: of the tables, as `engine.init(jax.random.key(seed))`.
      on_bad_gradient: what happens to a step in which an activation gradient holds NaN or infinity:
        "allow": it is applied, nothing looks; "skip": nothing of it is applied, and it is counted;
        "error": `apply_gradients` raises, which costs a wait for the gradients.

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
        on_bad_gradient: OnBadGradient = "allow",
    ) -> None:
        declared = structure.flatten(feature_config)
        self._declared = dict(zip(declared.table_names, declared.tables, strict=True))
        placed = resolve(feature_config, optimizer, mesh=mesh)
        self.engine = EmbeddingEngine(
            placed, optimizer, mesh=mesh, batch_axes=batch_axes, on_bad_gradient=on_bad_gradient
        )
        self._seed = seed
        self._pipelined = bool(pipeline_execution_with_tensor_core)
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
          RuntimeError: the state is invalid.
        """
        size = None
        if per_replica_batch_size is not None:
            size = _checks.check_int("per_replica_batch_size", per_replica_batch_size, minimum=1)
            self._check_size(size, "build", "make another TPUEmbedding")
        self._check_valid("build")
        self._build(size)

    def _build(self, size: int | None) -> None:
        if self._state is None:
            self._state = self.engine.init(jax.random.key(self._seed))
        if size is not None:
            self._per_replica = size

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
          ValueError: bad ids, weights, structure or batch size, or a training batch for tables
            without an optimizer; nothing is enqueued then.
          TypeError: ids that are no integers, or another container type.
          RuntimeError: the state is invalid.
        """
        what = _label("enqueue", name)
        with self._call(what, name):
            if training:
                self.engine.check_trainable(f"{what} with training=True")
            batch = self.engine.place(features, weights)
            size = batch.spec.local_batch if training else None
            if size is not None:
                remedy = "pad it with tpu_embed.pad_batch, or enqueue it with training=False"
                self._check_size(size, what, remedy)
            self._build(size)
            self._queue.push(Enqueued(batch, training, name))

    def dequeue(self, name: str | None = None) -> PyTree:
        """Return the activations of the oldest batch, batch dimension sharded.

        Args:
          name: labels profiles and errors.

        Raises:
          RuntimeError: nothing is enqueued, the last training batch still waits for its gradients,
            or the state is invalid.
        """
        what = _label("dequeue", name)
        with self._call(what, name):
            if self._dequeued is not None and self._dequeued.training:
                expected = "gradients of the training batch that was dequeued before"
                remedy = "call apply_gradients first"
                raise RuntimeError(message(what, expected=expected, got="none yet", remedy=remedy))
            if not len(self._queue):
                got, remedy = "an empty queue", "call enqueue first"
                raise RuntimeError(message(what, expected="a batch", got=got, remedy=remedy))
            self._dequeued = self._queue.pop()
            return self._dequeued.activations

    def apply_gradients(self, gradients: PyTree, name: str | None = None) -> None:
        """Update the tables with the gradients of the last dequeued training batch.

        Args:
          gradients: of its activations, in their structure; None for a feature is a zero gradient.
          name: labels profiles and errors.

        Raises:
          RuntimeError: not built, no training batch was dequeued since the last call, or the state
            is invalid.
          ValueError: a gradient of another shape, or not finite under `on_bad_gradient="error"`;
            other keys. Nothing changes then: the batch still waits for its gradients.
          TypeError: a container of another type.
        """
        what = _label("apply_gradients", name)
        with self._call(what, name):
            state, item = self._waiting_for_gradients(what)
            rates = self.engine.learning_rates()
            self._state = self.engine.update_in_place(
                state, item.batch, gradients, learning_rates=rates
            )
            self._dequeued = None

    def _waiting_for_gradients(self, what: str) -> tuple[TableState, Enqueued]:
        """Return the state, and the dequeued training batch.

        Raises:
          RuntimeError: there is none.
        """
        item, remedy = self._dequeued, "call enqueue and dequeue first"
        if self._state is None:
            got = "tables that were not built"
        elif item is None:
            got = "none since the last apply_gradients"
        elif not item.training:
            got, remedy = "one enqueued with training=False", "enqueue it with training=True"
        else:
            return self._state, item
        expected = "a dequeued training batch"
        raise RuntimeError(message(what, expected=expected, got=got, remedy=remedy))

    @property
    def state(self) -> TableState:
        """The tables' state, for the functional door; the next `apply_gradients` donates it."""
        return self._current("state")

    @state.setter
    def state(self, state: TableState) -> None:
        """Replace the state by one that this engine made; waiting lookups are issued again."""
        check_state(state, self.engine.layout)
        self._replace(state)

    def _current(self, what: str) -> TableState:
        self._check_valid(what)
        self._build(None)
        assert self._state is not None
        return self._state

    @property
    def embedding_tables(self) -> dict[TableConfig, Array]:
        """The logical tables `[V, D]` by `TableConfig`; a read costs a copy of all tables.

        They are gathered: every device gets them whole. `retrieve` needs the host's memory only.
        """
        by_name = self.engine.tables(self._current("embedding_tables"))
        return {config: by_name[name] for name, config in self._declared.items()}

    def load(
        self, tables: Mapping[str, Any], slots: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Replace tables, and slots, by host arrays; waiting lookups are issued again.

        What is not given stays. After a device error it starts afresh, step included, and a batch
        that was dequeued then is forgotten.

        Args:
          tables: `[V, D]` by name, any of them.
          slots: by table name, then slot name, any of them.

        Raises:
          ValueError: an unknown name, or another shape; nothing changes then.
        """
        state = self._state
        if state is None or self._problem() is not None:
            state = self.engine.init(jax.random.key(self._seed))
        self._replace(self.engine.load_arrays(state, tables, slots))

    def _replace(self, state: TableState) -> None:
        """Take another state, which is valid; look up again what waits."""
        if self._problem() is not None:
            self._dequeued = None
        self._state, self._failure = state, None
        with self._call("load", None):
            self._queue.issue_again()

    def retrieve(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return tables and slots as host arrays, by name; no device holds more than its shard."""
        return retrieve.host_arrays(self._current("retrieve"), self.engine.layout)

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration as plain objects, batch size and pipelining too."""
        return {
            **self.engine.describe(),
            "per_replica_batch_size": self._per_replica,
            "pipelined": self._pipelined,
        }

    def _lookup(self, batch: Batch) -> PyTree:
        assert self._state is not None
        return self.engine.lookup(self._state, batch)

    def _check_size(self, size: int, what: str, remedy: str) -> None:
        if self._per_replica not in (None, size):
            what = f"{what}: batch size per replica"
            expected = f"{self._per_replica}, the size it was built with"
            raise ValueError(message(what, expected=expected, got=f"{size}", remedy=remedy))

    @contextlib.contextmanager
    def _call(self, what: str, name: str | None) -> Iterator[None]:
        """Check that the state is valid; label what is raised; remember a device error."""
        self._check_valid(what)
        try:
            with jax.profiler.TraceAnnotation(what):
                yield
        except Exception as error:
            found = _device_error(error)
            if found is not None:
                self._failure = f"{what}: {_summary(found)}"
            raised = found or error
            if name is not None and what not in str(raised):
                raised.add_note(f"raised by {what}")
            if raised is error:
                raise
            raise raised from error

    def _check_valid(self, what: str) -> None:
        problem = self._problem()
        if problem is not None:
            expected, remedy = "a valid state", "load the tables, or set `state`"
            raise RuntimeError(message(what, expected=expected, got=problem, remedy=remedy))

    def _problem(self) -> str | None:
        """Return what makes the state invalid; None if nothing does."""
        if self._failure is None:
            leaves: list[Any] = jax.tree.leaves(self._state)
            if any(leaf.is_deleted() for leaf in leaves):
                return "one whose arrays were donated to another function, or deleted"
            try:  # an update that failed after it was dispatched shows here
                jax.block_until_ready([leaf for leaf in leaves if leaf.is_ready()])
            except jax.errors.JaxRuntimeError as error:
                self._failure = _summary(error)
        return None if self._failure is None else f"one after a device error ({self._failure})"


def _label(what: str, name: str | None) -> str:
    return what if name is None else f"{what} {name!r}"


def _device_error(error: Exception) -> Exception | None:
    """Return the error as a `JaxRuntimeError` if the device raised it, else None.

    JAX's fast way of calling a compiled program makes it a ValueError that begins with a status.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return error
    if type(error) is ValueError and str(error).startswith(_STATUSES):
        return jax.errors.JaxRuntimeError(str(error))
    return None


def _summary(error: Exception) -> str:
    """Return the first and the last line of a message that may have a traceback in it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
