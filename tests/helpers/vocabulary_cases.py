"""Batches of keys for maps and their oracles, and comparisons of what they did."""

import numpy as np

NO_KEYS = np.zeros(0, np.uint64)
NO_ROWS = np.zeros(0, np.int64)
ODD_KEYS = [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 2**32, 0x9E3779B97F4A7C15]


def take(vocabulary_map, keys):
    """Take a batch of keys as a caller does: find them, and split known rows from unknown keys."""
    keys = np.asarray(keys, np.uint64)
    rows = vocabulary_map.find(keys)
    return vocabulary_map.take(rows[rows >= 0], keys[rows < 0])


def check_step(vocabulary_map, oracle, keys):
    """Take a batch with the map and with the oracle; all they tell must be the same."""
    taken = take(vocabulary_map, keys)
    check_taken(taken, vocabulary_map.find(np.array(keys, np.uint64)), oracle, keys)
    assert vocabulary_map.step == taken.step == oracle.step
    assert vocabulary_map.counters == oracle.counters
    assert len(vocabulary_map) == len(oracle.row_of)


def check_taken(taken, rows_after, oracle, keys):
    """Compare what a map did with a batch, and the rows it then finds, with the oracle."""
    rows, new, freed = oracle.take(keys)
    assert rows_after.tolist() == [rows[key] for key in keys]
    new_pairs = list(zip(taken.new_keys.tolist(), taken.new_rows.tolist(), strict=True))
    assert new_pairs == new
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
