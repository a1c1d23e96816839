"""The last step of ids and rows, beside dictionaries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from living_cases import engine

from tpu_embed.touched.table_marks import NEVER, IdMarks, RowMarks

IDS = st.lists(st.sampled_from([0, 1, 2, 7, 2**40, 2**63, 2**64 - 1]), max_size=6)
STEPS = st.integers(0, 12)
CALLS = st.one_of(
    st.tuples(st.just("mark"), IDS, STEPS),
    st.tuples(st.just("mark_each"), IDS, st.lists(STEPS, min_size=6, max_size=6)),
    st.tuples(st.just("remove"), IDS, st.none()),
    st.tuples(st.just("keep_latest"), st.integers(0, 5), st.none()),
)


class Model:
    """The same in a dictionary."""

    def __init__(self):
        self.steps, self.newest = {}, NEVER

    def mark(self, ids, step):
        # A mark that is made late gets the greatest step so far.
        self.newest = max(self.newest, step) if ids else self.newest
        self.steps |= dict.fromkeys(ids, self.newest)

    def mark_each(self, ids, steps):
        for step, id_ in sorted(zip(steps, ids, strict=False), key=lambda pair: pair[0]):
            self.mark([id_], step)

    def remove(self, ids, _):
        self.steps = {id_: step for id_, step in self.steps.items() if id_ not in ids}

    def keep_latest(self, count, _):
        last = NEVER
        while len(self.steps) > count:  # all of the earliest step at once
            last = min(self.steps.values())
            self.steps = {id_: step for id_, step in self.steps.items() if step > last}
        return last


def as_ids(ids):
    return np.array(ids, np.uint64)


@given(st.lists(CALLS, max_size=12))
def test_ids_have_the_steps_of_a_dictionary(calls):
    marks, model = IdMarks(), Model()
    for call, first, second in calls:
        said = getattr(model, call)(first, second)
        if call == "keep_latest":
            assert marks.keep_latest(first) == said
        elif call == "remove":
            marks.remove(as_ids(first))
        else:
            steps = second if call == "mark" else np.array(second[: len(first)], np.int32)
            marks.mark(as_ids(first), steps)
        assert len(marks) == len(model.steps)
    for step in range(-2, 14):
        expected = sorted(id_ for id_, at in model.steps.items() if at > max(step, NEVER))
        assert marks.after(step).tolist() == expected
    every = as_ids([0, 1, 2, 7, 2**40, 2**63, 2**64 - 1, 5])
    assert marks.steps(every).tolist() == [model.steps.get(int(i), NEVER) for i in every]


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_have_the_greatest_step(devices):
    layout = engine(devices).layout
    (stack, items), (_, users) = layout.table("items"), layout.table("users")
    assert stack.tables == (items, users)
    whole, rng = np.zeros(stack.physical_rows, np.int32), np.random.default_rng(0)
    places = RowMarks(whole)
    views = {table.name: stack.logical_view(whole, table) for table in stack.tables}
    sizes = {table.name: table.vocabulary_size for table in stack.tables}
    marks = {name: RowMarks(view, sizes[name]) for name, view in views.items()}
    last = {"items": np.full(34, NEVER), "users": np.full(9, NEVER)}
    assert marks["items"].after(NEVER).size == 0
    for step in rng.permutation(12).tolist():
        table = (items, users)[int(rng.integers(2))]
        rows = rng.integers(0, table.vocabulary_size, 4)
        steps = step if step % 2 else np.full(4, step, np.int32)
        if step % 3:
            marks[table.name].mark(rows, steps)
        else:
            places.mark(stack.physical(rows.astype(stack.index_dtype), table), steps)
        np.maximum.at(last[table.name], rows, step)
    marks["users"].mark(np.array([3, 4], np.uint64), np.array([9, 30], np.int32))
    np.maximum.at(last["users"], [3, 4], [9, 30])
    for table in (items, users):
        mine = last[table.name]
        for step in range(-1, 31):
            np.testing.assert_array_equal(
                marks[table.name].after(step), np.flatnonzero(mine > step)
            )
        np.testing.assert_array_equal(marks[table.name].steps(np.arange(mine.size)), mine)
    marks["items"].mark_all(5)
    marks["items"].mark_all(4)
    assert marks["items"].after(4).size == 34
    np.testing.assert_array_equal(marks["items"].after(5), np.flatnonzero(last["items"] > 5))
    whole = np.maximum(last["items"], 5)
    np.testing.assert_array_equal(marks["items"].steps(np.arange(34)), whole)
    assert marks["users"].after(30).size == 0  # it shares the stack, not its rows
