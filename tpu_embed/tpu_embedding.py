"""The stateful API: `TPUEmbedding` holds the tables and a queue of batches, and calls the engine.

It reads what it holds, calls pure functions of the engine, and stores the results. Nothing is
computed here.

Input: batches of ids, then gradients. Output: activations; the tables change.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed._calls import call_into, is_device_error, label, labelled
from tpu_embed._checks import message, refuse_pickle
from tpu_embed._types import Array, PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import structure
from tpu_embed.core.layout import describe_devices, describe_tables
from tpu_embed.core.state import TableState, check_state, retrieve
from tpu_embed.core.update import OnBadGradient
from tpu_embed.enqueue import Enqueued, Held, Holder, after_a_device_error, batch_sizes
from tpu_embed.interrupts import SignalsDeferred
from tpu_embed.planning.placement import resolve


class TPUEmbedding:
    """Train embedding tables: enqueue ids, dequeue activations, apply their gradients.

    An exception raised by a check, or while a program is traced, leaves tables, slots, queue and
    step as they were. After a device error the state is invalid: every call raises an error that
    says so, until `load` succeeds or `state` is set.

    A call that is interrupted (Ctrl-C) has either happened or not, never by half. `waiting`,
    `dequeued` and `state.step` tell which, and the training loop can go on from there.

    Every method may be called from any thread. Any number of threads may enqueue while one dequeues
    and applies, because checking and sending ids does not wait for other calls. Batches of the same
    thread keep their order. The tables' bits depend on the order of the batches only; if pipelined,
    also on how far ahead they were enqueued, as with one thread. Calls that read the tables and
    calls that change them wait for each other.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dict, list, tuple, namedtuple, dataclass;
        `placement="auto"` is resolved by `tpu_embed.planning.resolve`.
      optimizer: used for tables that have none of their own; None if no table is trained (serving).
      pipeline_execution_with_tensor_core: look up the next batch, if it is enqueued already, before
        this batch's update. Its activations are then one step old, and its exchange overlaps with
        the dense part of the step.
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else one axis over all devices.
      batch_axes: mesh axes that split the batch; None: all.
      seed: the tables are those of `engine.init(jax.random.key(seed))`.
      on_bad_gradient: what to do with a step in which an activation gradient has NaN or infinity:
        "allow" applies it without checking; "skip" skips and counts it; "error" makes
        `apply_gradients` raise, for which it has to wait for the gradients.

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
        """Held by every call while it reads the tables or changes them."""

    def __repr__(self) -> str:
        """Show how far the training is, and a line per table."""
        first = f"TPUEmbedding on {describe_devices(self.engine.layout)}"
        tables = describe_tables(self.engine.layout)
        return "\n  ".join([f"{first}: {self._holder.now.progress}", *tables])

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: the queue and the devices belong to this process."""
        refuse_pickle(
            "TPUEmbedding",
            remedy="make another of the same configs, and give its load what retrieve returned; "
            "tpu_embed.io.save writes its state to files",
        )

    def build(self, per_replica_batch_size: PyTree | None = None) -> None:
        """Create tables and slots.

        Args:
          per_replica_batch_size: examples of a training batch on one device, one number for all
            features or one per feature in their structure; None: the first training `enqueue`
            sets it.

        Raises:
          ValueError, TypeError: another size is set already, a size is not an integer of at least
            1, or the structure differs.
          RuntimeError: the state is invalid.
        """
        size = batch_sizes(self.engine.structure, per_replica_batch_size)
        remedy = "make another TPUEmbedding"
        with self._tables:
            self._settled("build").with_size(size, "build", remedy)
            self._built()
            self._holder.derive(lambda held: held.with_size(size, "build", remedy))

    def _built(self) -> TableState:
        """Return the state; create it if there is none. The caller holds `_tables`."""
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
        """Append a batch to the queue, and start its transfer to the devices.

        Args:
          features: the global batch, in the structure of the features; or a `Batch` that the
            engine has placed, without `weights`.
          weights: one weight per id, in the same structure; None where all are one.
          training: whether gradients will be applied; all such batches have the same sizes.
          name: a label for profiles and errors.

        Raises:
          ValueError: bad ids, weights, structure or batch size, or a training batch for tables
            without an optimizer; nothing is enqueued then.
          TypeError: ids that are not integers, or a wrong container type.
          RuntimeError: the state is invalid.
        """
        what = label("enqueue", name)
        with labelled(what, name):
            self._valid(what)
            if training:
                self.engine.check_trainable(f"{what} with training=True")
            batch = self.engine.place(features, weights)
            size = batch.spec.local_sizes if training else None
            self._push(what, Enqueued(batch, training, name), size)

    def _push(self, what: str, item: Enqueued, size: tuple[int, ...] | None) -> None:
        """Append a placed batch; wait for other calls only if the tables are needed."""
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
            # The first batch in a pipelined queue is looked up at once (see `enqueue.py`).
            if self._pipelined and not held.waiting:
                (item,) = self._issue(what, state, (item,))
            self._holder.derive(pushed)

    def dequeue(self, name: str | None = None) -> PyTree:
        """Return the activations of the oldest batch, with the batch dimension sharded.

        Args:
          name: a label for profiles and errors.

        Raises:
          RuntimeError: the queue is empty, the last training batch still waits for its gradients,
            or the state is invalid.
        """
        what = label("dequeue", name)
        with labelled(what, name), self._tables:
            held = self._settled(what)
            if held.dequeued is not None and held.dequeued.training:
                expected = "gradients of the training batch that was dequeued before"
                remedy = "call apply_gradients first"
                raise RuntimeError(message(what, expected=expected, got="none yet", remedy=remedy))
            if not held.waiting:
                got, remedy = "an empty queue", "call enqueue first"
                raise RuntimeError(message(what, expected="a batch", got=got, remedy=remedy))
            # Pipelined, the batch after this one is looked up too, before this one's update.
            heads = held.waiting[: 2 if self._pipelined else 1]
            head, *following = self._issue(what, self._built(), heads)

            # Other threads may have enqueued meanwhile: `now` has their batches behind `heads`.
            def popped(now: Held) -> Held:
                rest = now.waiting[len(heads) :]
                return now._replace(waiting=(*following, *rest), dequeued=head)

            self._holder.derive(popped)
            return head.activations

    def apply_gradients(self, gradients: PyTree, name: str | None = None) -> None:
        """Update the tables with the gradients of the last dequeued training batch.

        Args:
          gradients: in the structure and shapes of the activations; None for a feature is zero.
          name: a label for profiles and errors.

        Raises:
          RuntimeError: the tables are not built, no training batch was dequeued since the last
            call, or the state is invalid.
          ValueError: a gradient of a wrong shape, or not finite under `on_bad_gradient="error"`, or
            wrong keys. Nothing changes then, and the batch still waits for its gradients.
          TypeError: a wrong container type.
        """
        what = label("apply_gradients", name)
        with labelled(what, name), self._tables:
            state, item = self._settled(what).waiting_for_gradients(what)
            rates = self.engine.learning_rates()
            self._update(what, self.engine.prepare_update(state, item.batch, gradients, rates))

    def _update(self, what: str, update: Callable[[], TableState]) -> None:
        """Run an update in the memory of the state, and take its result as the new state.

        The record holds the list `results` before the update begins, and the new state is appended
        to that list. From its second call on, JAX runs the program without Python code, so nothing
        can be raised between the two. The first call runs Python code, so signals are deferred.
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
        """Record that the state is invalid, if this is a device error."""
        if is_device_error(error):
            self._holder.change(failure=after_a_device_error(f"{what}: {error}"))

    @property
    def waiting(self) -> int:
        """The number of batches in the queue."""
        return len(self._holder.now.waiting)

    @property
    def dequeued(self) -> PyTree | None:
        """The activations of the training batch whose gradients are due, or None."""
        with self._tables:
            item = self._settle().dequeued
        return item.activations if item is not None and item.training else None

    @property
    def state(self) -> TableState:
        """The tables' state, for the functional API.

        The next `apply_gradients` donates its tables and slots; step and counters stay readable.
        """
        with self._tables:
            return self._current("state")

    @state.setter
    def state(self, state: TableState) -> None:
        """Replace the state by another of this engine; waiting batches are looked up again."""
        with self._tables:
            check_state(state, self.engine.layout)
            self._replace(state)

    def _current(self, what: str) -> TableState:
        self._settled(what)
        return self._built()

    @property
    def embedding_tables(self) -> dict[TableConfig, Array]:
        """The logical tables `[V, D]` by `TableConfig`, copied anew at each access.

        Every device gets all tables whole. `retrieve` needs only the host's memory for that. The
        dictionary is a pytree, whose leaves are in the order in which the features name the tables.
        """
        with self._tables:
            by_name = self.engine.tables(self._current("embedding_tables"))
        # JAX sorts the keys of a plain dictionary, but configs have no order of their own.
        return collections.OrderedDict((x, by_name[name]) for name, x in self._declared.items())

    def load(
        self, tables: Mapping[str, Any], slots: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Replace tables and slots by host arrays; waiting batches are looked up again.

        Tables and slots that are not given stay as they are. After a device error they are created
        anew, the step is 0, and a batch that was dequeued is forgotten.

        Args:
          tables: `[V, D]` by name, for any of the tables.
          slots: by table name, then slot name, for any of the slots.

        Raises:
          ValueError: an unknown name, or a wrong shape; nothing changes then.
        """
        with self._tables:
            held = self._settle()
            state = held.state
            if state is None or held.problem() is not None:
                state = self.engine.init(jax.random.key(self._seed))
            self._replace(self.engine.load_arrays(state, tables, slots))

    def _replace(self, state: TableState) -> None:
        """Take a valid state, and look up waiting batches again."""
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
        """Return tables and slots as host arrays by name, copied shard by shard."""
        with self._tables:
            return retrieve.host_arrays(self._current("retrieve"), self.engine.layout)

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration, batch size and pipelining as plain objects."""
        return {
            **self.engine.describe(),
            "per_replica_batch_size": self._holder.now.described_sizes(self.engine.structure.paths),
            "pipelined": self._pipelined,
        }

    def _issue(
        self, what: str, state: TableState, items: tuple[Enqueued, ...]
    ) -> tuple[Enqueued, ...]:
        """Return the batches with their activations, looked up in `state` where missing."""
        lookup = functools.partial(self.engine.lookup, state)
        try:
            return tuple([item.issued(lookup) for item in items])
        except Exception as error:
            self._note(what, error)
            raise

    def _settle(self) -> Held:
        """Return the record. The caller holds `_tables`, so no update is running."""
        if self._holder.now.update is not None:
            self._holder.derive(Held.settled)
        return self._holder.now

    def _settled(self, what: str) -> Held:
        """Return the record if the state is valid. The caller holds `_tables`.

        Raises:
          RuntimeError: the state is invalid.
        """
        self._settle()
        return self._valid(what)

    def _valid(self, what: str) -> Held:
        """Return the record if the state is valid.

        Raises:
          RuntimeError: the state is invalid.
        """
        while True:
            held = self._holder.now
            problem, now = held.problem(), self._holder.now
            # Try again if another thread's update has taken the arrays during the check.
            if now.state is held.state and now.update is held.update:
                break
        if problem is not None:
            expected, remedy = "a valid state", "load the tables, or set `state`"
            raise RuntimeError(message(what, expected=expected, got=problem, remedy=remedy))
        return held
