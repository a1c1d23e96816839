"""A map whose rows are in groups, beside loops that do the same id by id."""

import copy

import numpy as np
import pytest

from tpu_embed import DynamicVocabulary
from tpu_embed.storage import RowGroups
from tpu_embed.vocabulary.map import GroupedMap


class Loops:
    """What a map does with batches of ids, one id after the other."""

    def __init__(self, groups, lookahead):
        self.groups, self.lookahead = groups, lookahead
        self.row_of, self.seen, self.step = {}, {}, 0

    def take(self, ids):
        """Return the rows of a batch of distinct ids, those that are on the devices first."""
        self.step += 1
        evicted = {}
        self.seen |= {one: self.step for one in ids if one in self.row_of}
        for one in ids:
            if one not in self.row_of:
                self.bring(one, evicted)
        return [self.row_of.get(one, -1) for one in ids], evicted

    def bring(self, one, evicted):
        group = int(self.groups.of(np.array([one], np.uint64))[0])
        rows = self.groups.rows[group].tolist()
        free = sorted(set(rows) - set(self.row_of.values()))
        if not free:
            mine = [x for x, row in self.row_of.items() if row in rows]
            old = [x for x in mine if self.seen[x] < self.step - self.lookahead]
            if not old:
                return
            lost = min(old, key=lambda x: (self.seen[x], self.row_of[x]))
            free = [self.row_of.pop(lost)]
            evicted[lost] = free[0]
        self.row_of[one], self.seen[one] = free[0], self.step


CASES = {
    "one owner": RowGroups(23, (0, 0), False, 3, frozenset([0]), frozenset([0])),
    "two owners": RowGroups(24, (0, 0, 1, 1), False, 2, frozenset([1]), frozenset()),
    "ranges": RowGroups(26, (0, 1, 0, 1), True, 4, frozenset([0]), frozenset([0])),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lookahead", [0, 1])
def test_random_batches_do_what_loops_do(case, lookahead):
    groups, rng = CASES[case], np.random.default_rng(len(case))
    owners = np.asarray(groups.owners)[groups.shards(np.arange(groups.num_rows))]
    assert sorted(np.concatenate(groups.rows)) == [*range(groups.num_rows)]
    made, loops = GroupedMap(DynamicVocabulary(), groups, lookahead), Loops(groups, lookahead)
    past, lost, unseen = {0: copy.deepcopy(loops)}, 0, 0
    for _ in range(80):
        ids = rng.permutation(60)[: rng.integers(1, 16)].astype(np.uint64)
        found = made.find(ids)
        known = found >= 0
        taken = made.take(found[found >= 0], ids[found < 0])
        expected, evicted = loops.take(ids.tolist())
        found[found < 0] = taken.rows
        np.testing.assert_array_equal(found, expected)
        pairs = zip(taken.evicted_keys.tolist(), taken.evicted_rows.tolist(), strict=True)
        assert dict(pairs) == evicted
        brought = dict(zip(taken.new_keys.tolist(), taken.new_rows.tolist(), strict=True))
        assert brought == {x: r for x, r in loops.row_of.items() if x in ids[~known] and r >= 0}
        first = taken.new_rows.size - taken.evicted_rows.size
        np.testing.assert_array_equal(taken.new_rows[first:], taken.evicted_rows)
        # An id has a row of those who are to store it.
        has = found >= 0
        np.testing.assert_array_equal(owners[found[has]], groups.of(ids[has]) % groups.num_owners)
        lost, unseen = lost + len(evicted), unseen + taken.unseen
        if (found < 0).any():
            assert made.rows_needed(ids[found < 0]) > groups.num_rows
        past[made.step] = copy.deepcopy(loops)
        if rng.random() < 0.2:
            step = int(rng.integers(max(0, made.step - 3), made.step + 1))
            made.rewind(step)
            loops = copy.deepcopy(past[step])
        state = made.state()
        held = dict(zip(state.keys.tolist(), state.rows.tolist(), strict=True))
        assert held == loops.row_of
        assert (np.diff(state.rows) > 0).all()
        assert len(made) == len(held)
        seen = dict(zip(state.keys.tolist(), state.last_seen.tolist(), strict=True))
        assert seen == {one: loops.seen[one] for one in held}
    assert lost > 30
    assert lookahead == 0 or unseen > 0
