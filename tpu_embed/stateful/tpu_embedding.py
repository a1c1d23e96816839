"""The stateful API: `TPUEmbedding` holds the tables and a queue of batches, and calls the engine.

It reads what it holds, calls pure functions of the engine, and stores the results. Nothing is
computed here.

Input: batches of ids, then gradients. Output: activations; the tables change.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from jax.sharding import Mesh

from tpu_embed._calls import label, labelled
from tpu_embed._checks import (
    check_int,
    check_type,
    explain_arguments,
    refuse,
    refuse_pickle,
)
from tpu_embed._types import Array, PyTree
from tpu_embed.config import TableConfig
from tpu_embed.core.batch import Batch
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import structure
from tpu_embed.core.layout import ExchangeDtype, describe_devices, describe_tables
from tpu_embed.core.rows import host_arrays
from tpu_embed.core.state import TableState, check_state, fields
from tpu_embed.core.update import OnBadGradient
from tpu_embed.planning.plan import resolve
from tpu_embed.stateful.state_keeper import (
    Enqueued,
    StateKeeper,
    batch_sizes,
    placed_step,
)


class TPUEmbedding:
    """Train embedding tables: enqueue ids, dequeue activations, apply their gradients.

    An exception raised by a check, or while a program is traced, leaves tables, slots, queue and
    step as they were. After a device error the state is invalid: every call raises an error that
    says so, until `load` succeeds or `state` is set.

    After Ctrl-C in a call, this is as before the call, or as after it: `waiting`, `dequeued` and
    `state.step` tell which, and the training loop can go on from there. Or the state is invalid,
    as after a device error; that is rare but for the first call of each shape.

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
      lookahead: as for `EmbeddingEngine`, with dynamic vocabularies; at least 1 if pipelined.
      exchange_dtype: as for `EmbeddingEngine`.

    Raises:
      ValueError: what `EmbeddingEngine` refuses.

    Example:
      >>> import jax, numpy as np, tpu_embed
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
        lookahead: int = 0,
        exchange_dtype: ExchangeDtype | None = None,
    ) -> None:
        declared = structure.flatten(feature_config)
        self._declared = declared.configs
        placed = resolve(feature_config, optimizer, mesh=mesh)
        self._pipelined = bool(pipeline_execution_with_tensor_core)
        # Pipelined, a batch is admitted before the update of the one before it.
        self.engine = EmbeddingEngine(
            placed,
            optimizer,
            mesh=mesh,
            batch_axes=batch_axes,
            on_bad_gradient=on_bad_gradient,
            lookahead=max(
                check_int("lookahead", lookahead, minimum=0), int(self._pipelined)
            ),
            exchange_dtype=exchange_dtype,
        )
        self._keeper = StateKeeper(self.engine, seed)
        self._placing = threading.RLock()
        """Held while a batch of keys is placed and enqueued, so that both orders are the same.

        Who holds it may take the keeper's lock, but not the other way round.
        """

    def __repr__(self) -> str:
        """Show how far the training is, and a line per table."""
        first = f"TPUEmbedding on {describe_devices(self.engine.layout)}"
        tables = describe_tables(self.engine.layout)
        return "\n  ".join([f"{first}: {self._keeper.now.progress}", *tables])

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied: the queue and the devices belong to this process."""
        refuse_pickle(
            "TPUEmbedding",
            remedy="make another of the same configs, and give its load what retrieve returned; "
            "tpu_embed.io.save writes its state to files",
        )

    @explain_arguments(per_replica_input_shapes="per_replica_batch_size=")
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
        with self._keeper.lock:
            record = self._keeper.settled("build").with_size(
                size, "build", "make another TPUEmbedding"
            )
            self._keeper.built()
            self._keeper.change(per_replica=record.per_replica)

    @explain_arguments(device="the whole batch, for all devices of this process")
    def enqueue(
        self,
        features: PyTree,
        weights: PyTree | None = None,
        training: bool = True,
        name: str | None = None,
    ) -> None:
        """Append a batch to the queue, and start its transfer to the devices.

        If the lookup of a pipelined `enqueue` fails, nothing is enqueued, but with dynamic
        vocabularies the batch stays once its keys are admitted; `waiting` tells which. `dequeue`
        looks it up again then.

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
            if training:
                self.engine.check_trainable(f"{what} with training=True")
            if self.engine.vocabularies is None or isinstance(features, Batch):
                batch = self.engine.place(features, weights)
                self._push(what, Enqueued(batch, training, name))
            else:
                self._enqueue_keys(what, features, weights, training, name)

    def _enqueue_keys(
        self,
        what: str,
        features: PyTree,
        weights: PyTree | None,
        training: bool,
        name: str | None,
    ) -> None:
        """Place and enqueue a batch of keys; if that fails, the maps are as before."""
        maps = self.engine.vocabularies
        assert maps is not None
        with self._placing:
            with self._keeper.lock:
                before = self._keeper.forget_lost().last_step(maps.admitted)
            placed, place = maps.placed, self.engine.intake.place_ids
            try:
                batch = place(features, weights, training=training, step=before)
                if training:  # others may have placed some meanwhile
                    placed = placed_step(batch) - 1
                self._push(what, Enqueued(batch, training, name))
            except BaseException:
                if training:
                    maps.order.run(lambda: self._undo(placed))
                raise

    def _undo(self, placed: int) -> None:
        """Undo a batch after others, unless it was admitted, or more were placed after it."""
        maps = self.engine.vocabularies
        assert maps is not None
        with self._keeper.lock:
            enqueued = self._keeper.settle().last_step(maps.admitted)
        if enqueued <= placed == maps.placed - 1:
            maps.undo(placed)

    def _push(self, what: str, item: Enqueued) -> None:
        """Append a placed batch."""
        keeper = self._keeper
        with keeper.lock:
            keeper.settled(what)
            record = keeper.forget_lost().with_size(
                item.size,
                what,
                "pad it with tpu_embed.pad_batch, or enqueue it with training=False",
            )
            keeper.check_keys(what, item)
            keeper.built()
            # The first batch in a pipelined queue is looked up at once (see `state_keeper.py`).
            if self._pipelined and not record.waiting:
                keeper.issue(what, 0, item)
            else:
                keeper.change(
                    waiting=(*record.waiting, item), per_replica=record.per_replica
                )

    def dequeue(self, name: str | None = None) -> PyTree:
        """Return the activations of the oldest batch, with the batch dimension sharded.

        Args:
          name: a label for profiles and errors.

        Raises:
          RuntimeError: the queue is empty, the last training batch still waits for its gradients,
            or the state is invalid.
        """
        what, keeper = label("dequeue", name), self._keeper
        with labelled(what, name), keeper.lock:
            keeper.settled(what)
            record = keeper.forget_lost()
            if record.dequeued is not None and record.dequeued.training:
                refuse(
                    what,
                    expected="gradients of the training batch that was dequeued before",
                    got="none yet",
                    remedy="call apply_gradients first",
                    error=RuntimeError,
                )
            if not record.waiting:
                refuse(
                    what,
                    expected="a batch",
                    got="an empty queue",
                    remedy="call enqueue first",
                    error=RuntimeError,
                )
            # Pipelined, the batch after this one is looked up too, before this one's update.
            for at, item in enumerate(record.waiting[: 2 if self._pipelined else 1]):
                keeper.issue(what, at, item)
            head, *others = keeper.now.waiting
            keeper.change(waiting=(*others,), dequeued=head)
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
        with labelled(what, name), self._keeper.lock:
            state, item = self._keeper.settled(what).waiting_for_gradients(what)
            rates = self.engine.learning_rates()
            update = self.engine.prepare_update(state, item.batch, gradients, rates)
            self._keeper.run(
                what,
                update,
                lambda now, state: now._replace(state=state, dequeued=None),
            )

    @property
    def waiting(self) -> int:
        """The number of batches in the queue."""
        return len(self._keeper.now.waiting)

    @property
    def dequeued(self) -> PyTree | None:
        """The activations of the training batch whose gradients are due, or None."""
        with self._keeper.lock:
            item = self._keeper.settle().dequeued
        return item.activations if item is not None and item.training else None

    @property
    def state(self) -> TableState:
        """The tables' state, for the functional API.

        The next `apply_gradients` donates its tables and slots; step and counters stay readable.
        """
        with self._keeper.lock:
            return self._current("state")

    @state.setter
    def state(self, state: TableState) -> None:
        """Replace the state by another of this engine; waiting batches are looked up again.

        After a restore, batches of keys that were placed before it are forgotten, with a warning.
        """
        with self._keeper.lock:
            check_state(state, self.engine.layout)
            if self.engine.vocabularies is not None:
                self.engine.vocabularies.check_newest(state)
            self._replace(state)

    def _current(self, what: str) -> TableState:
        self._keeper.settled(what)
        return self._keeper.built()

    @property
    def embedding_tables(self) -> dict[TableConfig, Array]:
        """The logical tables `[V, D]` by `TableConfig`, copied anew at each access.

        Every device gets all tables whole. `retrieve` needs only the host's memory for that. The
        dictionary is a pytree, whose leaves are in the order in which the features name the tables.
        """
        with self._keeper.lock:
            by_name = self.engine.tables(self._current("embedding_tables"))
        # JAX sorts the keys of a plain dictionary, but configs have no order of their own.
        return collections.OrderedDict(
            (x, by_name[name]) for name, x in self._declared.items()
        )

    def load(
        self,
        tables: Mapping[str, Any],
        slots: Mapping[str, Mapping[str, Any]] | None = None,
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
        with self._keeper.lock:
            record = self._keeper.settle()
            state = record.state
            if state is None or record.problem() is not None:
                named = {name: {None, *(slots or {}).get(name, ())} for name in tables}
                every = fields(self.engine.layout)
                replaced = all(f.slot in named.get(f.table.name, ()) for f in every)
                state = self._keeper.new_state(replaced=replaced)
            self._replace(self.engine.load_arrays(state, tables, slots))

    def adopt(self, other: TPUEmbedding) -> None:
        """Take the tables of another `TPUEmbedding`, as `EmbeddingEngine.adopt` takes a state.

        It is as if `state` were set: waiting batches are looked up again, those of keys forgotten.

        Raises:
          ValueError, TypeError: what `EmbeddingEngine.adopt` refuses; nothing changes then.
          RuntimeError: training batches of `other` wait for their gradients; its state is invalid.
        """
        check_type(
            "other",
            other,
            TPUEmbedding,
            expected="a TPUEmbedding",
            remedy="see engine.adopt",
        )
        # In one order, so that two that adopt each other's tables do not wait for each other.
        first, second = sorted((self._keeper, other._keeper), key=id)
        with first.lock, second.lock:
            theirs = other._keeper.trained_state("adopt")
            load = self.engine.prepare_adopt(theirs, other.engine)
            self._replace(load())

    def _replace(self, state: TableState) -> None:
        """Take a valid state, and look up waiting batches again."""
        keeper = self._keeper
        record = keeper.forget_lost()
        dequeued = record.dequeued if record.problem() is None else None
        waiting = tuple(item._replace(activations=None) for item in record.waiting)
        keeper.change(state=state, waiting=waiting, dequeued=dequeued, failure=None)
        if self._pipelined and waiting:
            keeper.issue("load", 0, waiting[0])

    def retrieve(
        self,
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, np.ndarray]]]:
        """Return tables and slots as host arrays by name, copied shard by shard."""
        with self._keeper.lock:
            return host_arrays(self._current("retrieve"), self.engine.layout)

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration, batch size and pipelining as plain objects."""
        return {
            **self.engine.describe(),
            "per_replica_batch_size": self._keeper.now.described_sizes(
                self.engine.structure.paths
            ),
            "pipelined": self._pipelined,
        }
