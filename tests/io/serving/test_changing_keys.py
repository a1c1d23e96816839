"""The keys of a served table beside a dictionary, and rows that are set."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed.io.serving import served_tables
from tpu_embed.io.serving.served_tables import ServedKeys

LARGEST = 2**64 - 1


def as_keys(keys):
    return np.array(sorted(keys), np.uint64)


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


def test_rows_are_set_in_blocks(monkeypatch):
    monkeypatch.setattr(served_tables, "_NUMBERS", 1)  # blocks of 64 rows
    rng, expected = np.random.default_rng(0), np.zeros((200, 3), np.float32)
    ids, rows = rng.permutation(200)[:150], rng.random((150, 3), np.float32)
    expected[ids] = rows
    found = served_tables.set_rows(jnp.zeros((200, 3)), ids, rows)
    np.testing.assert_array_equal(found, expected)
