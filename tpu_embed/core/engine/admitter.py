"""Bring the tables of a state to the step of a batch, and check that the two belong together.

Input: states, and batches that `place` returned. Output: the state in which the rows of the batch's
new keys are new; or whether a lookup or update of the batch must be refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpu_embed._calls import Exchange
from tpu_embed._checks import refuse
from tpu_embed._types import Array, PyTree, Tracer
from tpu_embed.core.batch import Batch, TracedIds
from tpu_embed.core.layout import Layout, NewKeys, drawn_keys
from tpu_embed.core.lookup import split_activations
from tpu_embed.core.state import (
    MAP_VERSION,
    NewRowWriter,
    RowMover,
    TableState,
    check_own,
    leaving_rooms,
    new_version,
)
from tpu_embed.vocabulary import (
    BatchKeys,
    NewOwners,
    Taken,
    ValidSteps,
    Vocabularies,
    check_vocabulary,
    map_version,
)


class Admitter:
    """What an engine with dynamic vocabularies does between placing a batch and looking it up.

    Args:
      layout: the engine's layout.
      vocabularies: the maps; None without dynamic vocabularies: then every batch is fine.
    """

    def __init__(self, layout: Layout, vocabularies: Vocabularies | None) -> None:
        self._layout, self._vocabularies = layout, vocabularies
        self._homes = None if vocabularies is None else vocabularies.homes
        self._writer, self._mover = NewRowWriter(layout), RowMover(layout)

    @property
    def traces(self) -> dict[str, int]:
        """How often programs that write new rows were traced; nothing without vocabularies."""
        traces = self._writer.traces + self._mover.traces
        return {} if self._vocabularies is None else {"admit": traces}

    def prepare(
        self, state: TableState, batch: Batch
    ) -> Exchange[tuple[TableState, Batch]]:
        """Check a state and a batch; return what makes the rows of the batch's new keys new."""
        vocabularies = self._vocabularies
        if vocabularies is None:
            return Exchange(lambda _: (state, batch))
        if any(
            isinstance(leaf, Tracer) for leaf in (batch.packed, *state.tables.values())
        ):
            refuse(
                "admit",
                expected="a call outside a jit",
                got="tracers",
                remedy="admit the batch first, then give state and batch to the jitted function",
            )
        check_own(state, self._layout)
        steps, now = self._steps(batch), map_version(state)
        if not batch.keys.is_training:
            vocabularies.check(now, steps, batch.keys)
            if batch.keys.tables is not None:
                # The maps may have been loaded since: then a state from before keeps its history.
                fresh = vocabularies.steps(now[0], training=False)._replace(
                    history=now[1]
                )
                batch = dataclasses.replace(
                    batch, valid_steps=np.array(fresh, np.int32)
                )
            looked_up = _with_visits(batch, np.asarray(self._numbers(state)))
            return Exchange(lambda _: (state, looked_up))
        steps = vocabularies.check_next(now, batch.keys)
        reached, keys = (steps.first, steps.history), batch.keys
        vocabulary = version_after(
            state, self._layout, keys.taken, keys.owners, reached
        )
        bring = self._prepare_rows(keys, steps.first)
        numbers = np.array(steps, np.int32)  # the host keeps nothing more of the batch
        admitted = dataclasses.replace(
            batch, valid_steps=numbers, keys=BatchKeys(), admitted=True
        )

        def exchange(call):
            new_state = bring(state, call)
            if vocabularies.admitted < steps.first:
                # Maps may have been loaded since an interrupt.
                vocabularies.check_next(now, keys)
                vocabularies.note_admitted(steps.first)
                if self._homes is not None:
                    for name, incoming in keys.incoming.items():
                        self._homes.note_brought(name, incoming)
            return dataclasses.replace(new_state, vocabulary=vocabulary), admitted

        return Exchange(exchange)

    def _prepare_rows(
        self, keys: BatchKeys, step: int
    ) -> Callable[[TableState, Callable[..., Any]], TableState]:
        """Get what a batch brings to the devices; wait for rows on their way home.

        Returns:
          A function that gives a state the rows of new keys, and sends those that they displace
          home. It may be done again with a `call` that returns what programs have returned before.

        Raises:
          RuntimeError: rows were lost on their way home.
        """
        new = {
            name: NewKeys(one.new_keys, one.new_rows)
            for name, one in keys.taken.items()
        }
        homes, came = self._homes, {}
        if homes is None:
            return lambda state, call: self._writer.write(state, new, call=call)
        homes.check()
        for name, incoming in keys.incoming.items():
            _, found = homes.complete(name, incoming)
            row_groups, taken = homes.tables[name].row_groups, keys.taken[name]
            new[name] = drawn_keys(row_groups, taken, found, keys.owners.get(name))
            # In the order of the parcels, which all processes have alike.
            came[name] = np.zeros(taken.new_keys.size, bool)
            came[name][row_groups.at_home(taken.new_keys)] = found
        homes.wait_for_room()  # what may raise comes before tables are donated
        sent = self._mover.send(keys.arrivals, came, keys.agreed)
        leaving = {name: keys.taken[name].evicted_keys for name in homes.tables}
        mine = {
            n: homes.tables[n].row_groups.at_home(some) for n, some in leaving.items()
        }
        most = {name: one.drawn for name, one in (keys.agreed or {}).items()}

        def bring(state, call):
            state, copies = self._mover.exchange(state, sent, call)
            rooms = functools.partial(leaving_rooms, copies, keys.arrivals, mine)
            homes.send(
                step, {name: some[mine[name]] for name, some in leaving.items()}, rooms
            )
            return self._writer.write(state, new, most, call=call)

        return bring

    def check(
        self, state: TableState, batch: Batch | TracedIds
    ) -> tuple[Batch | TracedIds, Array | None]:
        """Check that a batch may be looked up in a state, or updated in it.

        Returns:
          The batch for a program, without what only the host needs; and inside a jit whether it
          must be refused, bool `[]`. None: it is fine.

        Raises:
          ValueError: outside a jit, it may not; or it has no steps.
        """
        if self._vocabularies is None:
            return batch, None
        assert isinstance(batch, Batch), "features with keys were refused"
        steps = self._steps(batch)
        if not batch.admitted:
            expected, got = "an admitted batch", "one that was only placed"
            remedy = "give every batch to admit first, in the order in which they were placed: "
            remedy += "state, batch = engine.admit(state, batch), outside of the jit; lower and "
            remedy += "check_in_place take an admitted batch, too"
            refuse("batch", expected=expected, got=got, remedy=remedy)
        now = self._numbers(state)
        if any(isinstance(leaf, Tracer) for leaf in (now, *steps)):
            batch = _with_visits(batch)
            return _plain(batch), ~jnp.asarray(_fits(steps, now)) | _is_replaced(
                batch, now
            )
        if not _fits(steps, np.asarray(now)):  # then the host looks row by row
            self._vocabularies.check(map_version(state), steps, batch.keys)
        return _plain(_with_visits(batch, np.asarray(now))), None

    def _numbers(self, state: TableState) -> Array:
        """Return what a state says of its maps, int32 `[n]`; see `TableState.vocabulary`."""
        now, size = check_vocabulary(state)[MAP_VERSION], self._layout.version_size
        if now.shape != (size,):
            refuse(
                "state",
                expected=f"a vocabulary with {MAP_VERSION!r} of shape ({size},)",
                got=f"{now.shape}",
                remedy="restore the checkpoint with io.restore",
            )
        return now

    def _steps(self, batch: Batch) -> ValidSteps:
        if batch.valid_steps is None:
            refuse(
                "batch",
                expected="a Batch of this engine's place",
                got="one without steps of the maps",
                remedy="place it again",
            )
        known = not isinstance(batch.valid_steps, Tracer)
        return ValidSteps(
            *(np.asarray(batch.valid_steps).tolist() if known else batch.valid_steps)
        )


