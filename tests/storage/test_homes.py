"""`Homes`: a row on its way home is waited for, and one that is lost is reported.

Random departures and returns are in `core/test_host_tables.py`, beside tables on the devices.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tpu_embed import HostStorage
from tpu_embed.storage import VALUES, Homes, HomeTable, Room, RowField, RowGroups

GROUPS = RowGroups(8, (0,), False, 1, frozenset([0]), frozenset([0]))
FIELDS = {VALUES: RowField((2,), np.dtype(np.float32))}
ROOM = {"items": Room({VALUES: np.float32([[5, -5]])}, None)}
LONG = 60


def homes():
    return Homes({"items": HomeTable(HostStorage(device_rows=8), FIELDS, GROUPS)})


def keys(*numbers):
    return np.array(numbers, np.uint64)


def test_only_a_row_that_has_not_arrived_is_waited_for():
    home, go = homes(), threading.Event()

    def read():
        assert go.wait(LONG)
        return ROOM

    home.send(1, {"items": keys(7)}, read)
    assert not home["items"].ids().size
    assert home.ids("items").tolist() == [7]
    other, same = (home.fetch("items", keys(key), []) for key in (8, 7))
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

    def read_late():
        assert go.wait(LONG)
        raise OSError("the disk is full")

    for step in (1, 2, 3):
        home.send(step, {"items": keys(step)}, lambda: ROOM)
    home.flush()
    home.send(4, {"items": keys(4)}, read_late)
    home.wait_for_room()
    go.set()
    with pytest.raises(RuntimeError, match="at step 4: OSError: the disk is full"):
        home.flush()
    home.send(5, {"items": keys(5)}, lambda: ROOM)
    with pytest.raises(RuntimeError, match="at step 4: OSError: the disk is full"):
        home.wait_for_room()


def test_a_row_that_cannot_be_read_is_reported_until_all_is_forgotten():
    home = homes()

    def read():
        raise OSError("the device is gone")

    home.send(3, {"items": keys(7)}, read)
    for call in (home.flush, home.check, lambda: home.visit("items", keys(7))):
        with pytest.raises(RuntimeError, match="at step 3: OSError: the device is gone"):
            call()
    before = vars(home).copy()
    home.wait()  # it raises nothing
    vars(home).update(home.contents_of({}))
    home.check()
    vars(home).update(before)
    with pytest.raises(RuntimeError, match="at step 3"):
        home.check()
