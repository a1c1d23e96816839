"""Turn the keys of a batch into rows, in all processes alike.

A map must be told which of its rows a training batch has, in any order, and which unknown keys, in
batch order. With several processes each knows its own examples only. So every process sends the
row numbers of its known keys, and its unknown keys with their examples; then all of them take the
same batch, and their maps stay equal. What they send are bytes.

A batch that is only looked up moves no map. It brings the rows of tables on the host along that the
devices do not hold: its ids are rows of small tables, which are made of what the devices hold and
of what is at home (`core/layout/arrivals.py`).

Input: the validated ids of every feature, keys among them. Output: the same with rows in the place
of keys, and what the batch says of the maps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed._types import PADDING_ID
from tpu_embed.core.batch import BatchSpec, Routed
from tpu_embed.core.ids import HostIds, batch_order, give_rows, split_keys
from tpu_embed.core.layout import (
    ROW_MULTIPLE,
    Agreed,
    FeatureLayout,
    Layout,
    Parcels,
    Stack,
    TableSlice,
    Visits,
    arrivals_of,
    drawn_keys,
    most_per_shard,
    rooms_in,
    send_lines,
)
from tpu_embed.core.place.rooms import Agreement
from tpu_embed.storage import VALUES, Homes, Incoming, RowGroups
from tpu_embed.vocabulary import (
    BatchKeys,
    FoundKeys,
    KeyedRows,
    Moves,
    ValidSteps,
    Vocabularies,
)

# -- rows of tables on the host --------------------------------------------------------------------

NOBODY = np.uint64(2**64 - 1)
"""Stands for a key that has no row, at home or on the devices."""


Guests = dict[str, list[tuple[np.ndarray, np.ndarray]]]
"""By table on the host: keys, uint64 `[n]`, and int32 `[n]`, their rows on the devices, or -1."""


def visit(
    layout: Layout,
    homes: Homes,
    given: Mapping[str, Mapping[int, np.ndarray]],
    every: Guests,
) -> tuple[
    int,
    dict[int, np.ndarray],
    Callable[[], tuple[np.ndarray, dict[str, Visits]]] | None,
]:
    """Return the small tables of a batch; 0, nothing and None if the devices hold all of its rows.

    Args:
      layout: the engine's layout.
      homes: of its tables on the host.
      given: by table on the host, then by feature: the keys of this process's part, uint64 `[n]`.
      every: the keys of all processes' parts, perhaps repeated.

    Returns:
      R, the rows that each shard has of each small table; by feature, int32 `[n]`, the row in its
      small table of each of its keys, -1 for `NOBODY`; and a function that returns what each small
      stack is made of (`Batch.visits`). The batches before this one must be admitted then.
    """
    if all(
        ((rows >= 0) | (keys == NOBODY)).all()
        for some in every.values()
        for keys, rows in some
    ):
        return 0, {}, None
    seats = {
        table.name: _seats(
            stack, table, every[table.name], homes.tables[table.name].row_groups
        )
        for stack, table in layout.on_host
    }
    most = max(int(index.max(initial=0)) + 1 for *_, index in seats.values())
    # A power of two, because lookups are compiled for each size.
    rows = max(ROW_MULTIPLE // 8, 1 << (most - 1).bit_length())
    guests, of_features = {}, {}
    for stack, table in layout.on_host:
        keys, large, shards, index = seats[table.name]
        logical = stack.logical_in(shards, index, rows)
        guests[table.name] = keys, large, logical
        # `NOBODY` is past all keys, where -1 stands.
        found = np.append(logical, PADDING_ID).astype(np.int32)
        of_features |= {
            f: found[np.searchsorted(keys, x)] for f, x in given[table.name].items()
        }

    def make():
        # Before rows are read, because another thread may replace some meanwhile.
        replaced, stacks = np.array(homes.replaced, np.int32), {}
        for large, small in zip(
            layout.stacks, layout.visiting(rows).stacks, strict=True
        ):
            if small.is_on_host:
                made = _stack(large, small, guests, homes)
                split = layout.axes.sharding(small.shard_axes)
                stacks[small.name] = Visits(*(send_lines(one, split) for one in made))
        return replaced, stacks

    return rows, of_features, make


def _seats(
    stack: Stack,
    table: TableSlice,
    every: Sequence[tuple[np.ndarray, np.ndarray]],
    row_groups: RowGroups,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Choose a shard for each distinct key of a table: the one that has its row, if one has.

    The others are on shards of the processes where they are at home.

    Returns:
      uint64 `[n]`, the keys, ascending; and int64 `[n]` their rows on the devices, -1 for none, the
      shard that has, or gets, each row, and the number of each row among those of its shard.
    """
    all_keys, rows = map(np.concatenate, zip(*every, strict=True))
    keys, first = np.unique(all_keys, return_index=True)
    end = np.searchsorted(keys, NOBODY)  # the largest of all
    keys, large = keys[:end], rows[first[:end]].astype(np.int64)
    held = large >= 0
    shards = np.zeros(keys.size, np.int64)
    shards[held] = stack.physical(large[held], table) // stack.num_rows
    counts = np.bincount(shards[held], minlength=stack.num_shards)
    owner = row_groups.of(keys) % row_groups.num_owners
    for number in range(row_groups.num_owners):
        own = np.flatnonzero(np.asarray(row_groups.owners) == number)
        away = np.flatnonzero(~held & (owner == number))
        # Of 2 shards that have 3 and 0 of 5 rows, each gets room for 3; the other two fill it up.
        room = max(
            -(-(away.size + counts[own].sum()) // own.size), int(counts[own].max())
        )
        shards[away] = np.repeat(own, room - counts[own])[: away.size]
    order = np.argsort(shards, kind="stable")
    whole = np.bincount(shards, minlength=stack.num_shards)
    index = np.empty(keys.size, np.int64)
    index[order] = np.arange(keys.size) - np.repeat(np.cumsum(whole) - whole, whole)
    return keys, large, shards, index


def _stack(
    large: Stack,
    small: Stack,
    guests: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    homes: Homes,
) -> tuple[np.ndarray, ...]:
    """Return what a small stack is made of: the fields of its `Visits`.

    Args:
      large: the stack on the devices.
      small: the small one.
      guests: by table, its distinct keys, their rows on the devices (-1: none) and in `small`.
      homes: the rows at home.
    """
    cached = np.full((small.num_shards, small.num_rows), PADDING_ID, large.index_dtype)
    stored, drawn, ids, values, away = {}, {}, {}, [], {}
    for old, new in zip(large.tables, small.tables, strict=True):
        name = old.name
        keys, rows, seats = guests[name]
        held = rows >= 0
        # A physical row counts through all shards.
        local = large.physical(rows[held], old) % large.num_rows
        cached.reshape(-1)[small.physical(seats[held], new)] = local
        away[name] = seats[~held]
        mine = ~held & homes.tables[name].row_groups.at_home(keys)
        at_home, found = homes.visit(name, keys[mine])
        stored[name], drawn[name] = seats[mine][found], seats[mine][~found]
        ids[name] = keys[mine][~found]
        values.append(at_home[VALUES][found])
    # Other processes do not know which of them were found.
    least = 0 if jax.process_count() == 1 else most_per_shard(small, away)
    from_home, to_draw = Parcels(small, stored, least), Parcels(small, drawn, least)
    # Rows of keys are at home; what has no row there yet is drawn by its id.
    keyed = to_draw.keyed(ids, dict.fromkeys(ids))
    return cached, from_home.rows(), from_home.packed(np.concatenate(values)), keyed


# -- keys ------------------------------------------------------------------------------------------

Keyed = tuple[list[HostIds], dict[str, Any]]
"""A batch whose keys have become rows: the ids of every feature, and fields of its `Batch`."""


class KeyedBatches:
    """Turns the keys of batches into rows, for one engine.

    Args:
      layout: the engine's layout.
      vocabularies: the maps.
      agreements: with the other processes, by what of a batch is routed.
    """

    def __init__(
        self,
        layout: Layout,
        vocabularies: Vocabularies,
        agreements: Mapping[Routed, Agreement],
    ) -> None:
        self._layout, self._vocabularies = layout, vocabularies
        self._learning, self._finding = agreements["update"], agreements["lookup"]
        self._replicas = layout.axes.local_parts(layout.axes.batch_axes)
        self._tables = {table.name: table for _, table in layout.living}
        self._features = {
            name: [f for f, one in enumerate(layout.features) if one.table == table]
            for name, table in self._tables.items()
        }

    @contextlib.contextmanager
    def learn(self, hosts: Sequence[HostIds]) -> Iterator[Keyed]:
        """Let the maps learn a training batch.

        That is undone if the block raises, because nothing is placed then.

        Args:
          hosts: the ids of every feature, of this process's part of the batch.
        """
        vocabularies, said = self._vocabularies, []
        with self._learning.refusals():
            _, known = self._find(hosts, None)
            found = {f: one.ids for f, one in known.items()}
            splits = {f: split_keys(hosts[f], ids) for f, ids in found.items()}
            for features in self._features.values():
                rows = np.concatenate([splits[f].known for f in features])
                said.append(rows if self._learning.alone else np.unique(rows))
                for f in features:
                    said += [
                        splits[f].keys,
                        self._global_examples(hosts[f], splits[f].examples),
                    ]
        before = vocabularies.placed
        parts = [iter(part) for part in self._learning.share(said)]
        batch, orders, ends = {}, {}, {}
        for name, features in self._features.items():
            rows = np.concatenate([next(part) for part in parts]).astype(np.int64)
            # The keys of all features of the first process, of the second, and so on.
            keys, places = [], []
            for part, f in itertools.product(parts, features):
                keys.append(next(part))
                places.append(
                    (
                        next(part),
                        self._local_size(hosts[f]) * self._layout.axes.replicas,
                    )
                )
            # Those of one feature, all in this process, are in batch order as they are.
            orders[name] = batch_order(places) if len(keys) > 1 else slice(None)
            ends[name] = np.cumsum([some.size for some in keys])
            batch[name] = rows, np.concatenate(keys)[orders[name]]
        try:
            moves = vocabularies.take(batch)
            for name, features in self._features.items():
                # Keys that were known have kept their rows; of the others some have one now.
                given = moves.of_keys(name).rows
                rows = np.empty_like(given)
                rows[orders[name]] = given
                here = np.split(rows, ends[name])[jax.process_index() * len(features) :]
                for f, mine in zip(
                    features, here, strict=False
                ):  # others' pieces follow
                    found[f][splits[f].absent] = mine
                if name in moves.owners:
                    found |= {f: vocabularies.rows(name, found[f]) for f in features}
            keys = self._keys_of(moves, self._by_table(found))
            # An empty range: nobody may look it up before it is admitted.
            unusable = ValidSteps(1, 0, vocabularies.at(before + 1)[1])
            yield (
                self._with_rows(hosts, found),
                _fields(unusable, keys) | {"admitted": False},
            )
        except BaseException:
            vocabularies.undo(before)
            raise

    def _keys_of(
        self, moves: Moves, rows: Mapping[str, tuple[np.ndarray, ...]]
    ) -> BatchKeys:
        """Return what only the host knows of a training batch; rows from home are read.

        Args:
          moves: what the maps did with it.
          rows: on the devices, int32 by table, of the distinct keys of each feature.
        """
        vocabularies, homes = self._vocabularies, self._vocabularies.homes
        arrivals = arrivals_of(self._layout.stacks, homes, moves.taken)
        rooms = rooms_in(arrivals, homes, moves.taken)
        with self._learning.refusals():
            if homes is not None and not self._learning.alone:
                homes.check()  # here all processes hear of a row that one of them has lost
            incoming = vocabularies.incoming(moves, rooms)
        tables = {
            name: KeyedRows(
                some,
                moves.taken[name],
                incoming.get(name),
                owners=moves.owners.get(name),
            )
            for name, some in rows.items()
        }
        steps = vocabularies.steps(vocabularies.placed, training=True)
        return BatchKeys(
            tables, steps, arrivals=arrivals, agreed=self._agree(moves, incoming)
        )

    def _agree(
        self, moves: Moves, incoming: Mapping[str, Incoming]
    ) -> dict[str, Agreed] | None:
        """Return what all processes have to know of the rows that each of them brings."""
        homes, stacks = self._vocabularies.homes, self._layout.stacks
        if self._learning.alone or homes is None:
            return None
        # Two numbers a stack: does a row come from home, and how many rows are drawn for a shard?
        mine = []
        for stack in (one for one in stacks if one.is_on_host):
            rows, comes = {}, False
            for name in (table.name for table in stack.tables):
                # A late row has been on the devices, so it will be at home when it is awaited.
                one = incoming[name]
                found = one.found | (one.awaited > 0)
                comes |= bool(found.any())
                row_groups, owners = (
                    homes.tables[name].row_groups,
                    moves.owners.get(name),
                )
                rows[name] = drawn_keys(
                    row_groups, moves.taken[name], found, owners
                ).rows
            mine += [comes, most_per_shard(stack, rows)]
        said = self._learning.share([np.array(mine, np.int64)])
        pairs = np.max([one for (one,) in said], axis=0).reshape(-1, 2)
        names = [one.name for one in stacks if one.is_on_host]
        return {
            name: Agreed(bool(comes), int(most))
            for name, (comes, most) in zip(names, pairs, strict=True)
        }

    @contextlib.contextmanager
    def find(self, hosts: Sequence[HostIds], step: int) -> Iterator[Keyed]:
        """Give a batch that is only looked up the rows of its keys; no map changes.

        Args:
          hosts: the ids of every feature, of this process's part of the batch.
          step: whose rows they are.

        Raises:
          ValueError: the processes are at different steps.
        """
        with self._finding.refusals():
            steps, known = self._find(hosts, step)
        found = {f: one.rows for f, one in known.items()}
        rows, homes = self._by_table(found), self._vocabularies.homes
        # Of tables on the host, what is at home is found by these keys.
        guests = {
            name: {
                f: self._at_home(hosts[f], known[f], name) for f in self._features[name]
            }
            for name in (() if homes is None else homes.tables)
        }
        every = {
            name: [(keys, known[f].rows) for f, keys in mine.items()]
            for name, mine in guests.items()
        }
        if not self._finding.alone:
            rows, every = self._of_all(steps.first, rows, every)
        fields, make = {}, None
        if homes is not None:
            fields["visit_rows"], small, make = visit(
                self._layout, homes, guests, every
            )
            found |= small
        # If batches before it are still to be admitted, its rows come when it is admitted.
        if make is not None and steps.first <= self._vocabularies.admitted:
            with self._finding.refusals():
                fields["visits"] = make()
        tables = {
            name: KeyedRows(each, None, visits=make is not None and name in guests)
            for name, each in rows.items()
        }
        fields |= _fields(steps, BatchKeys(tables, make_visits=make))
        yield self._with_rows(hosts, found), fields

    def _at_home(self, host: HostIds, known: FoundKeys, name: str) -> np.ndarray:
        """Return what the rows of a feature's keys are found by at home, uint64."""
        if self._tables[name].key_table is None:
            return _keys(host)
        # The vocabulary of the table lives: the ids of its keys.
        ids = self._vocabularies.shared(name, known.ids).astype(np.int64)
        return np.where(ids < 0, NOBODY, ids.view(np.uint64))

    def _of_all(
        self, step: int, rows: dict[str, tuple[np.ndarray, ...]], guests: Guests
    ) -> tuple[dict[str, tuple[np.ndarray, ...]], Guests]:
        """Return what a batch has of each table in any process, so that all agree later.

        Args:
          step: whose rows they are.
          rows: the rows of this process's part.
          guests: its keys and their rows, of tables on the host.

        Raises:
          ValueError: the processes are at different steps.
        """
        mine = [np.array([step])]
        mine += [
            np.setdiff1d(np.concatenate(some), PADDING_ID) for some in rows.values()
        ]
        for pairs in guests.values():
            every, at = map(np.concatenate, zip(*pairs, strict=True))
            keys, first = np.unique(every, return_index=True)
            mine += [keys, at[first]]
        parts = [iter(part) for part in self._finding.share(mine)]
        steps = sorted({int(next(part)[0]) for part in parts})
        if len(steps) > 1:
            refuse(
                "place",
                expected="as many batches admitted in every process",
                got=f"steps {steps}",
                remedy="admit and place in the same order in every process",
            )
        return (
            {name: tuple(next(part) for part in parts) for name in rows},
            {name: [(next(part), next(part)) for part in parts] for name in guests},
        )

    def _find(
        self, hosts: Sequence[HostIds], step: int | None
    ) -> tuple[ValidSteps, dict[int, FoundKeys]]:
        """Return which states have the rows, and what is known of each distinct key, by feature.

        Raises:
          ValueError: a batch size does not divide over the replicas.
        """
        # This is done for the check of batch sizes.
        BatchSpec.bare(
            [host.shape for host in hosts], self._layout, len(self._replicas)
        )
        by_table = self._features.items()
        keys = {
            f: (name, _keys(hosts[f])) for name, features in by_table for f in features
        }
        return self._vocabularies.find_all(keys, step)

    def _by_table(
        self, found: Mapping[int, np.ndarray]
    ) -> dict[str, tuple[np.ndarray, ...]]:
        """Return rows by table, given by feature."""
        return {
            name: tuple(found[f] for f in features)
            for name, features in self._features.items()
        }

    def _local_size(self, host: HostIds) -> int:
        """Return the examples of a feature on one replica."""
        return host.shape.batch // len(self._replicas)

    def _global_examples(self, host: HostIds, local: np.ndarray) -> np.ndarray:
        """Return the numbers in the global batch of examples of this process."""
        if jax.process_count() == 1:
            return local
        # With 2 examples per replica, and replicas 4 and 6 here: examples 0 1 2 3 are 8 9 12 13.
        size = self._local_size(host)
        return self._replicas[local // size] * size + local % size

    def _with_rows(
        self, hosts: Sequence[HostIds], found: Mapping[int, np.ndarray]
    ) -> list[HostIds]:
        """Return the ids of every feature with rows in the place of keys."""
        given = list(hosts)
        for f, rows in found.items():
            given[f] = give_rows_of(self._layout.features[f], hosts[f], rows)
        return given


def _keys(host: HostIds) -> np.ndarray:
    assert host.keys is not None, "ids of dynamic vocabularies are keys"
    return host.keys


def _fields(steps: ValidSteps, keys: BatchKeys) -> dict[str, Any]:
    """Return the fields of a `Batch` that say which states it may be looked up in."""
    return {"valid_steps": np.array(steps, np.int32), "keys": keys}


def give_rows_of(feature: FeatureLayout, host: HostIds, rows: np.ndarray) -> HostIds:
    """Return a feature's ids with the rows of its keys; unseen keys share one if they are to.

    Args:
      feature: the feature.
      host: its ids, with positions in the place of keys.
      rows: int32 `[n]`, the row of each key; -1 for unseen ones, which is changed if they share
        the last row.
    """
    vocabulary = feature.table.vocabulary
    if vocabulary is not None and vocabulary.unseen == "shared":
        rows[rows < 0] = feature.table.vocabulary_size - 1
    return give_rows(host, rows)
