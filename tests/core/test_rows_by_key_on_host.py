"""Rows by key of tables on the host: on the devices, at home, and on their way there.

That they are those of the same table on the devices is in `test_host_tables.py`.
"""

import threading

import numpy as np
import pytest
from living_cases import ids, on_host, train_once

from tpu_embed.storage import HostRows


@pytest.mark.parametrize("at_home", [False, True])
def test_an_evaluation_batch_does_not_show_a_key_that_has_lost_its_row(at_home):
    made, state = on_host(capacity=3 if at_home else 2)
    state = train_once(made, state, 1, 2)
    if at_home:
        state = train_once(made, state, 3, 3)
    gone = made.vocabularies.find("t", [1])
    looked, kept = (made.place(ids(*keys), training=False) for keys in ((1, 2), (2, 2)))
    state = made.set_rows(state, "t", keys=[9], values=np.ones((1, 2)))  # takes the row of key 1
    assert made.vocabularies.find("t", [1, 9]).tolist() == [-1, gone[0]]
    with pytest.raises(ValueError, match="place it again"):
        made.lookup(state, looked)
    if not at_home:  # else the row of key 2 may have been written since
        found = made.lookup(state, kept)["x"][0]
        np.testing.assert_array_equal(found, made.rows(state, "t", keys=[2])[0])
    found = made.lookup(state, made.place(ids(9, 2), training=False))["x"]
    np.testing.assert_array_equal(found[0], [1, 1])


def test_a_row_on_its_way_home_does_not_come_after_the_one_that_is_set(monkeypatch):
    made, state = on_host(capacity=4)
    state = made.set_rows(state, "t", keys=[7, 8], values=np.ones((2, 2)))  # compiles what it needs
    state = train_once(made, state, 1, 2)
    made.storage.flush()
    here, go, write = threading.current_thread(), threading.Event(), HostRows.write

    def late(*args):
        if threading.current_thread() is not here:
            assert go.wait(60)
        write(*args)

    monkeypatch.setattr(HostRows, "write", late)
    state = train_once(made, state, 3, 4)  # sends 1 and 2 home; 7 and 8 are forgotten
    later = threading.Timer(0.5, go.set)
    later.start()
    state = made.set_rows(state, "t", keys=[9, 10], values=np.ones((2, 2)))  # in place of 1 and 2
    later.join()
    made.storage.flush()
    assert made.vocabularies.last["t"].evicted.tolist() == [1, 2]
    np.testing.assert_array_equal(made.rows(state, "t", keys=[9, 10]), np.ones((2, 2)))


def test_a_full_disk_undoes_the_step(monkeypatch):
    made, state = on_host(capacity=2)
    state = train_once(made, state, 1, 2)
    before = made.rows(state, "t", keys=[1, 2])
    placed = made.vocabularies.placed

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(HostRows, "write", full)
        with pytest.raises(OSError, match="No space"):
            made.set_rows(state, "t", keys=[2, 7], values=np.ones((2, 2)))
    assert made.vocabularies.placed == made.vocabularies.admitted == placed
    np.testing.assert_array_equal(made.rows(state, "t", keys=[1, 2]), before)
    state = made.set_rows(state, "t", keys=[2, 7], values=np.ones((2, 2)))
    assert made.vocabularies.last["t"].evicted.tolist() == [1]
