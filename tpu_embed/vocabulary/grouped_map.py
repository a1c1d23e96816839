"""A map of ids to rows that are in groups: an id gets rows of its own group only.

It is a map for each group. Where there is one group, it is that map.

Input, output: as of `VocabularyMap`.
"""

from __future__ import annotations

import numpy as np

from tpu_embed.kernels.vocabulary_reference import COUNTERS, MapState, Taken
from tpu_embed.storage import RowGroups
from tpu_embed.vocabulary.config import DynamicVocabulary
from tpu_embed.vocabulary.map import VocabularyMap


class GroupedMap:
    """The map of one table on the host, whose rows are in groups.

    Args:
      vocabulary: how an id gets a row; nothing waits or expires.
      groups: which rows an id may have.
      lookahead: as for `VocabularyMap`.
    """

    def __init__(self, vocabulary: DynamicVocabulary, groups: RowGroups, lookahead: int) -> None:
        self._groups = groups
        self._maps = [VocabularyMap(vocabulary, rows.size, lookahead) for rows in groups.rows]
        # Of each row its group, and its number in it.
        self._group_of = np.empty(groups.num_rows, np.int32)
        self._number_of = np.empty(groups.num_rows, np.int64)
        for group, rows in enumerate(groups.rows):
            self._group_of[rows], self._number_of[rows] = group, np.arange(rows.size)

    def __len__(self) -> int:
        """Return the number of ids that have a row."""
        return sum(map(len, self._maps))

    @property
    def step(self) -> int:
        """The number of training batches taken so far."""
        return max(one.step for one in self._maps)

    @property
    def steps(self) -> set[int]:
        """The steps that the groups are at: one, but after an interrupt."""
        return {one.step for one in self._maps}

    @property
    def counters(self) -> dict[str, int]:
        """Totals of all groups, see `VocabularyMap.counters`."""
        counts = [one.counters for one in self._maps]
        return {name: sum(one[name] for one in counts) for name in COUNTERS}

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the maps have asked for."""
        own = self._group_of.nbytes + self._number_of.nbytes
        return own + sum(one.nbytes for one in self._maps)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of each id, int64 `[n]`; -1 for none."""
        rows, of = np.full(keys.size, -1, np.int64), self._groups.of(keys)
        for group, one in enumerate(self._maps):
            mine = np.flatnonzero(of == group)
            numbers = one.find(keys[mine])
            found = numbers >= 0
            rows[mine[found]] = self._groups.rows[group][numbers[found]]
        return rows

    def take(self, known: np.ndarray, unknown: np.ndarray) -> Taken:
        """Take one training batch; see `VocabularyMap.take`."""
        of_known, of_unknown = self._group_of[known], self._groups.of(unknown)
        rows, parts = np.full(unknown.size, -1, np.int64), []
        for group, one in enumerate(self._maps):
            mine = np.flatnonzero(of_unknown == group)
            taken = one.take(self._number_of[known[of_known == group]], unknown[mine])
            part = self._as_rows(group, taken)
            rows[mine] = part.rows
            parts.append(part)
        # Free rows go first, then those of others, in the order in which these leave.
        ends = [one.new_rows.size - one.evicted_rows.size for one in parts]
        pairs = [*zip(parts, ends, strict=True)]
        return Taken(
            step=self.step,
            rows=rows,
            new_keys=np.concatenate(
                [p.new_keys[:n] for p, n in pairs] + [p.new_keys[n:] for p, n in pairs]
            ),
            new_rows=np.concatenate(
                [p.new_rows[:n] for p, n in pairs] + [p.new_rows[n:] for p, n in pairs]
            ),
            evicted_rows=np.concatenate([p.evicted_rows for p in parts]),
            evicted_keys=np.concatenate([p.evicted_keys for p in parts]),
            unseen=sum(p.unseen for p in parts),
        )

    def _as_rows(self, group: int, taken: Taken) -> Taken:
        """Return what the map of a group did, with rows in the place of its numbers."""
        every = np.append(self._groups.rows[group], -1)
        return taken._replace(
            rows=every[taken.rows],
            new_rows=every[taken.new_rows],
            evicted_rows=every[taken.evicted_rows],
        )

    def rows_needed(self, lost: np.ndarray) -> int:
        """Return how many rows there must be, so that ids that found none, uint64 `[n]`, do."""
        of = self._groups.of(np.unique(lost))
        sizes = np.array([rows.size for rows in self._groups.rows])
        return int((sizes + np.bincount(of, minlength=sizes.size)).max()) * sizes.size

    def rewind(self, step: int) -> None:
        """Undo the batches taken after a step."""
        for one in self._maps:
            one.rewind(min(step, one.step))

    def forget(self, step: int) -> None:
        """Drop the log of the batches up to a step."""
        for one in self._maps:
            one.forget(step)

    def state(self, step: int | None = None) -> MapState:
        """Return which ids had rows after a step, ascending by row; see `VocabularyMap.state`."""
        states = [one.state(step) for one in self._maps]
        rows = np.concatenate(
            [of[one.rows] for of, one in zip(self._groups.rows, states, strict=True)]
        )
        order = np.argsort(rows)
        fields = {"rows": rows[order]}
        for name in ("keys", "last_seen", "batches_seen"):
            fields[name] = np.concatenate([getattr(one, name) for one in states])[order]
        counters = np.sum([one.counters for one in states], axis=0)
        return states[0]._replace(**fields, counters=counters)

    def check_state(self, state: MapState) -> None:
        """Check that a state is that of a map without ids: no other one is ever loaded."""
        for one in self._maps:
            one.check_state(state)

    def load_state(self, state: MapState) -> None:
        """Forget all ids, and go on from the step of a state without ids."""
        assert not state.keys.size, "nothing is on the devices after a restore"
        for one in self._maps:
            one.load_state(state)
