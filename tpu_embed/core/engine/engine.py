"""The functional API: tables are declared once, then every call is a pure function of a state.

What a user gives is checked outside of any program. `Programs` are traced: they call the lookup and
the update, and put the parts of a state together again.

Input: feature configs, then states, batches and gradients. Output: activations and new states.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_embed._calls import Exchange, call
from tpu_embed._checks import check_int, check_key, refuse_derivatives, refuse_pickle
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer
from tpu_embed.config import TableConfig
from tpu_embed.core.batch import Batch, BatchSpec, TracedIds
from tpu_embed.core.engine.admitter import Admitter, nan_if
from tpu_embed.core.engine.logical_rows import (
    LogicalRows,
    check_engine,
    prepare_adoption,
)
from tpu_embed.core.ids import HostIds, structure
from tpu_embed.core.layout import (
    ExchangeDtype,
    HostRates,
    Layout,
    describe,
    describe_devices,
    describe_tables,
    make_axes,
    make_layout,
)
from tpu_embed.core.lookup import (
    Jagged,
    activations_read,
    lookup,
    not_differentiable,
    record_read,
    split_activations,
)
from tpu_embed.core.place import Intake
from tpu_embed.core.state import (
    TableState,
    check_arrays,
    check_not_donated,
    init_tables,
    make_homes,
    new_vocabulary,
    visiting_tables,
)
from tpu_embed.core.update import (
    LOOKUP,
    UPDATE,
    Guard,
    OnBadGradient,
    Operands,
    check_in_place,
    check_trainable,
    checked_gradients,
    named,
    note_copies,
    update,
)
from tpu_embed.vocabulary import Vocabularies, choose_vocabularies

_not_differentiable = refuse_derivatives(
    "update",
    expected="a step that is not differentiated",
    got="a gradient through it",
    remedy="differentiate the loss by the activations, then update with their gradients",
)


class Programs:
    """The compiled programs of one engine.

    Args:
      layout: the engine's layout.
      guard: what to do with activation gradients that are not finite.
      vocabularies: the maps; None without dynamic vocabularies.

    Attributes:
      traces: how often the lookup and the update were traced.
      lookup: `(tables, source, vocabulary) -> [F] activations`; of a batch with visits it takes the
        `vocabulary` of the state, else None.
      update: `(state, source, operands) -> state`.
      update_in_place: `((tables, slots), (step, counters), source, operands) -> (tables, slots,
        step, counters)`, which a `TableState` is made of. Tables and slots are donated; step and
        counters are not, so users can still read them.
    """

    def __init__(
        self, layout: Layout, guard: Guard, vocabularies: Vocabularies | None
    ) -> None:
        self._layout, self._guard = layout, guard
        # States without keys are of the first history of the maps.
        self._history = np.int32(
            0 if vocabularies is None else vocabularies.first_history
        )
        self.traces: collections.Counter[str] = collections.Counter()
        self._made = jax.jit(self._init)
        # A user finds these programs in a jaxpr or a profile by their names.
        self.lookup = jax.jit(named(self._lookup, LOOKUP))
        self.update = jax.jit(named(self._update, UPDATE))
        self.update_in_place = jax.jit(
            named(self._update_rows, UPDATE), donate_argnums=0
        )

    def init(self, key: Array) -> TableState:
        """Return a first state; see `EmbeddingEngine.init`."""
        check_key("init", key)
        return self._made(key, self._history)

    def _init(self, key: Array, history: Array) -> TableState:
        tables, slots = init_tables(key, self._layout.stacks, self._layout.axes)
        state = TableState(tables, slots, jnp.int32(0), self._guard.new_counters())
        if self._layout.living:
            vocabulary = new_vocabulary(key, history, self._layout.version_size)
            vocabulary = self._layout.axes.reshard(vocabulary, ())
            state = dataclasses.replace(state, vocabulary=vocabulary)
        return state

    def _lookup(
        self,
        tables: dict[str, Array],
        source: Batch | TracedIds,
        vocabulary: dict[str, Array] | None = None,
    ) -> list[Array | Jagged]:
        self.traces["lookup"] += 1  # this line runs once per trace, not once per step
        layout = self._layout
        check_arrays(TableState(tables, {}, jnp.int32(0), {}), layout, slots=False)
        if vocabulary is not None:
            assert isinstance(source, Batch), "features have no visits"
            assert source.visits is not None, (
                "a batch without visits takes no vocabulary"
            )
            small = source.layout_in(layout)
            tables = visiting_tables(
                tables, vocabulary, source.visits[1], layout, small
            )
            source, layout = (
                dataclasses.replace(source, visits=None, visit_rows=0),
                small,
            )
        activations, bad_ids = lookup(not_differentiable(tables), source, layout)
        source.report(bad_ids, layout)
        return activations

    def _update_rows(
        self, rows: Any, rest: Any, source: Batch, operands: Operands
    ) -> tuple[Any, ...]:
        # The arguments are split because a jit donates whole arguments: `rows` is, `rest` is not.
        # The result is a plain tuple for the sake of `Exchange`.
        new = self._update(TableState(*rows, *rest), source, operands)
        return new.tables, new.slots, new.step, new.counters

    def _update(
        self, state: TableState, source: Batch | TracedIds, operands: Operands
    ) -> TableState:
        self.traces["update"] += 1
        check_arrays(state, self._layout, slots=True)
        # One bad gradient skips the step for all tables, so that they stay at the same step.
        refused = operands.skip
        if (bad := self._guard.find(operands.gradients, source)) is not None:
            bad = bad if refused is None else bad & ~refused
            skip = jnp.any(bad)
            operands = operands._replace(
                skip=skip if refused is None else skip | refused
            )
        rows, gradients = _not_differentiable(
            ((state.tables, state.slots), operands.gradients)
        )
        operands = operands._replace(gradients=gradients)
        tables, slots, bad_ids = update(*rows, source, operands, self._layout)
        # Inside a jit nothing can raise: both reports reach a user through `checkify`.
        source.report(bad_ids, self._layout)
        self._guard.report(bad)
        counters = self._guard.counted(state.counters, bad_ids, bad, refused)
        trained = [
            stack.name for stack in self._layout.stacks if stack.optimizer is not None
        ]
        held = jax.tree.leaves(
            [(state.tables[name], state.slots[name]) for name in trained]
        )
        return TableState(
            tables, slots, note_copies(operands.steps_done, held), counters
        )


class EmbeddingEngine(LogicalRows):
    """Sharded embedding tables as pure functions of an explicit state.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dict, list, tuple, namedtuple, dataclass.
      optimizer: used for tables that have none of their own: one of `tpu_embed.optimizers`, or a
        row-separable optax transform; None if no table is trained (serving).
      mesh: the devices; None: the mesh of `jax.set_mesh`, or else one axis over all devices.
      batch_axes: mesh axes that split the batch; None: all.
      sum_blocks: G, the number of contiguous blocks of the global batch in which a row's gradients
        are summed; on CPUs, all device counts that divide G give the same bits.
      stack_tables: put tables of equal dim, dtype, optimizer and placement into one array.
      on_bad_gradient: what to do with a step in which an activation gradient has NaN or infinity:
        "allow" applies it without checking; "skip" skips and counts it; "error" does so too, and
        raises `ValueError` outside a jit, for which it has to wait for the gradients.
      lookahead: with dynamic vocabularies, how many training batches may be admitted before the
        update of an earlier one; keys of so many batches before a batch are not evicted for it.
      vocabularies: those of another engine, to share its maps. None: its own; the attribute of
        this name is None if no vocabulary lives, and no table is on the host.
      exchange_dtype: "bfloat16" rounds rows that sharded tables give to lookups, and each partial
        sum of gradients, on every number of devices: an exchange then sends half the bytes. What
        serves the tables (`io.serving_lookup`, exported models) rounds nothing.

    Attributes:
      storage: the rows at home of tables on the host; None without such tables.
      intake: makes batches, and remembers their shapes.

    Raises:
      ValueError: configs do not fit each other, the mesh or the optimizer; `placement="auto"`.

    Example:
      >>> import jax, numpy as np, tpu_embed
      >>> table = tpu_embed.TableConfig(vocabulary_size=8, dim=2, name="item")
      >>> feature_config = {"x": tpu_embed.FeatureConfig(table)}
      >>> engine = EmbeddingEngine(feature_config, tpu_embed.optimizers.SGD(0.1))
      >>> state = engine.init(jax.random.key(0))
      >>> batch = engine.place({"x": np.zeros([jax.device_count(), 3], np.int32)})
      >>> activations = engine.lookup(state, batch)
      >>> state = engine.update(state, batch, activations)
      >>> int(state.step)
      1
    """

    def __init__(
        self,
        feature_config: PyTree,
        optimizer: Any = None,
        *,
        mesh: Mesh | None = None,
        batch_axes: str | Sequence[str] | None = None,
        sum_blocks: int = 8,
        stack_tables: bool = True,
        on_bad_gradient: OnBadGradient = "allow",
        lookahead: int | None = None,
        vocabularies: Vocabularies | None = None,
        exchange_dtype: ExchangeDtype | None = None,
    ) -> None:
        blocks = check_int("sum_blocks", sum_blocks, minimum=1)
        self.structure = structure.flatten(feature_config)
        options = {"stack_tables": stack_tables, "exchange_dtype": exchange_dtype}
        layout = make_layout(
            self.structure,
            optimizer,
            make_axes(mesh, batch_axes),
            sum_blocks=blocks,
            **options,
        )
        living = [table for _, table in layout.living]
        maps = choose_vocabularies(living, lookahead, vocabularies, make_homes(layout))
        LogicalRows.__init__(self, layout, maps)
        self._guard, self._rates = Guard(on_bad_gradient, layout), HostRates(layout)
        self._admitter = Admitter(layout, maps)
        self.intake = Intake(self.structure, layout, maps)
        self._programs = Programs(layout, self._guard, maps)

    def init(self, key: Array) -> TableState:
        """Create all tables and slots; each device creates its own rows.

        Args:
          key: a jax PRNG key; a row depends on the key, its table's name and its row id only.

        Raises:
          ValueError: a call inside `shard_map`, or under another mesh of `jax.set_mesh`.
          TypeError: it is not a key.
        """
        return self._programs.init(key)

    def place(
        self,
        features: PyTree,
        weights: PyTree | None = None,
        spec: BatchSpec | None = None,
        *,
        training: bool = True,
    ) -> Batch:
        """Check a batch of ids on the host, route it, and send it to the devices in one transfer.

        Args:
          features: the global batch: arrays, columns of a data set, `SparseIds` or `RaggedIds`, in
            the structure of the features, or a `Batch` placed before. With several processes, each
            gives the examples of its own devices, in the order of `batch_axes`; all make the same
            calls in one order.
          weights: one weight per id, in the same structure; None where all are one.
          spec: the batch's exact shape; None: a shape of earlier batches if it fits one of them.
          training: False for a batch that is only looked up: it carries less, dynamic vocabularies
            learn nothing from it, and mappings may leave out features, which `lookup` then does.

        Raises:
          ValueError: bad ids, weights, structure or batch size, or a spec that the batch does not
            fit (the message has one that does); then no process places anything.
          TypeError: ids that are not integers, or a wrong container type.
          RuntimeError: another process did not place its part, or has left.
        """
        return self.intake.place(features, weights, spec, training=training)

    def admit(self, state: TableState, batch: Batch) -> tuple[TableState, Batch]:
        """Bring the tables to the step of a batch: rows of its new keys get their initial values.

        Call it outside a jit, for every training batch in the order in which they were placed, and
        at most `lookahead` batches before their updates. Of a batch that is only looked up it
        checks whether its rows still belong to its keys. Tables and slots of the given state are
        gone then. Without dynamic vocabularies it returns what it is given.

        If Ctrl-C comes meanwhile, the given state is either as before, and the call can be made
        again, or its arrays are gone and every call refuses it: restore a checkpoint.

        Raises:
          ValueError: the batch is not the next one; or it is only looked up, and one of its
            rows belongs to another key by now. The state stays valid.
        """
        return self.prepare_admit(state, batch).run()

    def prepare_admit(
        self, state: TableState, batch: Batch
    ) -> Exchange[tuple[TableState, Batch]]:
        """Check the arguments of `admit`; return what does it, and survives Ctrl-C."""
        return self._admitter.prepare(state, self.intake.own(batch))

    def host_ids(
        self, features: PyTree, weights: PyTree | None = None
    ) -> list[HostIds]:
        """Return this process's ids as `place` checks them, keys as positions, without sending."""
        return self.intake.host_ids(features, weights)

    def adopt(self, state: TableState, other: EmbeddingEngine) -> TableState:
        """Return the state of another engine as one of this engine, as a save and restore would.

        The two have the same tables, by name, dim, dtype, optimizer and slots. Devices, placement,
        stacking, `sum_blocks` and `storage` may differ, and the capacity of a dynamic vocabulary; a
        smaller one keeps the keys with the best scores. Rows, slots, maps, step, counters and the
        random key of new rows are those of the other engine; batches placed before, by either
        engine, are refused here. `state` and `other` stay as they are, so both states, and on the
        host both engines' rows at home, take memory. After Ctrl-C, call it again. With several
        processes, all of them call this; each has devices of both engines, and rows travel between
        hosts as messages.

        Args:
          state: the newest state of the other engine.
          other: the other engine.

        Raises:
          ValueError: a table differs, or the vocabulary size of one whose ids are row numbers; the
            state is not the other engine's newest one, or it has placed batches that are not
            admitted; a process has no devices of one of the engines. Nothing has changed then.
          TypeError: `other` is no engine.
          RuntimeError: rows of the other engine were lost on their way home.

        Example:
          >>> import jax, numpy as np, tpu_embed
          >>> def make(capacity):
          ...     vocabulary = tpu_embed.DynamicVocabulary()
          ...     table = tpu_embed.TableConfig(capacity, 2, name="item", vocabulary=vocabulary)
          ...     return EmbeddingEngine(tpu_embed.FeatureConfig(table))
          >>> small, large = make(8), make(16)
          >>> state = small.init(jax.random.key(0))
          >>> state, _ = small.admit(state, small.place(np.arange(100, 108).reshape(8, 1)))
          >>> state = large.adopt(state, small)
          >>> len(large.vocabularies), large.tables(state)["item"].shape
          (8, (16, 2))
        """
        return self.prepare_adopt(state, other)()

    def prepare_adopt(
        self, state: TableState, other: EmbeddingEngine
    ) -> Callable[[], TableState]:
        """Check the arguments of `adopt`, and copy rows; return a function, to be called once.

        The function gives this engine its maps. Until then nothing has changed.
        """
        check_engine("other", other)
        counters = jax.eval_shape(self.init, jax.random.key(0)).counters
        return prepare_adoption(state, other, self, counters)

    def lookup(
        self,
        state: TableState,
        batch: PyTree,
        weights: PyTree | None = None,
        *,
        spec: BatchSpec | None = None,
    ) -> PyTree:
        """Return the activations of a batch, in the structure of the features.

        Args:
          state: the tables.
          batch: what `place` returned, or the features themselves (inside a jit, as dense arrays).
          weights: with features only: one weight per id, differentiable inside a jit.
          spec: with features outside a jit: as for `place`. Inside a jit it is not used any more.

        Returns:
          `[B, …, D]` per feature, float32 (float64 for a float64 table), batch dimension sharded; a
          `Jagged` of a jagged feature.

        Raises:
          ValueError: what `place` refuses; a call inside `shard_map`, or under another mesh of
            `jax.set_mesh`.
          TypeError: what `place` refuses; differentiation with respect to the state.
        """
        check_not_donated(state, tables_alone=True)
        source, refused = self._admitter.check(
            state, self.intake.source(batch, weights, spec)
        )
        visits = isinstance(source, Batch) and source.visit_rows
        vocabulary = state.vocabulary if visits else None
        found = call(self._programs.lookup, state.tables, source, vocabulary)
        activations = nan_if(refused, found)
        # An update later in the same trace must wait for this lookup.
        reads, _ = split_activations(activations)
        for feature, read in zip(self.layout.features, reads, strict=True):
            record_read(state.tables[self.layout.stacks[feature.stack].name], read)
        left_out = source.left_out if isinstance(source, Batch) else ()
        return self.structure.unflatten(activations, without=left_out)

    def update(
        self,
        state: TableState,
        batch: PyTree,
        activation_gradients: PyTree,
        weights: PyTree | None = None,
        *,
        spec: BatchSpec | None = None,
        learning_rates: tuple[ArrayLike, ...] | None = None,
    ) -> TableState:
        """Return the state after one step of every table's optimizer.

        Trainable tables are copied, unless a jit around it donates the state (`donate_argnums`);
        the others are shared. Outside a jit, `update_in_place` copies none.

        Args:
          state: the tables.
          batch, weights, spec: as for `lookup`.
          activation_gradients: in the structure and shapes of the activations; None is zero. Of a
            jagged feature, an array `[S, C, D]` or a `Jagged`, whose row splits are not read.
          learning_rates: what `learning_rates()` returned outside the jit; needed inside a jit if a
            learning rate is a callable without arguments.

        Raises:
          ValueError: a gradient of a wrong shape, or not finite under `on_bad_gradient="error"`;
            no optimizer, missing learning rates, and what `lookup` refuses.
          TypeError: what `lookup` refuses.
        """
        source, refused = self._admitter.check(
            state, self.intake.source(batch, weights, spec)
        )
        operands = self._operands(state, source, activation_gradients, learning_rates)
        new = call(
            self._programs.update, state, source, operands._replace(skip=refused)
        )
        return dataclasses.replace(new, vocabulary=state.vocabulary)

    def update_in_place(
        self,
        state: TableState,
        batch: Batch,
        activation_gradients: PyTree,
        *,
        learning_rates: tuple[ArrayLike, ...] | None = None,
    ) -> TableState:
        """Do what `update` does in the memory of the state, whose tables and slots are then gone.

        Use it outside a jit. If it refuses an argument, as `update` does, the state stays valid.
        """
        return self.prepare_update(
            state, batch, activation_gradients, learning_rates
        ).run()

    def prepare_update(
        self,
        state: TableState,
        batch: Batch,
        gradients: PyTree,
        learning_rates: Any = None,
    ) -> Exchange[TableState]:
        """Check the arguments of `update_in_place`; return what does it, and survives Ctrl-C."""
        source, _ = self._admitter.check(state, self.intake.source(batch, None, None))
        operands = self._operands(state, source, gradients, learning_rates)
        rows, rest = (state.tables, state.slots), (state.step, state.counters)
        program = self._programs.update_in_place

        def update(call):
            new = call(program, rows, rest, source, operands)
            return TableState(*new, vocabulary=state.vocabulary)

        return Exchange(update)

    def _operands(
        self,
        state: TableState,
        source: Batch | TracedIds,
        gradients: PyTree,
        learning_rates: tuple[ArrayLike, ...] | None,
    ) -> Operands:
        """Return what an update is given besides tables and ids, after a check of it."""
        check_trainable("update", self.layout)
        check_not_donated(state)
        given = self.structure.match(gradients, what="activation_gradients")
        checked = checked_gradients(given, source.spec, self.layout)
        leaves = jax.tree.leaves((state, source, checked))
        # Outside a jit, values can be checked now, and callable learning rates be read.
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            self._guard.refuse(checked, source)
            learning_rates = (
                self._rates.read() if learning_rates is None else learning_rates
            )
        rates = self._rates.by_stack(learning_rates)
        replicas = self.layout.axes.replicas
        reads = {
            name: activations_read(one, replicas) for name, one in state.tables.items()
        }
        return Operands(checked, state.step + 1, rates, reads)

    def check_in_place(
        self, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Check that a jitted training step updates tables and slots in their own memory.

        The step is compiled for these arguments, but not run. A step that copies a table gives the
        right results slowly, so no other error tells of the copy.

        Args:
          step: what `jax.jit` or `nnx.jit` returned.
          args: its arguments, among them this engine's state or a model with a layer of it; shapes
            with shardings (`jax.ShapeDtypeStruct`) will do.
          kwargs: its keyword arguments.

        Raises:
          ValueError: tables or slots would be copied; the message names those of a copy's shape,
            and the remedy.
        """
        check_in_place(step, args, kwargs, self.layout)

    def learning_rates(self) -> tuple[Array, ...]:
        """Call every learning rate that takes no arguments, and return the values."""
        return self._rates.read()

    def check_trainable(self, what: str) -> None:
        """Raise `ValueError` unless every trainable table has an optimizer."""
        check_trainable(what, self.layout)

    def __repr__(self) -> str:
        """Show a line per table: its size, placement and optimizer."""
        return "\n  ".join(
            [
                f"EmbeddingEngine on {describe_devices(self.layout)}",
                *describe_tables(self.layout),
            ]
        )

    def __copy__(self) -> EmbeddingEngine:
        """Return the engine itself, because it never changes and holds no state."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingEngine:
        """Return the engine itself; refuse to copy dynamic vocabularies with a model."""
        copy.deepcopy(self.vocabularies)  # None, or maps, which refuse
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, alone or in a model: programs and devices belong to a process."""
        refuse_pickle(
            "EmbeddingEngine",
            remedy="pickle its configs and make it again; tpu_embed.io.save and restore keep its "
            "tables, save_modules and restore_modules a flax model",
        )

    @property
    def table_configs(self) -> dict[str, TableConfig]:
        """The declared tables, by name."""
        return self.structure.configs

    @property
    def compilations(self) -> dict[str, int]:
        """How often programs were traced: those of `lookup` and `update` once per `BatchSpec`.

        With dynamic vocabularies also those of `admit`: once per stack for each size of its new
        rows, of which there are few.
        """
        traces = {what: self._programs.traces[what] for what in ("lookup", "update")}
        return traces | self._admitter.traces

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration of tables, stacks and devices as plain objects."""
        return describe(self.layout)
