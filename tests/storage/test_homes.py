"""`Homes`: rows that leave and come back have the values with which they left, however late."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tpu_embed.storage import (
    VALUES,
    Homes,
    HomeTable,
    HostStorage,
    Room,
    RowField,
    RowGroups,
    slot_field,
)

GROUPS = RowGroups(8, (0,), False, 1, frozenset([0]), frozenset([0]))
FIELDS = {
    VALUES: RowField((2,), np.dtype(np.float32)),
    slot_field("sums"): RowField((), np.dtype(np.float32)),
}
LONG = 60


def homes():
    return Homes({"items": HomeTable(HostStorage(device_rows=8), FIELDS, GROUPS)})


def rows_of(values):
    numbers = np.asarray(values, np.float32)
    return {VALUES: np.stack([numbers, -numbers], axis=1), slot_field("sums"): numbers + 0.5}


@pytest.mark.parametrize("seed", range(3))
def test_random_departures_and_returns_follow_a_dictionary(seed):
    """The model: what is on the devices, what each batch displaces, and what left last."""
    rng, home = np.random.default_rng(seed), homes()
    held, left = {}, {}  # on the devices, as of the admitted step; with which value a key has left
    there, waiting, placed, late = set(), [], 0, 0  # on the devices, as of the placed step
    for _ in range(300):
        if rng.random() < 0.5 and len(waiting) < 3:
            out = rng.permutation(sorted(there))[: rng.integers(0, 4)].astype(np.uint64)
            new = np.setdiff1d(rng.integers(0, 30, 5), sorted(there)).astype(np.uint64)
            incoming = home.fetch("items", new, [(step, keys) for step, keys, _ in waiting])
            late += int((incoming.awaited > 0).sum())
            there = (there - set(out.tolist())) | set(new.tolist())
            placed += 1
            waiting.append((placed, out, incoming))
        elif waiting:
            step, out, incoming = waiting.pop(0)
            found, known = home.complete("items", incoming)
            assert known.tolist() == [key in left for key in incoming.keys.tolist()]
            expected = rows_of([left[key] for key in incoming.keys[known].tolist()])
            for name, some in found.items():
                np.testing.assert_array_equal(some[known], expected[name])
            leaving, pause = [held.pop(key) for key in out.tolist()], rng.random() * 0.002
            left |= dict(zip(out.tolist(), leaving, strict=True))

            def read(leaving=leaving, pause=pause):
                time.sleep(pause)
                return {"items": Room(rows_of(leaving), None)}

            home.wait_for_room()
            home.send(step, {"items": out}, read)
            # A row that was brought is trained: it leaves with another value.
            held |= dict.fromkeys(incoming.keys.tolist(), float(rng.integers(1000)))
    assert late > 10
    home.flush()
    assert home["items"].ids().tolist() == sorted(left)
    found, known = home.visit("items", home["items"].ids())
    assert known.all()
    np.testing.assert_array_equal(found[VALUES], rows_of([left[k] for k in sorted(left)])[VALUES])


def test_only_a_row_that_has_not_arrived_is_waited_for():
    home, go = homes(), threading.Event()

    def read():
        assert go.wait(LONG)
        return {"items": Room(rows_of([5.0]), None)}

    home.send(1, {"items": np.array([7], np.uint64)}, read)
    assert not home["items"].ids().size
    assert home.ids("items").tolist() == [7]
    other, same = (home.fetch("items", np.array([key], np.uint64), []) for key in (8, 7))
    assert [one.awaited.tolist() for one in (other, same)] == [[0], [1]]
    assert not home.complete("items", other)[1].any()
    with ThreadPoolExecutor() as pool:
        done = pool.submit(home.complete, "items", same)
        assert not done.done()
        go.set()
        assert done.result(LONG)[0][VALUES].tolist() == [[5.0, -5.0]]
    home.flush()
    assert home.ids("items").tolist() == home["items"].ids().tolist() == [7]


def test_sending_raises_nothing_once_room_was_waited_for():
    """By then the tables are donated, so what is lost meanwhile must be said later."""
    home, go = homes(), threading.Event()

    def read(late=False):
        if late:
            assert go.wait(LONG)
            raise OSError("the disk is full")
        return {"items": Room(rows_of([5.0]), None)}

    for step in (1, 2, 3):
        home.send(step, {"items": np.array([step], np.uint64)}, read)
    home.flush()
    home.send(4, {"items": np.array([4], np.uint64)}, lambda: read(late=True))
    home.wait_for_room()
    go.set()
    with pytest.raises(RuntimeError, match="at step 4: OSError: the disk is full"):
        home.flush()
    home.send(5, {"items": np.array([5], np.uint64)}, read)
    with pytest.raises(RuntimeError, match="at step 4: OSError: the disk is full"):
        home.wait_for_room()


def test_a_row_that_cannot_be_read_is_reported_until_all_is_forgotten():
    home = homes()

    def read():
        raise OSError("the device is gone")

    home.send(3, {"items": np.array([7], np.uint64)}, read)
    for call in (home.flush, home.check, lambda: home.visit("items", np.array([7], np.uint64))):
        with pytest.raises(RuntimeError, match="at step 3: OSError: the device is gone"):
            call()
    before = vars(home).copy()
    home.wait()  # it raises nothing
    vars(home).update(home.contents_of({}))
    home.check()
    vars(home).update(before)
    with pytest.raises(RuntimeError, match="at step 3"):
        home.check()
