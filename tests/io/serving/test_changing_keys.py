"""The keys of a served table beside a dictionary."""

import numpy as np
import pytest

from tpu_embed.io.serving.served_tables import ServedKeys, Writing

LARGEST = 2**64 - 1


def as_keys(keys):
    return np.array(sorted(keys), np.uint64)


class Model:
    """Keys with rows, and rows that are free."""

    def __init__(self, keys):
        self.rows = {key: i + 1 for i, key in enumerate(sorted(keys))}
        self.most = len(self.rows)

    def check(self, served, known):
        every = as_keys(known)
        expected = [self.rows.get(int(key), 0) for key in every]
        found = served.find(every)
        assert found.dtype == np.int32
        assert (found > 0).tolist() == [row > 0 for row in expected]
        keys, rows = served.all()
        assert keys.tolist() == sorted(self.rows)
        assert rows.tolist() == served.find(keys).tolist()
        assert len({*rows.tolist()}) == rows.size
        assert served.num_rows == 1 + self.most
        assert not rows.size or 1 <= rows.min() <= rows.max() < served.num_rows


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 127, 128, 129, 1000])
def test_exported_keys_are_found_wherever_they_stand(count):
    rng = np.random.default_rng(count)
    keys = as_keys({*rng.choice(4 * count + 9, count, replace=False).tolist()})
    keys = keys * np.uint64(2**50) if count else keys
    if count > 1:
        keys[-1] = LARGEST
    served = ServedKeys(keys)
    every = np.unique(np.concatenate([keys, keys + np.uint64(1), [np.uint64(0)]]).astype(np.uint64))
    expected = dict(zip(keys.tolist(), range(1, count + 1), strict=True))
    for asked in (every, rng.permutation(every), every[:0], np.repeat(every, 2)[::2]):
        assert served.find(asked).tolist() == [expected.get(key, 0) for key in asked.tolist()]
    assert served.num_rows == count + 1


@pytest.mark.parametrize("count", [0, 5, 150])
@pytest.mark.parametrize("seed", range(2))
def test_keys_come_and_go_as_in_a_dictionary(count, seed):
    rng = np.random.default_rng([count, seed])
    names = [int(n) for n in rng.choice(400, 300, replace=False)] + [LARGEST, 2**63]
    exported = as_keys(names[:count])
    served, model = ServedKeys(exported), Model(exported.tolist())
    copies = []
    for _ in range(30):
        model.check(served, names)
        if rng.random() < 0.2:
            copies.append((served.copy(), dict(model.rows), model.most))
        some = rng.choice(np.array(names, object), 12, replace=False).tolist()
        lost = [key for key in some[:5] if key in model.rows or rng.random() < 0.3]
        keys = some[5 : 5 + int(rng.integers(8))]
        before = dict(zip(*(a.tolist() for a in served.all()), strict=True))
        plan = served.plan(as_keys(keys), as_keys(lost))
        assert dict(zip(*(a.tolist() for a in served.all()), strict=True)) == before
        stay = {key: row for key, row in before.items() if key not in lost}
        assert plan.is_new.tolist() == [int(key) not in before for key in plan.keys]
        served.change(plan)
        model.rows = {key: row for key, row in model.rows.items() if key not in lost}
        model.rows |= dict.fromkeys(keys, 1)
        model.most = max(model.most, len(model.rows))
        after = dict(zip(*(a.tolist() for a in served.all()), strict=True))
        assert {key: after[key] for key in stay} == stay  # nobody moves
        assert plan.rows.tolist() == [after[int(key)] for key in plan.keys]
    for copy, rows, most in copies:
        model.rows, model.most = rows, most
        model.check(copy, names)


def test_a_plan_for_one_copy_is_carried_out_in_another():
    one = ServedKeys(as_keys([3, 5]))
    other = one.copy()
    for keys, lost in (([7], [5]), ([5, 9], [7, 3]), ([3], [])):
        plan = one.plan(as_keys(keys), as_keys(lost))
        one.change(plan)
        other.change(plan)
    for a, b in zip(one.all(), other.all(), strict=True):
        assert a.tolist() == b.tolist()


def test_a_stream_of_keys_takes_no_more_memory_than_those_that_are_there():
    served = ServedKeys(as_keys([1, 2]))
    for first in range(10, 1000, 10):
        lost = as_keys(range(first - 10, first))
        served.change(served.plan(as_keys(range(first, first + 10)), lost))
    assert served.num_rows <= 1 + 12
    assert len(served._moved) <= 2 + 10  # and the exported keys that are lost


def test_a_copy_gives_rows_that_are_free_to_new_keys():
    served = ServedKeys(as_keys([3, 5]))
    served.change(served.plan(as_keys([]), as_keys([5])))
    for one in (served.copy(), served):
        one.change(one.plan(as_keys([9]), as_keys([])))
        assert one.find(as_keys([9])).tolist() == [2]
        assert one.num_rows == 3


def test_arrays_grow_only_where_a_key_finds_no_row_in_them():
    served = ServedKeys(as_keys([3, 5]))
    for keys, needs_room in (([7], False), ([7, 9], True)):
        writing = Writing(np.array([3]), {}, served.plan(as_keys(keys), as_keys([])))
        assert bool(writing.missing({"values": np.zeros((4, 2))})) == needs_room
        assert writing.can_replace({"values": np.zeros((4, 2))}) != needs_room
