"""Long streams of keys that come and go: every step is that of a map in plain Python."""

import numpy as np
import pytest
from oracle_vocabulary import HeapOracle
from vocabulary_cases import assert_same, built_kernels, check_state, check_taken, make_map, take

BUILT = built_kernels()
BATCH = 10_000
LOOKAHEAD = 2
POLICIES = {
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu"},
    "long ttl": {"evict": "lru", "ttl": 60},
    "lfu, ttl": {"evict": "lfu", "ttl": 3},
}
PAIRS = [("lru", 1), ("lfu", 3), ("lfu, ttl", 1)]


def batches(steps, keys):
    """Yield the batches of a stream: of `keys` keys, Zipf, of which other ones are frequent later.

    The odds of the key of rank r are about 1/r. With each step the ranks move on by a thousandth of
    the keys that a batch has.
    """
    rng = np.random.default_rng(0)
    for step in range(steps):
        rank = np.floor(np.exp(rng.random(BATCH) * np.log(keys))).astype(np.uint64)
        item = (rank + np.uint64(step * 10)) % np.uint64(keys)
        yield item * np.uint64(0x9E3779B97F4A7C15)  # odd: different items have different keys


def check(kernels, steps, keys, rows, options):
    """Take a stream with the maps of all kernels, and with the oracle, and compare every step."""
    maps = [make_map(name, rows, LOOKAHEAD, **options) for name in kernels]
    oracle = HeapOracle(rows, lookahead=LOOKAHEAD, waiting=4 * rows, **options)
    before = None
    for step, batch in enumerate(batches(steps, keys), start=1):
        given = batch.tolist()
        every = [take(found, batch) for found in maps]
        check_taken(every[0], maps[0].find(batch), oracle, given)
        assert maps[0].counters == oracle.counters
        for taken in every[1:]:
            assert_same(taken, every[0])
        # Take the last two batches once more.
        if step % 50 == 0:
            for found in maps:
                found.rewind(step - 2)
                for again in (before, (batch, every[0])):
                    assert_same(take(found, again[0]), again[1])
        before = batch, every[0]
        for found in maps:
            found.forget(step - 2)
    for found in maps:
        check_state(found.state(), oracle.state())
    assert oracle.counters["expired" if "ttl" in options else "evicted"] > 0.2 * rows


@pytest.mark.parametrize(("policy", "admit_after"), PAIRS)
@pytest.mark.quick(1)
def test_a_twentieth_of_a_stream(policy, admit_after):
    check(BUILT, 100, 250_000, 25_000, POLICIES[policy] | {"admit_after": admit_after})


@pytest.mark.whole
@pytest.mark.parametrize("admit_after", [1, 3])
@pytest.mark.parametrize("policy", ["lru", "lfu", "long ttl"])
def test_a_stream(policy, admit_after):
    options = POLICIES[policy] | {"admit_after": admit_after}
    check(BUILT[-1:], 2000, 5_000_000, 500_000, options)
