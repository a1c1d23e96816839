"""Turn the keys of a batch into rows, in all processes alike.

A map must be told which of its rows a training batch has, in any order, and which unknown keys, in
batch order. With several processes each knows its own examples only. So every process sends the
row numbers of its known keys, and its unknown keys with their examples; then all of them take the
same batch, and their maps stay equal. What they send are bytes.

Input: the validated ids of every feature, keys among them. Output: the same with rows in the place
of keys, and what the batch says of the maps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tpu_embed._checks import message
from tpu_embed.core.batch import BatchSpec
from tpu_embed.core.ids import HostIds, batch_order, give_rows, split_keys
from tpu_embed.core.layout import (
    Agreed,
    FeatureLayout,
    Layout,
    arrivals_of,
    drawn_keys,
    most_per_shard,
    rooms_in,
)
from tpu_embed.core.place.agreement import Agreement, Alone
from tpu_embed.core.place.visits import NOBODY, Visit, visit
from tpu_embed.storage import Incoming
from tpu_embed.vocabulary import BatchKeys, FoundKeys, KeyedRows, Moves, ValidSteps, Vocabularies

# -- what processes tell each other ----------------------------------------------------------------


class Part(NamedTuple):
    """What one process's part of a batch has of one table.

    Attributes:
      known: int32 `[k]`, the rows of known keys, perhaps repeated.
      keys: uint64, by feature of the table, the unknown keys in the order of their first examples.
      examples: int64, by feature, these examples in the global batch.
      absent: int32, by feature, where the rows of these keys are among those of the feature's keys;
        empty in the parts of other processes.
    """

    known: np.ndarray
    keys: list[np.ndarray]
    examples: list[np.ndarray]
    absent: list[np.ndarray]


def encode(part: Part) -> bytes:
    """Return what a process has of one table as bytes: each known row once."""
    known = distinct_rows(part.known)
    pieces, sizes = [known], [known.size]
    for keys, places in zip(part.keys, part.examples, strict=True):
        pieces += [keys, places.astype(np.int64)]
        sizes.append(keys.size)
    return b"".join(array.tobytes() for array in [np.array(sizes, np.int64), *pieces])


def distinct_rows(rows: np.ndarray) -> np.ndarray:
    """Return each of the rows once, int32, without -1."""
    ascending = np.sort(rows)
    # Rows -1 3 3 5 have the differences 0 4 0 2.
    return ascending[np.diff(ascending, prepend=-1) > 0].astype(np.int32)


def decode(said: bytes, features: Sequence[int]) -> list[Part]:
    """Return the parts that a process has sent, one per table.

    Args:
      said: the bytes of all tables, one after another.
      features: the number of features of each table.
    """
    at, parts = 0, []

    def read(dtype: type, n: int) -> np.ndarray:
        nonlocal at
        array = np.frombuffer(said, dtype, n, at)
        at += array.nbytes
        return array

    for count in features:
        num_known, *sizes = read(np.int64, 1 + count).tolist()
        known = read(np.int32, num_known)
        pairs = [(read(np.uint64, n), read(np.int64, n)) for n in sizes]
        parts.append(Part(known, [keys for keys, _ in pairs], [at for _, at in pairs], []))
    return parts


def encode_guests(guests: Sequence[tuple[np.ndarray, np.ndarray]]) -> bytes:
    """Return keys, uint64, and their rows, int32, as bytes: each key once."""
    keys = np.concatenate([np.zeros(0, np.uint64), *(some for some, _ in guests)])
    rows = np.concatenate([np.zeros(0, np.int32), *(rows for _, rows in guests)])
    keys, first = np.unique(keys, return_index=True)
    return keys.tobytes() + rows[first].astype(np.int32).tobytes()


def decode_guests(said: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and the rows that a process has sent."""
    n = len(said) // 12  # 8 bytes a key, then 4 bytes a row
    return np.frombuffer(said, np.uint64, n), np.frombuffer(said, np.int32, n, 8 * n)


# -- keys become rows ------------------------------------------------------------------------------


