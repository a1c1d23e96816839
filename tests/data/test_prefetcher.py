"""`Prefetcher`: order, errors, ends, positions; and a thread that never outlives its use."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from data_cases import ROWS, SIZE, batch, engine, number_of, source

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed.data import Prefetcher

LONG = 60
"""Seconds after which a thread that waits has a deadlock."""


def threads():
    return [thread for thread in threading.enumerate() if "prefetch" in thread.name]


def wait_for(condition):
    until = time.monotonic() + LONG
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    assert condition()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    if threads():
        gc.collect()
    wait_for(lambda: not threads())


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_batches_come_in_order(depth):
    with Prefetcher(engine(), source(20), depth) as batches:
        seen = [(number_of(placed), number) for placed, number in batches]
    assert seen == [(number, number) for number in range(20)]


def test_what_surrounds_the_features_is_kept():
    """A plain tuple begins with features; anything else is features."""
    assert [number_of(placed) for placed in Prefetcher(engine(), map(batch, range(3)))] == [0, 1, 2]
    label = object()
    [(placed, first, second)] = Prefetcher(engine(), [(batch(5), label, None)])
    assert (number_of(placed), first, second) == (5, label, None)
    [(placed,)] = Prefetcher(engine(), [(batch(6),)])
    assert number_of(placed) == 6


def test_weights_beside_the_features():
    config = {"x": FeatureConfig(TableConfig(9, 1, combiner="sum", name="t"))}
    weighing = tpu_embed.EmbeddingEngine(config, mesh=engine().layout.axes.mesh)
    ids, weights = {"x": np.ones((4, 2), np.int32)}, {"x": np.full((4, 2), 0.25, np.float32)}
    [(placed, label)] = Prefetcher(weighing, [(ids, weights, "label")], weighted=True)
    expected = weighing.place(ids, weights)
    np.testing.assert_array_equal(placed.packed, expected.packed)
    assert (placed.spec, label) == (expected.spec, "label")
    for item in (ids, (ids,)):
        with pytest.raises(TypeError, match=r"expected a tuple \(features, weights, …\), got "):
            next(Prefetcher(weighing, [item], weighted=True))
    with pytest.raises(TypeError, match=r"expected a tuple \(features, …\), got a tuple of 0"):
        next(Prefetcher(weighing, [()]))


def test_options_of_place():
    [placed] = Prefetcher(engine(), [batch(0)], for_update=False)
    assert placed.spec.routed == "lookup"
    spec = engine().place(batch(0)).spec
    longer = {"x": RaggedIds.from_lists([[1, 2, 3]] * SIZE)}
    with pytest.raises(ValueError, match="feature 0: expected batch 4"):
        next(Prefetcher(engine(), [longer], spec=spec))


@pytest.mark.parametrize("depth", [0, -1, 1.5, True])
def test_a_bad_depth(depth):
    with pytest.raises(ValueError, match="depth: expected an integer >= 1"):
        Prefetcher(engine(), [], depth)


def test_no_iterable():
    with pytest.raises(TypeError, match="batches: expected an iterable, got int"):
        Prefetcher(engine(), 3)


# -- errors and ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("where", ["source", "place"])
def test_errors_come_where_their_batch_would(where, depth):
    def failing():
        yield from source(3)
        if where == "source":
            raise OSError("disk gone")
        yield {"x": np.full(SIZE, ROWS)}, 3

    expected = (OSError, "disk gone") if where == "source" else (ValueError, f"id {ROWS} at")
    batches, seen = Prefetcher(engine(), failing(), depth), []
    with pytest.raises(expected[0], match=expected[1]) as raised:
        seen.extend(number for _, number in batches)
    assert seen == [0, 1, 2]
    assert getattr(raised.value, "__notes__", []) == (
        ["This was batch 4 of the source."] if where == "place" else []
    )
    with pytest.raises(StopIteration):
        next(batches)
    assert not threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_no_exception_is_lost_or_ends_the_data_silently(error, monkeypatch):
    def raising(*_, **__):
        raise error("odd")

    monkeypatch.setattr(engine()._intake, "host_ids", raising)
    with pytest.raises(RuntimeError if error is StopIteration else error):
        next(Prefetcher(engine(), source(3)))


def test_only_so_many_are_placed_ahead():
    read = []

    def watched():
        for item in source(None):
            read.append(item[1])
            yield item

    batches = Prefetcher(engine(), watched(), depth=3)
    assert not threads()  # it begins with the first batch that is taken
    assert not read
    for taken in range(1, 4):
        assert next(batches)[1] == taken - 1
        wait_for(lambda: len(read) == taken + 3)  # noqa: B023
        time.sleep(0.02)
        assert read == list(range(taken + 3))
    batches.close()


def test_a_slow_source_is_waited_for():
    def slow():
        for item in source(4):
            time.sleep(0.05)
            yield item

    assert [number for _, number in Prefetcher(engine(), slow())] == [0, 1, 2, 3]


def test_an_endless_source_is_left():
    with Prefetcher(engine(), source(None)) as batches:
        assert [number for _, number in itertools.islice(batches, 50)] == list(range(50))
    assert not threads()


@pytest.mark.parametrize("how", ["dropped", "closed", "left by break", "left by an exception"])
@pytest.mark.parametrize("wait", [0.0, 0.05])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_thread_ends_with_its_use(how, wait, depth):
    closed = threading.Event()

    def closing():
        try:
            yield from source(None)
        finally:
            closed.set()

    batches = Prefetcher(engine(), closing(), depth)
    if how == "left by an exception":
        with pytest.raises(OSError, match="mine"), batches:  # noqa: PT012
            next(batches)
            raise OSError("mine")
    elif how == "left by break":
        for _ in batches:
            time.sleep(wait)
            break
    else:
        next(batches)
        time.sleep(wait)
    if how == "closed":
        batches.close()
        assert not threads()
        batches.close()
    del batches
    wait_for(lambda: not threads())
    assert closed.is_set()  # a generator that only the prefetcher held


def test_dropped_in_a_cycle():
    """The garbage collector may find a prefetcher in any thread, at any moment."""

    class Loop:
        pass

    for _ in range(20):
        loop = Loop()
        loop.me, loop.batches = loop, Prefetcher(engine(), source(None))
        next(loop.batches)
        del loop
    gc.collect()
    wait_for(lambda: not threads())


def test_close_wakes_a_loop_in_another_thread():
    never, seen = threading.Event(), []

    def stuck():
        yield from source(1)
        assert never.wait(LONG)

    batches = Prefetcher(engine(), stuck())
    loop = threading.Thread(target=lambda: seen.extend(n for _, n in batches), daemon=True)
    loop.start()
    wait_for(lambda: len(seen) == 1)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    loop.join(LONG)
    assert not loop.is_alive()
    assert closing.is_alive()  # it waits for the source
    never.set()
    closing.join(LONG)
    assert seen == [0]


def test_ctrl_c_in_a_loop_that_waits():
    """The interrupt comes at once, and the loop can go on with the next batch."""
    begun, more = threading.Event(), threading.Event()

    def slow():
        yield from source(1)
        begun.set()
        assert more.wait(LONG)
        yield batch(1), 1

    batches, seen = Prefetcher(engine(), slow()), []

    def interrupt():
        assert begun.wait(LONG)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        seen.extend(number for _, number in batches)
    assert batches.get_state() == {"batches": 1}
    more.set()
    seen.extend(number for _, number in batches)
    assert seen == [1] or seen == [0, 1]


SCRIPT = """
import itertools, sys, threading, time
import numpy as np
import tpu_embed
from tpu_embed.data import Prefetcher

