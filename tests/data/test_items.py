"""What follows the features of an item: arrays are copied, everything else is handed on."""

import collections
import dataclasses
import threading

import jax.numpy as jnp
import numpy as np
import pandas
import pyarrow

from tpu_embed import RaggedIds, TableConfig
from tpu_embed.data.items import copy_arrays

Pair = collections.namedtuple("Pair", ["label", "day"])


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    label: object
    day: str = "Monday"


class Tensor:
    """An array of another library, which NumPy cannot read."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self):
        return self.values.__dlpack__()


def test_arrays_are_copied_wherever_they_stand():
    buffer = np.zeros(4, np.float32)
    column = pyarrow.Array.from_buffers(pyarrow.float32(), 4, [None, pyarrow.py_buffer(buffer)])
    part = {
        "array": buffer,
        "view": buffer[::2],
        "masked": np.ma.masked_array(buffer, [0, 1, 0, 0]),
        "objects": np.array([buffer, None], object),
        "series": pandas.Series(buffer, copy=False),
        "column": column,
        "tensor": Tensor(buffer),
        "ragged": RaggedIds(buffer, [0, 4]),
        "inside": [(buffer,), Pair(buffer, "Monday"), Rest(buffer)],
        "counts": collections.Counter(monday=buffer),
    }
    made = copy_arrays(part)
    buffer[:] = 1
    arrays = [made["array"], made["view"], made["masked"].data, made["objects"][0]]
    arrays += [made["series"], made["column"], made["tensor"].values, made["ragged"].values]
    (inside,), pair, rest = made["inside"]
    for array in (*arrays, inside, pair.label, rest.label, made["counts"]["monday"]):
        assert not np.asarray(array).any()
    assert [type(made[name]) for name in part] == [type(part[name]) for name in part]
    assert [type(one) for one in made["inside"]] == [tuple, Pair, Rest]
    assert made["masked"].mask.tolist() == [False, True, False, False]


def test_what_cannot_change_or_holds_no_array_is_handed_on():
    lock, lines = threading.Lock(), (line for line in "ab")  # they cannot be copied
    kept = (jnp.ones(2), None, "text", 3, TableConfig(4, 2), Rest("label"), Rest, lock, lines)
    assert all(copy_arrays(part) is part for part in kept)
    # A source may use one list, or one dict, for all batches.
    for part in ([1, 2], {"b": 1, 2: "a"}, collections.OrderedDict(b=1, a=2)):
        made = copy_arrays(part)
        assert made == part
        assert list(made) == list(part)
        assert made is not part
