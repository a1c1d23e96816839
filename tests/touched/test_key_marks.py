"""Rows given to keys, and keys that lost theirs, beside a plain list of events."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from tpu_embed.touched import table_marks
from tpu_embed.touched.table_marks import NEVER, KeyMarks


def changes(rows, least=1024):
    """Return a record of a table of so many rows that remembers at least so many lost keys."""
    with mock.patch.object(table_marks, "_LEAST_LOST", least):
        return KeyMarks(SimpleNamespace(declared_size=rows, vocabulary_size=rows, is_on_host=False))


def ids(some):
    return np.array(sorted(some), np.uint64)


class Table:
    """A table with few rows whose keys come and go at random.

    Attributes:
      given: the step at which each row was given last.
      lost: the step at which each key that has no row lost its row.
    """

    def __init__(self, seed, rows):
        self.rng, self.rows = np.random.default_rng(seed), dict.fromkeys(range(rows))
        self.given, self.lost, self.step = {}, {}, 0

    def take(self):
        """Return what one batch does."""
        self.step += 1
        rows = self.rng.choice(len(self.rows), self.rng.integers(0, 3), replace=False).tolist()
        gone = {self.rows[row] for row in rows} - {None}
        nobody = set(range(60)) - gone - set(self.rows.values())
        fresh = self.rng.choice(sorted(nobody), len(rows), replace=False).tolist()
        if rows and self.rng.random() < 0.3:  # a row expires, and nobody gets it
            self.rows[rows.pop()] = None
            fresh.pop()
        self.rows |= dict(zip(rows, fresh, strict=True))
        self.given |= dict.fromkeys(rows, self.step)
        self.lost |= dict.fromkeys(gone, self.step)
        self.lost = {key: step for key, step in self.lost.items() if key not in fresh}
        return ids(rows), ids(fresh), ids(gone)

    def after(self, what, step):
        return sorted(id_ for id_, at in what.items() if at > step)


@pytest.mark.parametrize(("seed", "least"), [(0, 1024), (1, 1024), (3, 2), (3, 6)])
def test_rows_given_and_the_latest_lost_keys_are_remembered(seed, least):
    table, record = Table(seed, rows=4), changes(4, least)
    most, forgotten = max(4, least), 0
    for _ in range(60):
        record.note(table.step + 1, *table.take())
        assert len(record.lost) <= 2 * most
        assert record.lost_since <= table.step
        for step in range(table.step + 1):
            assert record.given.after(step).tolist() == table.after(table.given, step)
            if step >= record.lost_since:
                assert record.lost.after(step).tolist() == table.after(table.lost, step)
        if record.lost_since > forgotten:  # no more was forgotten than had to be
            forgotten = record.lost_since
            assert len(record.lost) <= most
            assert len(table.after(table.lost, forgotten - 1)) > most
    assert (forgotten > 20) == (least < 1024)
    rows, keys = np.arange(4, dtype=np.uint64), record.lost.after(NEVER)
    assert record.given.steps(rows).tolist() == [table.given[row] for row in range(4)]
    assert record.lost.steps(keys).tolist() == [table.lost[int(key)] for key in keys]


def test_keys_without_a_place_in_a_smaller_table_are_lost_after_its_step():
    record = changes(4)
    record.note(1, ids([0, 1]), ids([7, 8]), ids([]))
    record.lost.mark(ids([8]), 4)
    assert record.lost.after(3).tolist() == [8]
    assert record.lost.after(4).tolist() == []
    record.note(4, ids([1]), ids([8]), ids([]))
    assert record.lost.after(0).tolist() == []
