"""What a record keeps: the latest step of each row; which moments are before others."""

import numpy as np

from tpu_embed.touched.table_marks import Lineage, SavedMarks, SavedRecord, Version, merge_records

MOMENT = Version("run", 5, 5, 5)


def record(keys, touched, given, shared):
    """Return what one process kept of one table; the key 99 was lost."""
    steps = np.int32(touched), np.int32(given)
    lost = np.uint64([99]), np.int32([4])
    marks = SavedMarks(np.uint64(keys), *steps, *lost, lost_since=2, shared=shared)
    return SavedRecord(MOMENT, MOMENT, (), {3: 3}, {"t": marks})


def test_each_row_has_its_latest_step_whichever_process_saw_it():
    one = record([7, 3, 5], [4, -1, 2], [1, 6, -1], shared=1)
    two = record([3, 5, 8], [3, 1, 0], [6, -1, 2], shared=4)
    three = record([5], [-1], [-1], shared=-1)
    for some in ([one, two, three], [three, two, one], [two, three, one]):
        found = merge_records(some)
        marks = found.tables["t"]
        assert marks.keys.tolist() == [3, 5, 7, 8]
        assert marks.touched.tolist() == [3, 2, 4, 0]
        assert marks.given.tolist() == [6, -1, 1, 2]
        assert (marks.shared, marks.lost_since, marks.lost.tolist()) == (4, 2, [99])
        assert found[:4] == one[:4]


def test_moments_of_other_runs_are_in_no_order():
    for numbers in ((5, 5, 5), (6, 5, 5), (9, 9, 9)):
        assert MOMENT.is_up_to(Version("run", *numbers))
        assert not MOMENT.is_up_to(Version("other", *numbers))
    assert not MOMENT.is_up_to(Version("run", 9, 9, 4))
    lineage = Lineage("new", (MOMENT, Version("other", 2, 0, 0)))
    assert lineage.has(Version("run", 4, 5, 5))
    assert lineage.has(Version("new", 99, 0, 0))
    assert not lineage.has(Version("other", 3, 0, 0))  # though the moment of "run" is later
