"""What an engine runs on the devices: its functions of a state as compiled programs.

`engine.py` checks what a user gives, outside of any program; the functions here are traced. They
call the lookup and the update, and put the parts of a state together again.

Input: a layout, and what to do with bad gradients. Output: programs of states, batches and
operands.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_key, refuse_derivatives
from tpu_embed._types import Array
from tpu_embed.core.batch import Batch, TracedIds
from tpu_embed.core.layout import Layout
from tpu_embed.core.lookup import Jagged, lookup, not_differentiable
from tpu_embed.core.state import (
    TableState,
    check_arrays,
    init_tables,
    new_vocabulary,
    visiting_tables,
)
from tpu_embed.core.update import LOOKUP, UPDATE, Guard, Operands, named, note_copies, update
from tpu_embed.vocabulary import Vocabularies

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

    def __init__(self, layout: Layout, guard: Guard, vocabularies: Vocabularies | None) -> None:
        self._layout, self._guard = layout, guard
        # States without keys are of the first history of the maps.
        self._history = np.int32(0 if vocabularies is None else vocabularies.first_history)
        self.traces: collections.Counter[str] = collections.Counter()
        self._made = jax.jit(self._init)
        # A user finds these programs in a jaxpr or a profile by their names.
        self.lookup = jax.jit(named(self._lookup, LOOKUP))
        self.update = jax.jit(named(self._update, UPDATE))
        self.update_in_place = jax.jit(named(self._update_rows, UPDATE), donate_argnums=0)

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
            assert source.visits is not None, "a batch without visits takes no vocabulary"
            small = source.layout_in(layout)
            tables = visiting_tables(tables, vocabulary, source.visits[1], layout, small)
            source, layout = dataclasses.replace(source, visits=None, visit_rows=0), small
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
            operands = operands._replace(skip=skip if refused is None else skip | refused)
        rows, gradients = _not_differentiable(((state.tables, state.slots), operands.gradients))
        operands = operands._replace(gradients=gradients)
        tables, slots, bad_ids = update(*rows, source, operands, self._layout)
        # Inside a jit nothing can raise: both reports reach a user through `checkify`.
        source.report(bad_ids, self._layout)
        self._guard.report(bad)
        counters = self._guard.counted(state.counters, bad_ids, bad, refused)
        trained = [stack.name for stack in self._layout.stacks if stack.optimizer is not None]
        held = jax.tree.leaves([(state.tables[name], state.slots[name]) for name in trained])
        steps_done = note_copies(operands.steps_done, held)
        return TableState(tables, slots, steps_done, counters)
