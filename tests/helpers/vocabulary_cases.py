"""Batches of keys for maps and their oracles, and comparisons of what they did."""

import numpy as np
import pytest

from tpu_embed.kernels import cpu, dispatch
from tpu_embed.vocabulary import DynamicVocabulary, VocabularyMap

KERNELS = "reference", "native"
NO_KEYS = np.zeros(0, np.uint64)
NO_ROWS = np.zeros(0, np.int64)
ODD_KEYS = [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 2**32, 0x9E3779B97F4A7C15]


def built_kernels():
    """Return the kernels that this machine has."""
    return KERNELS if cpu.load().path is not None else KERNELS[:1]


def make_map(kernels, capacity, lookahead=0, **options):
    """Return a map that runs on the given kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, kernels)
        return VocabularyMap(DynamicVocabulary(**options), capacity, lookahead)


def take(vocabulary_map, keys, at_once=False):
    """Take a batch of keys as a caller does: find them, and split known rows from unknown keys."""
    keys = np.asarray(keys, np.uint64)
    rows = vocabulary_map.find(keys)
    return vocabulary_map.take(rows[rows >= 0], keys[rows < 0], at_once=at_once)


def check_step(vocabulary_map, oracle, keys, at_once=False):
    """Take a batch with the map and with the oracle; all they tell must be the same."""
    key_of = {row: key for key, row in oracle.row_of.items()}
    taken = take(vocabulary_map, keys, at_once)
    rows_after = vocabulary_map.find(np.array(keys, np.uint64))
    check_taken(taken, rows_after, oracle, keys, at_once)
    assert taken.evicted_keys.dtype == np.uint64
    assert taken.evicted_keys.tolist() == [key_of[row] for row in taken.evicted_rows.tolist()]
    assert vocabulary_map.step == taken.step == oracle.step
    assert vocabulary_map.counters == oracle.counters
    assert len(vocabulary_map) == len(oracle.row_of)


def check_taken(taken, rows_after, oracle, keys, at_once=False):
    """Compare what a map did with a batch, and the rows it then finds, with the oracle."""
    rows, new, freed = oracle.take(keys, at_once)
    assert rows_after.tolist() == [rows[key] for key in keys]
    assert [*zip(taken.new_keys.tolist(), taken.new_rows.tolist(), strict=True)] == new
    assert taken.evicted_rows.tolist() == freed
    assert taken.unseen == list(rows.values()).count(-1)


def check_state(state, expected):
    """Compare a `MapState` with an oracle's lists, dtypes too."""
    for name, wanted in expected.items():
        found = getattr(state, name)
        assert found.dtype == (np.uint64 if name.endswith("keys") else np.int64)
        assert found.tolist() == wanted, name


def assert_same(one, two):
    """Compare two tuples of arrays and numbers, dtypes too."""
    for name, first, second in zip(one._fields, one, two, strict=True):
        assert np.asarray(first).dtype == np.asarray(second).dtype, name
        np.testing.assert_array_equal(first, second, err_msg=name)


def check_random_map(rng, steps=60):
    """Compare the maps of all kernels on a random stream with all kinds of calls; return them."""
    admit_after, evict = int(rng.integers(1, 4)), str(rng.choice(["lru", "lfu", "none"]))
    options = {"ttl": int(rng.integers(1, 9)) if rng.random() < 0.5 else None}
    options |= {"waiting": int(rng.integers(1, 200)), "admit_after": admit_after, "evict": evict}
    capacity, lookahead = int(rng.integers(1, 300)), int(rng.integers(0, 3))
    maps = [make_map(name, capacity, lookahead, **options) for name in KERNELS]
    spread = int(rng.choice([20, 500, 5000]))
    for _ in range(steps):
        first = maps[0].step * spread // 20  # the keys of a stream come and go
        batch = rng.integers(first, first + spread, rng.integers(0, 200)).astype(np.uint64)
        odd = rng.choice(np.array(ODD_KEYS, np.uint64), 2)
        batch = np.append(batch * np.uint64(2**63 + 2**31 + 1), odd)
        at_once = bool(rng.random() < 0.2)
        same([take(found, batch, at_once) for found in maps])
        same([(found.find(batch), *found.counters.values(), len(found)) for found in maps])
        step = int(rng.integers(maps[0].earliest, maps[0].step + 1))
        kind = rng.choice(["nothing", "state", "rewind", "forget", "load"], p=[0.6, *[0.1] * 4])
        state = maps[-1].state(step)
        for found in maps:
            if kind == "state":
                assert_same(found.state(step), state)
            elif kind == "load":
                found.load_state(state)
            elif kind != "nothing":
                getattr(found, kind)(step)
    same([found.state() for found in maps])
    return maps


def check_random_keys(rng):
    """Number the keys of a batch and split them by their rows, in all kernels and by loops."""
    some = np.append(rng.integers(0, 2**63, 40).astype(np.uint64), np.array(ODD_KEYS, np.uint64))
    keys = rng.choice(some, rng.integers(0, 300))
    number_of = {}
    numbers = [number_of.setdefault(key, len(number_of)) for key in keys.tolist()]
    rows = rng.permutation(len(number_of)).astype(np.int32)
    rows[rng.random(rows.size) < 0.3] = -1
    positions = np.array(numbers, np.int32)
    positions[rng.random(positions.size) < 0.2] = -1
    firsts = [numbers.index(n) for n in range(len(number_of))]
    first = {at: i for i, at in reversed([*enumerate(positions.tolist())]) if at >= 0}
    known = [rows[at] for at, _ in sorted(first.items(), key=lambda one: one[1]) if rows[at] >= 0]
    absent = sorted(i for at, i in first.items() if rows[at] < 0)
    for name in KERNELS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(dispatch.VARIABLE, name)
            kernels = dispatch.host_kernels()
        arrays = (*kernels.distinct_keys(keys), *kernels.split_by_row(positions, rows))
        arrays = (*arrays, kernels.rows_at(rows, positions), kernels.are_among(some, keys))
        dtypes = np.uint64, np.int32, np.int64, np.int32, np.int64, np.int32, np.bool_
        assert [a.dtype for a in arrays] == list(dtypes)
        found = [-1 if at < 0 else rows[at] for at in positions]
        among = [key in number_of for key in some.tolist()]
        expected = [list(number_of), numbers, firsts, known, absent, found, among]
        assert [a.tolist() for a in arrays] == expected


def same(results):
    """Check that all tuples of numbers and arrays are equal."""
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
