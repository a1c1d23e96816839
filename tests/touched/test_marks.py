"""The last step of ids and rows, beside dictionaries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed.touched.table_marks import NEVER, IdMarks

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
