"""`Prefetcher`: errors, ends, and a thread that never outlives its use."""

import collections
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from data_cases import LONG, ROWS, SIZE, batch, engine, source, threads, wait_for

from tpu_embed import DynamicVocabulary, EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.data import Prefetcher


def failing_source():
    yield from source(3)
    raise OSError("disk gone")


UNPLACED = [*source(3), ({"x": np.full(SIZE, ROWS)}, 3)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("where", ["source", "place"])
def test_errors_come_where_their_batch_would(where, depth):
    given = failing_source() if where == "source" else UNPLACED
    batches, seen = Prefetcher(engine(), given, depth), []
    with pytest.raises((OSError, ValueError), match=f"disk gone|id {ROWS} at") as raised:
        seen.extend(number for _, number in batches)
    assert seen == [0, 1, 2]
    notes = [] if where == "source" else ["This was batch 4 of the source."]
    assert getattr(raised.value, "__notes__", []) == notes
    with pytest.raises(StopIteration):
        next(batches)
    assert not threads()


def test_placed_batches_need_no_prefetcher():
    with pytest.raises(TypeError, match=r"got a Batch, .* a Batch needs no Prefetcher"):
        next(Prefetcher(engine(), Prefetcher(engine(), source(3))))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopIteration])
def test_no_exception_is_lost_or_ends_the_data_silently(error, monkeypatch):
    def raising(*_, **__):
        raise error("odd")

    monkeypatch.setattr("tpu_embed.core.place.intake.host_ids", raising)
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


@pytest.mark.parametrize("how", ["dropped", "closed", "left by an exception"])
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
    with contextlib.suppress(ZeroDivisionError):
        for _ in batches:
            time.sleep(wait)
            if how == "left by an exception":
                with batches:
                    raise ZeroDivisionError
            break
    if how == "closed":
        batches.close()
        assert not threads()
        batches.close()
    del batches
    wait_for(lambda: not threads())
    assert closed.is_set()  # a generator that only the prefetcher held


def test_dropped_in_a_cycle():
    """The garbage collector may find a prefetcher in any thread, at any moment."""

    for _ in range(20):
        loop = types.SimpleNamespace(batches=Prefetcher(engine(), source(None)))
        loop.me = loop
        next(loop.batches)
        del loop

    def ended():
        gc.collect()  # it does nothing while another thread collects
        return not threads()

    wait_for(ended)


def test_close_wakes_a_loop_in_another_thread():
    never, seen = threading.Event(), []

    def stuck():
        yield from source(1)
        assert never.wait(LONG)

    batches = Prefetcher(engine(), stuck())
    with ThreadPoolExecutor() as pool:
        loop = pool.submit(lambda: seen.extend(n for _, n in batches))
        wait_for(lambda: len(seen) == 1)
        closing = pool.submit(batches.close)
        loop.result(LONG)
        assert not closing.done()  # it waits for the source
        never.set()
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
import itertools, sys, threading
import numpy as np
import tpu_embed
from tpu_embed.data import Prefetcher

config = {"x": tpu_embed.FeatureConfig(tpu_embed.TableConfig(9, 2))}
engine = tpu_embed.EmbeddingEngine(config)

def source():
    batch = {"x": np.zeros(8, np.int32)}
    yield from [batch] if sys.argv[1] == "stuck" else itertools.repeat(batch)
    threading.Event().wait()

batches = Prefetcher(engine, source(), depth=50)
next(batches)
if len(sys.argv) > 2:
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("arguments", [["busy"], ["stuck"], ["busy", "interrupted"]])
@pytest.mark.quick(1)
def test_the_program_ends(arguments):
    """With a thread that works, and with one that its source keeps for ever."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": LONG}
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], **options)
    status = -signal.SIGINT if len(arguments) > 1 else 0
    assert ended.returncode == status, ended.stderr
    assert ("KeyboardInterrupt" in ended.stderr) == bool(status)
    assert "Fatal" not in ended.stderr


def test_many_steps_keep_no_memory():
    """A leak leaves an object per step, in each part of the run; caches fill up ever slower."""
    items, counts, steps = [(batch(number), number) for number in range(4)], [], 200
    with Prefetcher(engine(), itertools.cycle(items)) as batches:
        for _ in range(5):
            collections.deque(itertools.islice(batches, steps), maxlen=0)
            gc.collect()
            counts.append((sys.getallocatedblocks(), len(jax.live_arrays())))
    blocks, arrays = zip(*counts, strict=True)
    assert min(np.diff(blocks)) < steps / 2
    assert arrays[-1] - arrays[0] <= 3  # as many as may wait


KEYS = {"x": np.arange(8)}


def make_living():
    """Return an engine whose keys get rows, its maps, and its first state."""
    table = TableConfig(50, 2, vocabulary=DynamicVocabulary())
    living = EmbeddingEngine({"x": FeatureConfig(table)})
    return living, living.vocabularies, living.init(jax.random.key(0))


@pytest.mark.parametrize("what", ["place", "rewind", "load"])
def test_a_source_that_moves_the_maps_of_its_own_batch(what):
    """It is refused in the loop, and the maps stay as they are."""
    living, maps, state = make_living()
    act = {
        "place": lambda: living.place(KEYS),
        "rewind": lambda: maps.rewind(state),
        "load": lambda: maps.load_state(maps.state()),
    }[what]

    def acting():
        yield KEYS
        living.place(KEYS, training=False)
        act()
        yield KEYS

    batches = Prefetcher(living, acting(), depth=2)
    state, _ = living.admit(state, next(batches))
    with pytest.raises(RuntimeError, match="a source must not place training batches"):
        next(batches)
    living.admit(state, living.place(KEYS))


@pytest.mark.parametrize("end", ["break", "error"])
def test_what_a_thread_reads_is_not_placed_once_its_loop_has_ended(end):
    (living, maps, state), more, read = make_living(), threading.Event(), threading.Event()

    def slow():
        yield KEYS
        read.set()
        more.wait(LONG)
        yield {"x": np.arange(8) + 8}

    batches = Prefetcher(living, slow())
    thread = batches._started()
    state, _ = living.admit(state, next(batches))
    assert read.wait(LONG)
    if end == "error":
        with pytest.raises(ZeroDivisionError), batches:
            raise ZeroDivisionError
    del batches
    maps.rewind(state)
    more.set()
    thread.join(LONG)
    assert maps.placed == maps.admitted == 1
    living.admit(state, living.place(KEYS))
