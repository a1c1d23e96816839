"""The functional API: declare once, then init, place, lookup and update, all pure.

Input: feature configs, then state, batches and gradients. Output: activations and new states.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_embed import _checks
from tpu_embed._calls import call
from tpu_embed._types import Array, ArrayLike, PyTree, Tracer
from tpu_embed.config import TableConfig
from tpu_embed.core.batch import Batch, BatchSpec, Intake, TracedIds
from tpu_embed.core.ids import HostIds, structure
from tpu_embed.core.layout import HostRates, Layout, describe, make_axes, make_layout
from tpu_embed.core.lookup import activations_read, lookup, not_differentiable, record_lookup
from tpu_embed.core.state import (
    TableState,
    check_forms,
    check_not_donated,
    check_tables_not_donated,
    init_tables,
    logical,
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
    update,
)


class EmbeddingEngine:
    """Sharded embedding tables as pure functions of an explicit state.

    Args:
      feature_config: `FeatureConfig`s in any nesting of dict, list, tuple, namedtuple, dataclass.
      optimizer: for tables without one of their own: one of `tpu_embed.optimizers`, or a
        row-separable optax transform. None: none (serving).
      mesh: the devices; None: one axis over all of them.
      batch_axes: mesh axes that split the batch; None: all.
      sum_blocks: G, the number of contiguous blocks of the global batch that a row's gradients are
        summed in; the result has the same bits on any device count that divides it (CPU).
      stack_tables: put tables of one dim, dtype, optimizer and placement into one array.
      on_bad_gradient: what happens to a step in which an activation gradient holds NaN or infinity:
        "allow": it is applied, nothing looks; "skip": nothing of it is applied, and it is counted;
        "error": as "skip", and outside a jit a `ValueError`, which costs a wait for the gradients.

    Raises:
      ValueError: configs that do not fit together, the mesh, or the optimizer; `placement="auto"`.

    Example:
      >>> import numpy as np, tpu_embed
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
    ) -> None:
        blocks = _checks.check_int("sum_blocks", sum_blocks, minimum=1)
        self._structure = structure.flatten(feature_config)
        axes = make_axes(mesh, batch_axes)
        self.layout: Layout = make_layout(
            self._structure, optimizer, axes, sum_blocks=blocks, stack_tables=stack_tables
        )
        self._guard = Guard(on_bad_gradient, self.layout)
        self._rates = HostRates(self.layout)
        self._intake = Intake(self._structure, self.layout)
        self._traces: collections.Counter[str] = collections.Counter()
        self._init_program = jax.jit(self._init)
        self._lookup_program = jax.jit(named(self._lookup, LOOKUP))
        self._update_program = jax.jit(named(self._update, UPDATE))
        self._update_in_place_program = jax.jit(named(self._update_rows, UPDATE), donate_argnums=0)

    # -- state ---------------------------------------------------------------------------------

    def init(self, key: Array) -> TableState:
        """Make all tables and slots, each device its own rows.

        Args:
          key: a jax PRNG key; a row depends on it, its table's name and its number alone.
        """
        return self._init_program(key)

    def _init(self, key: Array) -> TableState:
        tables, slots = init_tables(key, self.layout.stacks, self.layout.axes)
        return TableState(tables, slots, jnp.int32(0), self._guard.new_counters())

    def tables(self, state: TableState) -> dict[str, Array]:
        """Return the logical tables `[V, D]` by name, in their dtype: a copy of all of them."""
        return logical.tables(state, self.layout)

    def slots(self, state: TableState) -> dict[str, dict[str, Array]]:
        """Return the logical slots by table name, then slot name: a copy of all of them.

        `[V, D]`, or `[V]` for one number a row; a slot that a whole stack shares is as it is.
        """
        return logical.slots(state, self.layout)

    def set_rows(
        self,
        state: TableState,
        name: str,
        rows: ArrayLike,
        values: ArrayLike,
        *,
        slot: str | None = None,
    ) -> TableState:
        """Return the state with some rows of a table, or of one of its slots, set.

        Args:
          state: the state.
          name: the table.
          rows: integers `[n]`, different from each other; inside a jit, those outside [0, V) are
            not written.
          values: `[n, D]` (`[n]` for a slot of one number a row).
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a bad or repeated row, another shape.
        """
        return logical.set_rows(state, self.layout, name, rows, values, slot=slot)

    def load(
        self,
        state: TableState,
        name: str,
        blocks_of_rows: Iterable[ArrayLike],
        *,
        slot: str | None = None,
    ) -> TableState:
        """Return the state with a whole table, or one of its slots, replaced.

        Args:
          state: the state.
          name: the table.
          blocks_of_rows: arrays `[n, D]` whose rows, one after the other, are rows 0 … V - 1; one
            is held at a time.
          slot: the slot, or None for the table itself.

        Raises:
          ValueError: an unknown name, a block of another shape, or not V rows in all.
        """
        return logical.load(state, self.layout, name, blocks_of_rows, slot=slot)

    def load_arrays(
        self,
        state: TableState,
        tables: Mapping[str, ArrayLike],
        slots: Mapping[str, Mapping[str, ArrayLike]] | None = None,
    ) -> TableState:
        """Return the state with whole tables and slots replaced; all are checked first.

        Args:
          state: the state.
          tables: `[V, D]` by table name.
          slots: by table name, then slot name, as `slots` returns them.

        Raises:
          ValueError: an unknown name, or another shape.
        """
        return logical.load_arrays(state, self.layout, tables, slots or {})

    # -- batches -------------------------------------------------------------------------------

    def place(
        self, features: PyTree, weights: PyTree | None = None, spec: BatchSpec | None = None
    ) -> Batch:
        """Check a batch of ids on the host, and send it to the devices in one transfer.

        Args:
          features: arrays, `SparseIds` or `RaggedIds` in the structure of the features; the global
            batch. Of many processes, each gives its own part: the examples of its devices, in the
            order of `batch_axes`; all call this, as often and in the same order.
          weights: a weight an id in the same structure, None where all are one.
          spec: the exact shape the batch gets; None: the union of all batches placed so far, so
            that programs are few.

        Raises:
          ValueError: bad ids, weights, structure or batch size, or a spec that the batch does not
            fit (the message has the one that does); nothing is placed then, on any process.
          TypeError: ids that are no integers, or another container type.
          RuntimeError: another process did not place its part, or has left.
        """
        return self._intake.place(features, weights, spec)

    def host_ids(self, features: PyTree, weights: PyTree | None = None) -> list[HostIds]:
        """Return this process's ids as `place` checks them, without sending them."""
        return self._intake.host_ids(features, weights)

    # -- lookup and update ---------------------------------------------------------------------

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
          batch: what `place` returned, or the features themselves: inside a jit, dense arrays.
          weights: beside features only: a weight an id, differentiable inside a jit.
          spec: beside features only: exchange capacities; a batch that needs more takes a slower
            branch. None inside a jit: the worst case.

        Returns:
          `[B, …, D]` a feature, float32 (float64 for a float64 table), batch dimension sharded.

        Raises:
          ValueError: what `place` refuses; a call inside `shard_map`.
          TypeError: what `place` refuses; differentiation with respect to the state.
        """
        check_tables_not_donated(state)
        source = self._intake.source(batch, weights, spec)
        activations = call(self._lookup_program, state.tables, source)
        record_lookup(state.tables, activations, self.layout)
        return self._structure.unflatten(activations)

    def _lookup(self, tables: dict[str, Array], source: Batch | TracedIds) -> list[Array]:
        self._traces["lookup"] += 1
        check_forms(TableState(tables, {}, jnp.int32(0), {}), self.layout, slots=False)
        activations, bad_ids = lookup(not_differentiable(tables), source, self.layout)
        source.report(bad_ids, self.layout)
        return activations

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

        Pure: every trainable table is copied, unless a jit around it donates the state
        (`donate_argnums`); the others are shared. Outside a jit, see `update_in_place`.

        Args:
          state: the tables.
          batch: as for `lookup`.
          activation_gradients: of the activations, in their structure and shapes; None for a
            feature is a zero gradient.
          weights: as for `lookup`.
          spec: as for `lookup`.
          learning_rates: `learning_rates()`, called outside; needed inside a jit when a learning
            rate is a callable without arguments.

        Raises:
          ValueError: a gradient of another shape, or not finite under `on_bad_gradient="error"`;
            no optimizer, missing learning rates, and what `lookup` refuses.
          TypeError: what `lookup` refuses.
        """
        source = self._intake.source(batch, weights, spec)
        operands = self._operands(state, source, activation_gradients, learning_rates)
        return call(self._update_program, state, source, operands)

    def update_in_place(
        self,
        state: TableState,
        batch: Batch,
        activation_gradients: PyTree,
        *,
        learning_rates: tuple[ArrayLike, ...] | None = None,
    ) -> TableState:
        """Return what `update` does, in the memory of the state, whose tables and slots then go.

        For use outside a jit; arguments and errors are those of `update`. An error of an argument
        leaves the state as it was.
        """
        return call(self.prepare_update(state, batch, activation_gradients, learning_rates))

    def prepare_update(
        self, state: TableState, batch: Batch, gradients: PyTree, learning_rates: Any = None
    ) -> Callable[[], TableState]:
        """Check the arguments of `update_in_place`; return a function that does the rest, once."""
        source = self._intake.source(batch, None, None)
        operands = self._operands(state, source, gradients, learning_rates)
        rows, rest = (state.tables, state.slots), (state.step, state.counters)
        return functools.partial(self._update_in_place_program, rows, rest, source, operands)

    def _update_rows(self, rows: Any, rest: Any, source: Batch, operands: Operands) -> TableState:
        """Return what `_update` does; tables and slots are donated, while the old step stays."""
        return self._update(TableState(*rows, *rest), source, operands)

    def _operands(
        self,
        state: TableState,
        source: Batch | TracedIds,
        gradients: PyTree,
        learning_rates: tuple[ArrayLike, ...] | None,
    ) -> Operands:
        """Return the checked operands of an update."""
        self.check_trainable("update")
        check_not_donated(state)
        given = self._structure.match(gradients, what="activation_gradients")
        checked = checked_gradients(given, source.spec, self.layout)
        leaves = jax.tree.leaves((state, source, checked))
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            self._guard.refuse(checked)
            learning_rates = self.learning_rates() if learning_rates is None else learning_rates
        rates = self._rates.by_stack(learning_rates)
        return Operands(checked, state.step + 1, rates, activations_read(state.tables))

    def _update(
        self, state: TableState, source: Batch | TracedIds, operands: Operands
    ) -> TableState:
        self._traces["update"] += 1
        check_forms(state, self.layout, slots=True)
        if (bad := self._guard.find(operands.gradients)) is not None:
            operands = operands._replace(skip=jnp.any(bad))
        new = update(state.tables, state.slots, source, operands, self.layout)
        source.report(new.bad_ids, self.layout)
        self._guard.report(bad)
        counters = self._guard.counted(state.counters, new.bad_ids, new.overflows, bad)
        return TableState(new.tables, new.slots, operands.steps_done, counters)

    def check_in_place(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Check that a jitted training step updates tables and slots in their own memory.

        The step is compiled for these arguments, not run. A copied table is not wrong, only slow
        (it costs a pass over the whole table in every step), so nothing else tells of it.

        Args:
          step: what `jax.jit` or `nnx.jit` returned.
          args: its arguments: this engine's state, or a model with a layer of this engine, and
            others; shapes with shardings (`jax.ShapeDtypeStruct`) serve as well.
          kwargs: likewise, by keyword.

        Raises:
          ValueError: tables or slots would be copied; the message names them, says why, and what
            to do.
        """
        check_in_place(step, args, kwargs, self.layout)

    def learning_rates(self) -> tuple[Array, ...]:
        """Call every learning rate that takes no arguments, once; return the values."""
        return self._rates.read()

    def check_trainable(self, what: str) -> None:
        """Check that every trainable table has an optimizer.

        Raises:
          ValueError: some have none; the message names them.
        """
        check_trainable(what, self.layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmbeddingEngine:
        """Return the engine itself: it does not change, and its state is not in it."""
        return self

    @property
    def table_configs(self) -> dict[str, TableConfig]:
        """The declared tables, by name."""
        return dict(zip(self._structure.table_names, self._structure.tables, strict=True))

    @property
    def compilations(self) -> dict[str, int]:
        """How often `lookup` and `update` were traced: once for each `BatchSpec` met."""
        return {what: self._traces[what] for what in ("lookup", "update")}

    def describe(self) -> dict[str, Any]:
        """Return the resolved configuration as plain objects: what tables and devices became."""
        return describe(self.layout)