config = {"x": tpu_embed.FeatureConfig(tpu_embed.TableConfig(9, 2))}
engine = tpu_embed.EmbeddingEngine(config)

def source():
    yield {"x": np.zeros(8, np.int32)}
    if sys.argv[1] == "busy":
        while True:
            yield {"x": np.zeros(8, np.int32)}
    threading.Event().wait()

batches = Prefetcher(engine, source(), depth=50)
next(batches)
if len(sys.argv) > 2:
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("arguments", [["busy"], ["stuck"], ["busy", "interrupted"]])
def test_the_program_ends(arguments):
    """With a thread that works, and with one that its source keeps for ever."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", SCRIPT, *arguments]
    ended = subprocess.run(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=LONG
    )
    status = -signal.SIGINT if len(arguments) > 1 else 0
    assert ended.returncode == status, ended.stderr
    assert ("KeyboardInterrupt" in ended.stderr) == bool(status)
    assert "Fatal" not in ended.stderr


# -- loops -----------------------------------------------------------------------------------------


def test_a_loop_goes_on_where_the_last_one_stopped():
    batches = Prefetcher(engine(), source(7))
    assert next(batches)[1] == 0
    assert [number for _, number in itertools.islice(batches, 2)] == [1, 2]
    for _, number in batches:
        assert number == 3
        break
    assert [number for _, number in batches] == [4, 5, 6]


def test_a_second_loop_beside_the_first_is_refused():
    batches = Prefetcher(engine(), source(7))
    for _, number in batches:
        assert number == 0
        with pytest.raises(
            RuntimeError, match="expected one loop at a time, got a second iterator"
        ):
            iter(batches)
        break
    with pytest.raises(RuntimeError, match="one loop at a time"):
        zip(batches, batches, strict=True)
    batches.close()


@pytest.mark.parametrize("how", ["to its end", "closed"])
def test_a_pass_is_over_once(how):
    """A second epoch over the same prefetcher would have no batches, silently."""
    batches = Prefetcher(engine(), [batch(0)] * 3)
    if how == "closed":
        batches.close()
    else:
        assert len(list(batches)) == 3
    with pytest.raises(RuntimeError, match="make a new Prefetcher for each pass over the data"):
        iter(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_several_threads_share_the_batches():
    batches, seen = Prefetcher(engine(), source(60)), []

    def take():
        while (item := next(batches, None)) is not None:
            seen.append(item[1])

    loops = [threading.Thread(target=take) for _ in range(4)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(LONG)
    assert sorted(seen) == list(range(60))


def test_two_prefetchers_of_one_engine():
    pairs = zip(Prefetcher(engine(), source(9)), Prefetcher(engine(), source(9)), strict=True)
    assert all(first[1] == second[1] for first, second in pairs)


class Instant:
    """Stands for an engine whose `place` takes no time: its batches are numpy arrays."""

    def next_turn(self):
        return self

    def place(self, features, *_, **__):
        return features["x"].copy()

    def end(self):
        pass


@pytest.mark.parametrize(("make", "steps"), [(Instant, 2_500), (engine, 200)])
def test_many_steps_keep_no_memory(make, steps):
    """A leak would leave an object per step, in each part of the run. Caches fill up in the first.

    With an instant `place`, these are 10,000 steps after the first part.
    """
    items, counts = [(batch(number), number) for number in range(4)], []
    with Prefetcher(make(), itertools.cycle(items)) as batches:
        for _ in range(5):
            for _ in itertools.islice(batches, steps):
                pass
            gc.collect()
            counts.append((sys.getallocatedblocks(), len(jax.live_arrays())))
    blocks, arrays = zip(*counts, strict=True)
    assert min(np.diff(blocks)) < steps / 10
    assert arrays[-1] - arrays[0] <= 3  # as many as may wait
