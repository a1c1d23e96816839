"""`_changes.py`: a wait ends, whoever makes the change, and whenever."""

import threading

import pytest

from tpu_embed._changes import Changes

LONG = 60


def test_a_change_in_the_middle_of_the_wait_is_seen():
    """As a finalizer makes it that runs after the look at the condition, in the same thread."""
    changes, looks = Changes(), []

    def looked():
        before = bool(looks)
        looks.append(1)
        with changes.lock:
            changes.notify_all()
        return before

    def wait():
        changes.wait_for(looked)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()
    assert len(looks) == 2


def test_each_waiter_gets_its_turn():
    changes, order = Changes(), []

    def wait(number):
        changes.wait_for(lambda: len(order) == number)
        with changes.lock:
            order.append(number)
            changes.notify_all()

    threads = [threading.Thread(target=wait, args=(n,), daemon=True) for n in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert order == [0, 1]


def test_an_error_of_the_condition_leaves_the_lock_free():
    changes = Changes()

    def broken():
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        changes.wait_for(broken)
    found = []
    thread = threading.Thread(target=lambda: found.append(changes.wait_for(lambda: "it")))
    thread.start()
    thread.join(LONG)
    assert found == ["it"]