def version_after(
    state: TableState,
    layout: Layout,
    taken: Mapping[str, Taken],
    owners: Mapping[str, NewOwners],
    reached: tuple[int, int],
    replaced: int | None = None,
) -> Any:
    """Return the `vocabulary` of the state after one more step of the maps, or a replacement alone.

    Args:
      state: the state before.
      layout: the engine's layout.
      taken: what the maps to rows on the devices did, by table; nothing if they did not move.
      owners: which ids got new keys, by table on the host with a dynamic vocabulary.
      reached: step and history of the state after it.
      replaced: the number of the replacement of rows at home, if some are replaced.
    """
    assert state.vocabulary is not None, "checked"
    last = np.asarray(state.vocabulary[MAP_VERSION])[2:].copy()
    for i, (_, table) in enumerate(layout.living):
        if (one := taken.get(table.name)) is None:
            continue
        # A row that comes to the devices changes there, so its copy in a batch is old.
        changed = one.new_rows if table.is_on_host else one.evicted_rows
        if changed.size or (table.name in owners and owners[table.name].rows.size):
            last[i] = reached[0]
    if replaced is not None:
        last[-1] = replaced
    return new_version(state.vocabulary, reached, layout.axes, last.tolist())


def _fits(steps: ValidSteps, now: Array | np.ndarray) -> Any:
    """Return whether a state has the rows that a batch was placed for, bool `[]`.

    Args:
      steps: of the batch.
      now: of the state, see `new_version`.
    """
    # Rows belong to the same keys up to the last step of the batch; and for as long as no table has
    # taken a row from a key, because free rows are in no batch. The number of a replacement, which
    # is negative, is not after any step.
    same = (steps.first <= now[0]) & (now[1] == steps.history)
    return same & ((now[0] <= steps.last) | (now[2:] <= steps.first).all())


