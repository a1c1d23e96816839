"""The stateful API: `TPUEmbedding`, the TPU-embedding mid-level API over the functional engine.

It reads what it holds, calls the engine and writes back. Nothing is computed here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed import _checks
from tpu_embed._calls import call_into, is_device_error
from tpu_embed._checks import message
from tpu_embed._types import Array, PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import structure
from tpu_embed.core.state import TableState, check_state, retrieve
from tpu_embed.core.update import OnBadGradient
from tpu_embed.enqueue import Enqueued, Held, Holder, after_a_device_error
from tpu_embed.interrupts import SignalsDeferred
from tpu_embed.planning.placement import resolve


class TPUEmbedding:
    """Train embedding tables: enqueue ids, dequeue activations, apply their gradients.

    An exception raised by a check, or while a program is traced, leaves tables, slots, queue and
    step as they were. After a device error the state is invalid: every call says so until `load`
    has succeeded or `state` is set.

    A call that is interrupted (Ctrl-C) has happened or has not, never by half: `waiting`,
    `dequeued` and `state.step` tell which, and the loop goes on from there.

    Every call may be made from any thread. Any number of threads may enqueue while one dequeues and
    applies: the ids are checked and sent beside all other calls. The batches of one thread keep
    their order, and the order of the batches alone decides the tables' bits; pipelined, how far
    ahead they were enqueued does too, as in one thread. What reads the tables and what changes
    them wait for each other.

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
        self._holder = Holder()
        self._tables = threading.RLock()
        """Held by what reads the tables, or changes them."""

    def build(self, per_replica_batch_size: int | None = None) -> None:
        """Create tables and slots.

        Args:
          per_replica_batch_size: examples of a training batch on one device; None: the first
            training `enqueue` sets it.

        Raises:
          ValueError: it was built with another size, or the size is not an integer of at least 1.
          RuntimeError: the state is invalid.
        """
        size, remedy = per_replica_batch_size, "make another TPUEmbedding"
        if size is not None:
            size = _checks.check_int("per_replica_batch_size", size, minimum=1)
        with self._tables:
            self._settled("build").with_size(size, "build", remedy)
            self._built()
            self._holder.derive(lambda held: held.with_size(size, "build", remedy))

    def _built(self) -> TableState:
        """Return the state, made if there is none; for what holds `_tables`."""
        if self._holder.now.state is None:
            self._holder.change(state=self.engine.init(jax.random.key(self._seed)))
        assert self._holder.now.state is not None
        return self._holder.now.state

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
        with _labelled(what, name):
            self._valid(what)
            if training:
                self.engine.check_trainable(f"{what} with training=True")
            batch = self.engine.place(features, weights)
            size = batch.spec.local_batch if training else None
            self._push(what, Enqueued(batch, training, name), size)

    def _push(self, what: str, item: Enqueued, size: int | None) -> None:
        """Append a batch; it waits for other calls only where it needs the tables."""
        remedy = "pad it with tpu_embed.pad_batch, or enqueue it with training=False"

        def pushed(held: Held) -> Held:
            held = held.with_size(size, what, remedy)
            return held._replace(waiting=(*held.waiting, item))

        if self._holder.now.state is not None and not self._pipelined:
            self._holder.derive(pushed)
            return
        with self._tables:
            held = self._settled(what).with_size(size, what, remedy)
            state = self._built()
            if self._pipelined and not held.waiting:
                (item,) = self._issue(what, state, (item,))
            self._holder.derive(pushed)

    def dequeue(self, name: str | None = None) -> PyTree:
        """Return the activations of the oldest batch, batch dimension sharded.

        Args:
          name: labels profiles and errors.

        Raises:
          RuntimeError: nothing is enqueued, the last training batch still waits for its gradients,
            or the state is invalid.
        """
        what = _label("dequeue", name)
        with _labelled(what, name), self._tables:
            held = self._settled(what)
            if held.dequeued is not None and held.dequeued.training:
                expected = "gradients of the training batch that was dequeued before"
                remedy = "call apply_gradients first"
                raise RuntimeError(message(what, expected=expected, got="none yet", remedy=remedy))
            if not held.waiting:
                got, remedy = "an empty queue", "call enqueue first"
                raise RuntimeError(message(what, expected="a batch", got=got, remedy=remedy))
            heads = held.waiting[: 2 if self._pipelined else 1]
            head, *following = self._issue(what, self._built(), heads)

            def popped(now: Held) -> Held:
                rest = now.waiting[len(heads) :]
                return now._replace(waiting=(*following, *rest), dequeued=head)

            self._holder.derive(popped)
            return head.activations

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
        with _labelled(what, name), self._tables:
            state, item = self._settled(what).waiting_for_gradients(what)
            rates = self.engine.learning_rates()
            self._update(what, self.engine.prepare_update(state, item.batch, gradients, rates))

    def _update(self, what: str, update: Callable[[], TableState]) -> None:
        """Run an update, whose result takes the place of the state whose memory it takes.

        Where the result comes to stand is held before the update begins. When JAX calls the program
        without Python, there is then no moment at which what is held has no state. When it does
        not, as in the first call, signals wait.
        """
        results: list[TableState] = []
        with SignalsDeferred():
            self._holder.change(update=results)
            try:
                call_into(results, update)
            except Exception as error:
                self._note(what, error)
                raise
            finally:
                self._settle()

    def _note(self, what: str, error: Exception) -> None:
        """Keep in mind that the state is invalid, if this is an error of the device."""
        if is_device_error(error):
            self._holder.change(failure=after_a_device_error(f"{what}: {error}"))

    @property
    def waiting(self) -> int:
        """The number of batches that are enqueued and not yet dequeued."""
        return len(self._holder.now.waiting)

    @property
    def dequeued(self) -> PyTree | None:
        """The activations of the training batch whose gradients are due, or None."""
        with self._tables:
            item = self._settle().dequeued
        return item.activations if item is not None and item.training else None

    @property
    def state(self) -> TableState:
        """The tables' state, for the functional API; the next `apply_gradients` donates it.

        Its tables and slots are gone then; step and counters stay readable.
        """
        with self._tables:
            return self._current("state")

    @state.setter
    def state(self, state: TableState) -> None:
        """Replace the state by one that this engine made; waiting lookups are issued again."""
        with self._tables:
            check_state(state, self.engine.layout)
            self._replace(state)

    def _current(self, what: str) -> TableState:
        self._settled(what)
        return self._built()

    @property
    def embedding_tables(self) -> dict[TableConfig, Array]:
        """The logical tables `[V, D]` by `TableConfig`; a read costs a copy of all tables.

        They are gathered: every device gets them whole. `retrieve` needs the host's memory only.
        """
        with self._tables:
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
        with self._tables:
            held = self._settle()
            state = held.state
            if state is None or held.problem() is not None:
                state = self.engine.init(jax.random.key(self._seed))
            self._replace(self.engine.load_arrays(state, tables, slots))

    def _replace(self, state: TableState) -> None:
        """Take another state, which is valid; look up again what waits."""
        held = self._settle()
        heads = tuple(item.withdrawn() for item in held.waiting[:1])
        if self._pipelined:
            heads = self._issue("load", state, heads)
        dequeued = held.dequeued if held.problem() is None else None

        def replaced(now: Held) -> Held:
            waiting = (*heads, *now.waiting[len(heads) :])
            return now._replace(state=state, waiting=waiting, dequeued=dequeued, failure=None)

        self._holder.derive(replaced)

    def retrieve(self) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return tables and slots as host arrays, by name; no device holds more than its shard."""
        with self._tables:
            return retrieve.host_arrays(self._current("retrieve"), self.engine.layout)

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration as plain objects, batch size and pipelining too."""
        return {
            **self.engine.describe(),
            "per_replica_batch_size": self._holder.now.per_replica,
            "pipelined": self._pipelined,
        }

    def _issue(
        self, what: str, state: TableState, items: tuple[Enqueued, ...]
    ) -> tuple[Enqueued, ...]:
        """Return the batches with their activations."""
        lookup = functools.partial(self.engine.lookup, state)
        try:
            return tuple([item.issued(lookup) for item in items])
        except Exception as error:
            self._note(what, error)
            raise

    def _settle(self) -> Held:
        """Return what is held, while this thread holds `_tables`: no update runs."""
        if self._holder.now.update is not None:
            self._holder.derive(Held.settled)
        return self._holder.now

    def _settled(self, what: str) -> Held:
        """Return what is held, while this thread holds `_tables`, if the state is valid.

        Raises:
          RuntimeError: it is not.
        """
        self._settle()
        return self._valid(what)

    def _valid(self, what: str) -> Held:
        """Return what is held, if the state is valid.

        Raises:
          RuntimeError: it is not.
        """
        while True:
            held = self._holder.now
            problem, now = held.problem(), self._holder.now
            if now.state is held.state and now.update is held.update:
                break  # otherwise another thread's update took the arrays while they were looked at
        if problem is not None:
            expected, remedy = "a valid state", "load the tables, or set `state`"
            raise RuntimeError(message(what, expected=expected, got=problem, remedy=remedy))
        return held


def _label(what: str, name: str | None) -> str:
    return what if name is None else f"{what} {name!r}"


@contextlib.contextmanager
def _labelled(what: str, name: str | None) -> Iterator[None]:
    """Label profiles, and what is raised."""
    try:
        with jax.profiler.TraceAnnotation(what):
            yield
    except Exception as error:
        if name is not None and what not in str(error):
            error.add_note(f"raised by {what}")
        raise
