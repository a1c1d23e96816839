"""The queue by itself: which lookup is issued when, and what an exception leaves."""

from typing import Any

import pytest

from tpu_embed.enqueue import BatchQueue, Enqueued


class Lookups:
    """A lookup that records its calls, and fails when told to."""

    def __init__(self):
        self.issued: list[Any] = []
        self.fails = False

    def __call__(self, batch):
        if self.fails:
            raise ZeroDivisionError
        self.issued.append(batch)
        return f"activations of {batch}"


def _queue(*, ahead, waiting=0):
    lookups = Lookups()
    queue = BatchQueue(lookups, ahead=ahead)
    for number in range(waiting):
        queue.push(_item(number))
    return queue, lookups


def _item(number) -> Any:
    return Enqueued(number, True, None)


def test_a_lookup_is_issued_when_its_batch_leaves():
    queue, lookups = _queue(ahead=False, waiting=3)
    assert (len(queue), lookups.issued) == (3, [])
    for number in range(3):
        assert queue.pop().activations == f"activations of {number}"
        assert lookups.issued == list(range(number + 1))
    assert len(queue) == 0


def test_ahead_it_is_issued_when_its_batch_is_the_head():
    queue, lookups = _queue(ahead=True, waiting=3)
    assert lookups.issued == [0]
    assert queue.pop().batch == 0
    assert lookups.issued == [0, 1]
    queue.pop()
    queue.pop()
    queue.push(_item(3))
    assert lookups.issued == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [False, True])
def test_only_the_head_that_was_issued_is_issued_again(ahead):
    queue, lookups = _queue(ahead=ahead, waiting=3)
    queue.issue_again()
    assert lookups.issued == ([0, 0] if ahead else [])
    assert [queue.pop().batch for _ in range(3)] == [0, 1, 2]


def test_issuing_again_without_batches():
    queue, lookups = _queue(ahead=True)
    queue.issue_again()
    assert lookups.issued == []


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_lookup_leaves_the_queue(ahead):
    queue, lookups = _queue(ahead=ahead, waiting=2)
    lookups.fails = True
    with pytest.raises(ZeroDivisionError):
        queue.pop()
    assert len(queue) == 2
    lookups.fails = False
    assert [queue.pop().batch, queue.pop().batch] == [0, 1]


def test_a_failed_lookup_of_a_new_head_leaves_it_out():
    queue, lookups = _queue(ahead=True)
    lookups.fails = True
    with pytest.raises(ZeroDivisionError):
        queue.push(_item(0))
    assert len(queue) == 0
