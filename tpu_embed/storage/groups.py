"""Which rows of the devices an id may have, so that each process stores the rows of its own shards.

An id that comes back must find its row in a process that stored it. So with several processes, each
id belongs to a group, and each group to the processes that hold certain shards; an id gets rows of
its group only. With two processes of two shards each, and rows split by MOD:

    rows        0  1  2  3  4  5  6  7       shards 0 and 1 are in process 0, 2 and 3 in process 1
    groups      0  0  1  1  0  0  1  1       an id whose hash is even is at home in process 0

Input: where the rows of a table are, ids. Output: groups.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tpu_embed.key_hashes import mix


@dataclasses.dataclass(frozen=True)
class RowGroups:
    """The groups of one table on the host.

    Attributes:
      num_rows: C, the rows that the devices hold together.
      owners: for each shard, the number of the processes that hold it: shards have the same number
        if the same processes do.
      by_range: whether each shard has a range of the rows ("div"); otherwise row r is on shard
        r mod S ("mod").
      count: G, the number of groups; a multiple of the different owners.
      mine: the numbers in `owners` whose shards this process holds.
      saved: those of them whose rows it saves: the first process that holds them does.
    """

    num_rows: int
    owners: tuple[int, ...]
    by_range: bool
    count: int
    mine: frozenset[int]
    saved: frozenset[int]

    @property
    def num_owners(self) -> int:
        """How many different owners there are."""
        return max(self.owners) + 1

    @functools.cached_property
    def rows(self) -> list[np.ndarray]:
        """The rows of each group, int64, ascending: nearly equally many of each owner's."""
        # Owner 1 of 2, with 6 groups, has the groups 1, 3 and 5: its rows are dealt out in turn.
        of_row = np.asarray(self.owners)[self.shards(np.arange(self.num_rows))]
        each = self.count // self.num_owners
        groups = []
        for group in range(self.count):
            mine = np.flatnonzero(of_row == group % self.num_owners)
            groups.append(mine[group // self.num_owners :: each])
        return groups

    def shards(self, rows: np.ndarray) -> np.ndarray:
        """Return the shard of each row on the devices."""
        num_shards = len(self.owners)
        if self.by_range:
            return rows // -(-self.num_rows // num_shards)
        return rows % num_shards

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the group of each id, int64 `[n]`, given uint64 `[n]`."""
        if self.count == 1:
            return np.zeros(ids.size, np.int64)
        return (mix(ids) % np.uint64(self.count)).astype(np.int64)

    def at_home(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids, uint64 `[n]`, are at home in this process, bool `[n]`."""
        return self._are_of(self.mine, ids)

    def are_saved(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of which ids, uint64 `[n]`, this process saves, bool `[n]`."""
        return self._are_of(self.saved, ids)

    def _are_of(self, owners: frozenset[int], ids: np.ndarray) -> np.ndarray:
        if len(owners) == self.num_owners:
            return np.ones(ids.size, bool)
        return np.isin(self.of(ids) % self.num_owners, [*owners])

    @property
    def is_whole(self) -> bool:
        """Whether all ids are at home in this process."""
        return len(self.mine) == self.num_owners
