"""A training that moves from engine to engine is, to the bit, the one that never moves.

ADOPT_SEEDS=0:100 python -m pytest tests/core/test_adopt_runs.py -k many
"""

import functools
import os

import pytest
from adopt_cases import contents, draw, engine, map_contents
from host_table_cases import TwoRuns

MANY = range(*map(int, os.environ.get("ADOPT_SEEDS", "0:20").split(":")))
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

    @property
    def now(self):
        return engines()[self.at]

    def both(self):
        return (self.stays, self.now)

    def drawn(self, **options):
        """Return a batch, placed by either engine."""
        features = draw(self.rng, KEYS)
        return [made.place(features, **options) for made in self.both()]

    def place(self):
        self.placed.append(self.drawn())

    def admit(self):
        if len(self.admitted) > 1:
            self.update()
        if self.placed:
            pair = zip(self.both(), self.states, self.placed.pop(0), strict=True)
            done = [made.admit(state, batch) for made, state, batch in pair]
            self.states = [state for state, _ in done]
            self.admitted.append([batch for _, batch in done])

    def update(self):
        if not self.admitted:
            return
        batches = self.admitted.pop(0)
        found = self.looked_up(batches)
        gradients = jax.tree.map(lambda a: self.rng.normal(size=a.shape).astype("f"), found)
        pair = self.with_states(batches)
        self.states = [made.update_in_place(*some, gradients) for made, *some in pair]
        self.counts["updates"] += 1

    def with_states(self, batches):
        return [*zip(self.both(), self.states, batches, strict=True)]

    def looked_up(self, batches):
        """Return the activations, which both engines have."""
        found, other = (made.lookup(*some) for made, *some in self.with_states(batches))
        jax.tree.map(np.testing.assert_array_equal, found, other)
        return found

    def evaluate(self):
        self.looked_up(self.drawn(training=False))

    def finish(self):
        while self.placed or self.admitted:
            self.admit()
            self.update()

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

    def compare(self):
        found, other = (contents(*some) for some in zip(self.both(), self.states, strict=True))
        assert found == other
        assert map_contents(self.stays) == map_contents(self.now)

    def run(self):
        ways = [self.place] * 5 + [self.admit] * 4 + [self.update] * 3
        ways += [self.evaluate, self.adopt, self.adopt]
        for _ in range(OPERATIONS):
            if len(self.placed) > 2:
                self.admit()
            ways[self.rng.integers(len(ways))]()
        self.finish()
        self.adopt()
        return self.counts | {"evicted": self.stays.vocabularies.counters["items"]["evicted"]}


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.whole
def test_many(seed):
    """A run that moves is the one that stays."""
    counts = World(seed).run()
    assert min(counts.values()) > 0, counts
