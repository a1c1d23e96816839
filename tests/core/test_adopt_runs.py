"""A training that moves from engine to engine is, to the bit, the one that never moves.

ADOPT_SEEDS=0:100 python -m pytest tests/core/test_adopt_runs.py -k many
"""

import functools
import os

import pytest
from adopt_cases import contents, draw, engine, map_contents
from host_table_cases import TwoRuns

FEW = range(2)
MANY = range(*map(int, os.environ.get("ADOPT_SEEDS", "2:20").split(":")))
OPERATIONS, KEYS = 40, 40
KINDS = {
    "stays": {},
    "alone": {"stack_tables": False},
    "spread": {"devices": 8, "placement": "div"},
    "on the host": {"devices": 2, "on_host": ("items", "tags"), "device_rows": 40},
}
"""All of one capacity, so that they evict the same keys."""


@functools.cache
def engines():
    return {kind: engine(lookahead=1, **options) for kind, options in KINDS.items()}


class World(TwoRuns):
    """The same run twice: one stays in its engine, the other moves."""

    def __init__(self, seed):
        super().__init__([engines()["stays"], engines()["alone"]], seed)
        self.at = "alone"
        self.rewind()

    def draw(self):
        return (draw(self.rng, KEYS),)

    def evaluate(self):
        given = self.draw()
        self.compare([made.place(*given, training=False) for made in self.engines])

    def adopt(self):
        """Move, perhaps after a refusal, or after batches were thrown away."""
        kinds = [kind for kind in KINDS if kind not in ("stays", self.at)]
        kind = kinds[self.rng.integers(len(kinds))]
        if self.placed:
            with pytest.raises(ValueError, match=r"no batch placed ahead, got \d; admit them"):
                engines()[kind].adopt(self.states[1], self.engines[1])
        if self.rng.integers(2):
            self.rewind()
        self.finish()
        before, state = self.both[1]
        late = before.place(draw(self.rng, KEYS), training=False)
        self.engines[1], self.at = engines()[kind], kind
        self.states[1] = self.engines[1].adopt(state, before)
        with pytest.raises(ValueError, match=r"batch: expected|Batch: expected"):
            self.engines[1].lookup(self.states[1], late)
        one, other = ((contents(*some), map_contents(some[0])) for some in self.both)
        assert one == other
        self.counts["moves"] += 1

    def run(self):
        ways = [self.place] * 5 + [self.admit] * 4 + [self.update] * 3
        ways += [self.evaluate, self.adopt, self.adopt]
        for _ in range(OPERATIONS):
            if len(self.placed) > 2:
                self.admit()
            ways[self.rng.integers(len(ways))]()
        self.finish()
        self.adopt()
        self.counts["evicted"] = self.engines[0].vocabularies.counters["items"]["evicted"]
        return self.counts


@pytest.mark.parametrize("seed", FEW)
@pytest.mark.whole
def test_a_run_that_moves_is_the_one_that_stays(seed):
    counts = World(seed).run()
    assert counts["moves"] > 1
    assert min(counts.values()) > 0, counts


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many(seed):
    World(seed).run()
