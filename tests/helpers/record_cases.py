"""Tables with keys, their batches, and copies of all their rows, for tests of what has changed."""

import numpy as np

from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, TableConfig

NAMES = ("items", "tags", "far")
SPREAD = 14


def configs(capacity=9):
    """Return features of three living tables, one of them on the host.

    Args:
      capacity: the rows of the first one.
    """
    living, shared = DynamicVocabulary(ttl=3), DynamicVocabulary(unseen="shared", admit_after=2)
    far = {"vocabulary": shared, "storage": HostStorage(device_rows=15)}
    tables = (
        TableConfig(capacity, 2, name="items", vocabulary=living),
        TableConfig(6, 2, name="tags", vocabulary=shared, combiner="sum"),
        TableConfig(20, 3, name="far", **far),
    )
    return {table.name: FeatureConfig(table) for table in tables}


def draw(rng, step):
    keys = rng.integers(0, SPREAD, (3, 4)) + step // 2
    keys = np.where(rng.random((3, 4)) < 0.2, -1, keys * 2**33)
    return dict(zip(NAMES, keys, strict=True))


def rows_by_key(engine, state):
    """Return the bits of each key's row, by table; and those that unseen keys share."""
    found = {}
    for name in NAMES:
        keys, rows = engine.vocabularies.keys(name)
        bits = [row.tobytes() for row in engine.rows(state, name, rows)]
        found[name] = dict(zip(keys.tolist(), bits, strict=True))
        if name != "items":
            last = engine.table_configs[name].vocabulary_size - 1
            found[name]["shared"] = engine.rows(state, name, np.array([last])).tobytes()
    return found


def check(touched, version, before, after):
    """Check that all that has changed is reported, and which keys have no row any more."""
    changes = touched.changes(version)
    for name in NAMES:
        one, mine, theirs = changes[name], before[name], after[name]
        changed = {key for key in theirs if theirs[key] != mine.get(key)}
        assert (one.shared is not None) >= ("shared" in changed), name
        reported = one.keys.tolist()
        assert changed - {"shared"} <= set(reported) <= set(theirs), name
        assert reported == sorted(reported)
        assert set(mine) - set(theirs) <= set(one.lost.tolist()), name
        assert not set(one.lost.tolist()) & set(theirs), name
        np.testing.assert_array_equal(touched.since(version)[name], one.keys)
