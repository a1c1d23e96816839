"""`prefetch`: order, exceptions, bounds, and a thread that ends with its iterator."""

import itertools
import time

import pytest
from dlrm_cases import dlrm_data, threads


def test_prefetch_keeps_the_order():
    assert list(dlrm_data.prefetch(lambda x: x * x, range(50))) == [x * x for x in range(50)]
    assert list(dlrm_data.prefetch(lambda x: x, [None, 0, ()])) == [None, 0, ()]
    assert not threads()


@pytest.mark.parametrize("where", ["make", "source"])
def test_prefetch_raises_here(where):
    def source():
        yield from range(3)
        if where == "source":
            raise OSError("disk gone")
        yield -1

    def make(x):
        if x < 0:
            raise OSError("disk gone")
        return x

    got = []
    with pytest.raises(OSError, match="disk gone"):
        got.extend(dlrm_data.prefetch(make, source(), depth=1))
    assert got == [0, 1, 2]
    assert not threads()


def test_prefetch_is_bounded():
    made = []
    stream = dlrm_data.prefetch(lambda x: made.append(x) or x, itertools.count(), depth=3)
    assert next(stream) == 0
    until = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert made == list(range(5))  # one taken, three ready, one that waits for room
    stream.close()
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_prefetch_stops_with_its_consumer(depth, wait):
    for size in (2, 3, 4, 1000):
        stream = dlrm_data.prefetch(lambda x: x, range(size), depth=depth)
        next(stream)
        time.sleep(wait)
        del stream  # the last reference
        assert not threads()