class Keyed(NamedTuple):
    """A batch whose keys have become rows.

    Attributes:
      hosts: the ids of every feature.
      steps: the states that it may be looked up in.
      keys: its rows, and what the maps did with it.
      visit: of tables on the host, the small tables of a batch that is only looked up, or None.
    """

    hosts: list[HostIds]
    steps: ValidSteps
    keys: BatchKeys
    visit: Visit | None = None


class KeyedBatches:
    """Turns the keys of batches into rows, for one engine.

    Args:
      layout: the engine's layout.
      vocabularies: the maps.
      agreement: with the other processes.
      replicas: the numbers of this process's replicas in the global batch.
    """

    def __init__(
        self,
        layout: Layout,
        vocabularies: Vocabularies,
        agreement: Agreement | Alone,
        replicas: np.ndarray,
    ) -> None:
        self._layout, self._vocabularies = layout, vocabularies
        self._agreement, self._replicas = agreement, replicas
        self._tables = {table.name: table for _, table in layout.living}
        self._features = {
            name: [f for f, one in enumerate(layout.features) if one.table == table]
            for name, table in self._tables.items()
        }

    @property
    def admitted(self) -> int:
        """The number of training batches that were admitted."""
        return self._vocabularies.admitted

    @contextlib.contextmanager
    def learn(self, hosts: Sequence[HostIds]) -> Iterator[Keyed]:
        """Let the maps learn a training batch.

        That is undone if the block raises, because nothing is placed then.

        Args:
          hosts: the ids of every feature, of this process's part of the batch.
        """
        with self._agreement.refusals():
            self._check_batch(hosts)
            _, known = self._find(hosts, None)
            found = {f: one.ids for f, one in known.items()}
            mine = {name: self._part(name, hosts, found) for name in self._tables}
        vocabularies = self._vocabularies
        before = vocabularies.placed
        parts = self._of_all(mine)
        merged = {name: self._merge(name, hosts, parts[name]) for name in self._tables}
        moves = vocabularies.take(
            {name: (known, keys) for name, (known, keys, _) in merged.items()}
        )
        try:
            # Keys that were known have kept their rows; of the others some have one now.
            for name, (_, _, order) in merged.items():
                given = moves.of_keys(name).rows
                self._give_rows(name, parts[name], given, order, mine[name], found)
            for name in moves.owners:
                found |= {f: vocabularies.rows(name, found[f]) for f in self._features[name]}
            keys = self._keys_of(moves, self._by_table(found))
            # An empty range: nobody may look it up before it is admitted.
            unusable = ValidSteps(1, 0, vocabularies.at(before + 1)[1])
            yield Keyed(self._with_rows(hosts, found), unusable, keys)
        except BaseException:
            vocabularies.undo(before)
            raise

    def _keys_of(self, moves: Moves, rows: Mapping[str, tuple[np.ndarray, ...]]) -> BatchKeys:
        """Return what only the host knows of a training batch; rows from home are read.

        Args:
          moves: what the maps did with it.
          rows: on the devices, int32 by table, of the distinct keys of each feature.
        """
        vocabularies, homes = self._vocabularies, self._vocabularies.homes
        arrivals = arrivals_of(self._layout.stacks, homes, moves.taken)
        rooms = rooms_in(arrivals, homes, moves.taken)
        with self._agreement.refusals():
            if homes is not None and not self._agreement.alone:
                homes.check()  # here all processes hear of a row that one of them has lost
            incoming = vocabularies.incoming(moves, rooms)
        tables = {
            name: KeyedRows(
                some, moves.taken[name], incoming.get(name), owners=moves.owners.get(name)
            )
            for name, some in rows.items()
        }
        steps = vocabularies.steps(vocabularies.placed, training=True)
        return BatchKeys(tables, steps, arrivals=arrivals, agreed=self._agree(moves, incoming))

    def _agree(self, moves: Moves, incoming: Mapping[str, Incoming]) -> dict[str, Agreed] | None:
        """Return what all processes have to know of the rows that each of them brings."""
        homes, stacks = self._vocabularies.homes, self._layout.stacks
        if self._agreement.alone or homes is None:
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
                row_groups, owners = homes.tables[name].row_groups, moves.owners.get(name)
                rows[name] = drawn_keys(row_groups, moves.taken[name], found, owners).rows
            mine += [comes, most_per_shard(stack, rows)]
        said = self._agreement.share(np.array(mine, np.int64).tobytes())
        pairs = np.max([np.frombuffer(one, np.int64) for one in said], axis=0).reshape(-1, 2)
        names = [one.name for one in stacks if one.is_on_host]
        return {
            name: Agreed(bool(comes), int(most))
            for name, (comes, most) in zip(names, pairs, strict=True)
        }

    def find(self, hosts: Sequence[HostIds], step: int) -> Keyed:
        """Return a batch that is only looked up, with the rows of its keys; no map changes.

        Args:
          hosts: the ids of every feature, of this process's part of the batch.
          step: whose rows they are.

        Raises:
          ValueError: the processes are at different steps.
        """
        with self._agreement.refusals():
            self._check_batch(hosts)
            steps, known = self._find(hosts, step)
        found = {f: one.rows for f, one in known.items()}
        rows = self._rows_of_all(steps.first, self._by_table(found))
        guests = self._visit(hosts, known)
        visits = guests is not None
        tables = {
            name: KeyedRows(each, None, visits=visits and self._tables[name].is_on_host)
            for name, each in rows.items()
        }
        if guests is not None:
            found = found | guests.of_features
        make = None if guests is None else guests.make
        keys = BatchKeys(tables, make_visits=make)
        return Keyed(self._with_rows(hosts, found), steps, keys, guests)

    def _visit(self, hosts: Sequence[HostIds], known: Mapping[int, FoundKeys]) -> Visit | None:
        """Return the small tables of a batch that is only looked up, or None."""
        homes = self._vocabularies.homes
        if homes is None:
            return None
        given: dict[str, dict[int, np.ndarray]] = {name: {} for name in homes.tables}
        for name, mine in given.items():
            for f in self._features[name]:
                ids = hosts[f].keys
                assert ids is not None, "ids of living vocabularies are keys"
                if self._tables[name].key_table is not None:
                    numbers = self._vocabularies.shared(name, known[f].ids).astype(np.int64)
                    ids = np.where(numbers < 0, NOBODY, numbers.view(np.uint64))
                # Of a table of keys, what is at home is found by the ids of the keys.
                mine[f] = ids
        every = {
            name: self._guests_of_all([(ids, known[f].rows) for f, ids in mine.items()])
            for name, mine in given.items()
        }
        return visit(self._layout, homes, given, every)

    def _guests_of_all(
        self, mine: list[tuple[np.ndarray, np.ndarray]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the keys, uint64, and rows, int32, that a batch has of a table in any process."""
        if self._agreement.alone:
            return mine
        return [decode_guests(one) for one in self._agreement.share(encode_guests(mine))]

    def _rows_of_all(
        self, step: int, rows: dict[str, tuple[np.ndarray, ...]]
    ) -> dict[str, tuple[np.ndarray, ...]]:
        """Return the rows of each table that a batch has in any process, so that all agree later.

        Raises:
          ValueError: the processes are at different steps.
        """
        if self._agreement.alone:
            return rows
        mine = [distinct_rows(np.concatenate(some)) for some in rows.values()]
        sizes = np.array([step, *(some.size for some in mine)], np.int64)
        said = self._agreement.share(b"".join(array.tobytes() for array in (sizes, *mine)))
        heads = [np.frombuffer(one, np.int64, sizes.size).tolist() for one in said]
        if len({head[0] for head in heads}) > 1:
            expected = "as many batches admitted in every process"
            remedy = "admit and place in the same order in every process"
            got = f"steps {sorted({head[0] for head in heads})}"
            raise ValueError(message("place", expected=expected, got=got, remedy=remedy))
        # What a process says: [step, a, b] int64, then a and b rows int32 of the two tables.
        parts = [
            np.split(np.frombuffer(one, np.int32, offset=sizes.nbytes), np.cumsum(head[1:-1]))
            for one, head in zip(said, heads, strict=True)
        ]
        return dict(zip(rows, zip(*parts, strict=True), strict=True))

    def _check_batch(self, hosts: Sequence[HostIds]) -> None:
        """Check that the batch sizes divide over the replicas."""
        shapes = tuple(host.shape for host in hosts)
        spec = BatchSpec(len(self._replicas), shapes, ())
        spec.check_batch([feature.path for feature in self._layout.features])

    def _find(
        self, hosts: Sequence[HostIds], step: int | None
    ) -> tuple[ValidSteps, dict[int, FoundKeys]]:
        """Return which states have the rows, and what is known of each distinct key, by feature."""
        keys = {}
        for name, features in self._features.items():
            for f in features:
                some = hosts[f].keys
                assert some is not None, "ids of living vocabularies are keys"
                keys[f] = name, some
        return self._vocabularies.find_all(keys, step)

    def _by_table(self, found: Mapping[int, np.ndarray]) -> dict[str, tuple[np.ndarray, ...]]:
        """Return rows by table, given by feature."""
        return {
            name: tuple(found[f] for f in features) for name, features in self._features.items()
        }

    def _part(self, name: str, hosts: Sequence[HostIds], found: Mapping[int, np.ndarray]) -> Part:
        """Return what this process's part of a batch has of one table."""
        splits = [(hosts[f], split_keys(hosts[f], found[f])) for f in self._features[name]]
        return Part(
            np.concatenate([np.zeros(0, np.int32), *(split.known for _, split in splits)]),
            [split.keys for _, split in splits],
            [self._global_examples(host, split.examples) for host, split in splits],
            [split.absent for _, split in splits],
        )

    def _global_examples(self, host: HostIds, local: np.ndarray) -> np.ndarray:
        """Return the numbers in the global batch of examples of this process."""
        if self._agreement.alone:
            return local
        # With 2 examples per replica, and replicas 4 and 6 here: examples 0 1 2 3 are 8 9 12 13.
        size = host.shape.batch // len(self._replicas)
        return self._replicas[local // size] * size + local % size

    def _of_all(self, mine: dict[str, Part]) -> dict[str, list[Part]]:
        """Return what each process has of each table, by table; all processes call this."""
        if self._agreement.alone:
            return {name: [part] for name, part in mine.items()}
        said = self._agreement.share(b"".join(encode(part) for part in mine.values()))
        decoded = [decode(one, [len(self._features[name]) for name in mine]) for one in said]
        return {name: [parts[i] for parts in decoded] for i, name in enumerate(mine)}

    def _merge(
        self, name: str, hosts: Sequence[HostIds], parts: Sequence[Part]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | slice]:
        """Return the rows of known keys, int64, the unknown keys in batch order, and that order.

        It is the order of the keys of all parts of the first feature, of the second, and so on.
        """
        keys, places = [np.zeros(0, np.uint64)], []
        for i, f in enumerate(self._features[name]):
            keys += [part.keys[i] for part in parts]
            size = hosts[f].shape.batch // len(self._replicas) * self._layout.axes.replicas
            places.append((np.concatenate([part.examples[i] for part in parts]), size))
        known = np.concatenate([part.known for part in parts]).astype(np.int64)
        # The keys of one feature, all in this process, are in batch order as they are.
        order = batch_order(places) if len(places) * len(parts) > 1 else slice(None)
        return known, np.concatenate(keys)[order], order

    def _give_rows(
        self,
        name: str,
        parts: Sequence[Part],
        rows: np.ndarray,
        order: np.ndarray | slice,
        mine: Part,
        found: Mapping[int, np.ndarray],
    ) -> None:
        """Write the rows that the unknown keys of a table have got, -1 for none.

        Args:
          name: the table.
          parts: of all processes.
          rows: int64, those of the keys of all parts, in batch order.
          order: see `_merge`.
          mine: this process's part.
          found: by feature, the rows of this process's keys.
        """
        given = np.empty_like(rows)
        given[order] = rows
        here = 0 if self._agreement.alone else jax.process_index()
        end = 0
        for i, f in enumerate(self._features[name]):
            sizes = [part.keys[i].size for part in parts]
            first, end = end + sum(sizes[:here]), end + sum(sizes)
            found[f][mine.absent[i]] = given[first : first + sizes[here]]

    def _with_rows(
        self, hosts: Sequence[HostIds], found: Mapping[int, np.ndarray]
    ) -> list[HostIds]:
        """Return the ids of every feature with rows in the place of keys."""
        given = list(hosts)
        for f, rows in found.items():
            given[f] = give_rows_of(self._layout.features[f], hosts[f], rows)
        return given


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