def _with_visits(batch: Batch, now: np.ndarray | None = None) -> Batch:
    """Return a batch with the rows from home that it brings along, of the batches before it.

    Args:
      batch: the batch.
      now: of the state, see `new_version`; None: inside a jit, which has its own check.

    Raises:
      ValueError: it has lost them, because it was pickled, or went through a jit, before they had
        come; or rows at home were replaced since.
    """
    if batch.visit_rows and batch.visits is None:
        if batch.keys.make_visits is None:
            expected, got = (
                "a batch with its rows from home",
                "one that was placed ahead of others",
            )
            remedy = (
                "admit it before it is pickled, or goes into a jit: state, batch = "
            )
            remedy += "engine.admit(state, batch)"
            refuse("batch", expected=expected, got=got, remedy=remedy)
        batch = dataclasses.replace(batch, visits=batch.keys.make_visits())
    if now is not None and _is_replaced(batch, now):
        refuse(
            "batch",
            expected="rows from home that are those of the state",
            got="a batch, or a state, from before set_rows",
            remedy="place it again, and go on with the state that set_rows returned",
        )
    return batch


def _is_replaced(batch: Batch, now: Array | np.ndarray) -> Any:
    """Return whether a batch has rows from home that are not those of a state, bool `[]`.

    Args:
      batch: the batch, with its rows from home.
      now: of the state, see `new_version`.
    """
    return batch.visits is not None and batch.visits[0] != now[-1]


def _plain(batch: Batch) -> Batch:
    """Return a batch for a program, without what only the host needs."""
    visits = batch.visits and (None, batch.visits[1])
    return dataclasses.replace(batch, valid_steps=None, keys=BatchKeys(), visits=visits)


def nan_if(refused: Array | None, activations: PyTree) -> PyTree:
    """Return the activations, or NaN if their batch is refused: zeros would look like an answer."""
    if refused is None:
        return activations
    values, rebuild = split_activations(activations)
    return rebuild([jnp.where(refused, jnp.nan, one) for one in values])
