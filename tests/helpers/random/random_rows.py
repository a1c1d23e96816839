"""A store of rows beside a dictionary that does the same, on random calls."""

import contextlib
import resource

import numpy as np

from tpu_embed.storage import RowField

FIELDS = {
    "values": RowField((3,), np.dtype(np.float32)),
    "slots/step": RowField((), np.dtype(np.int32)),
    "slots/moments": RowField((2, 2), np.dtype(np.uint16)),
}


def draw_rows(rng, n):
    return {
        name: rng.integers(0, 2**16, (n, *field.shape)).astype(field.dtype)
        for name, field in FIELDS.items()
    }


class Model:
    """What the rows must be: a dictionary from ids to rows, and to the mark of their last write."""

    def __init__(self):
        self.rows, self.marks, self.mark = {}, {}, 1

    def write(self, ids, rows):
        for i, id_ in enumerate(ids.tolist()):
            self.rows[id_] = {name: some[i].copy() for name, some in rows.items()}
            self.marks[id_] = self.mark

    def remove(self, ids):
        here = [id_ for id_ in ids.tolist() if id_ in self.rows]
        for id_ in here:
            del self.rows[id_], self.marks[id_]
        return len(here)

    def check(self, store, ids):
        rows, found = store.read(ids)
        # The same to other places, and nothing beside them.
        at = np.random.default_rng(ids.size).permutation(2 * ids.size)[: ids.size]
        room = draw_rows(np.random.default_rng(ids.size), 2 * ids.size)
        expected = {name: some.copy() for name, some in room.items()}
        np.testing.assert_array_equal(store.read_into(room, at, ids), found)
        for name, some in expected.items():
            some[at[found]] = rows[name][found]
            np.testing.assert_array_equal(room[name], some)
        assert found.tolist() == [id_ in self.rows for id_ in ids.tolist()]
        np.testing.assert_array_equal(store.contains(ids), found)
        for i in np.flatnonzero(found):
            for name, some in rows.items():
                np.testing.assert_array_equal(some[i], self.rows[int(ids[i])][name])

    def check_all(self, store):
        assert len(store) == len(self.rows)
        for since in (1, self.mark - 1, self.mark, self.mark + 1):
            expected = sorted(id_ for id_, mark in self.marks.items() if mark >= since)
            assert store.ids(since).tolist() == expected
        self.check(store, np.array(sorted(self.rows), np.uint64))


def draw_ids(rng, n, space):
    # Small numbers, so that many are known, spread over all 64 bits.
    ids = rng.choice(space, size=min(n, space), replace=False).astype(np.uint64)
    return ids * np.uint64(0x9E3779B97F4A7C15)


@contextlib.contextmanager
def no_file_beyond(size):
    """Let no file of this process grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_random_rows(rng, store, calls):
    """Make random calls of a `HostRows` with the fields `FIELDS`, and check all results.

    Args:
      rng: draws the calls.
      store: an empty one.
      calls: how many.

    Returns:
      how many calls were made.
    """
    model, space = Model(), int(rng.choice([5, 300, 3000]))
    for _ in range(calls):
        ids = draw_ids(rng, int(rng.integers(0, space)), space)
        match rng.choice(["write", "write", "read", "remove", "compact", "mark"]):
            case "write":
                rows = draw_rows(rng, ids.size + 3)
                at = rng.permutation(ids.size + 3)[: ids.size]
                given = {name: some[at] for name, some in rows.items()}
                store.write(ids, rows, at) if rng.random() < 0.5 else store.write(ids, given)
                model.write(ids, given)
            case "read":
                model.check(store, ids)
            case "remove":
                assert store.remove(ids) == model.remove(ids)
            case "compact":
                store._rows.compact()
            case "mark":
                model.mark = store.begin_mark()
    model.check_all(store)
    return calls
