"""`Prefetcher.get_state`: what was taken, as JSON, and the same batches and rooms after it."""

import itertools
import json
import time

import jax
import numpy as np
import pytest
from data_cases import SIZE, batch, engine, source, wait_for
from facade_cases import mesh
from interrupt_cases import Interrupt, from_a_signal

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.core.place import rooms
from tpu_embed.data import Prefetcher
from tpu_embed.io import CheckpointManager
from tpu_embed.optimizers import SGD


class Counter:
    """A source that changes the state which it has returned."""

    def __init__(self):
        self.state = {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        self.state["next"] += 1
        return batch(self.state["next"]), self.state["next"]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Bytes(Counter):
    """Its state is bytes."""

    def get_state(self):
        return bytes([self.state["next"], 255])

    def set_state(self, state):
        self.state = {"next": state[0]}


@pytest.mark.parametrize("make", [lambda: source(9), lambda: list(source(9)), Counter, Bytes])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_position_goes_through_json(make, taken):
    with Prefetcher(engine(), make(), depth=3) as batches:
        for _ in range(taken):
            next(batches)
        time.sleep(0.02)  # more is placed ahead
        position = json.loads(json.dumps(batches.get_state()))
        expected = [number for _, number in itertools.islice(batches, 3)]
    resumed = Prefetcher(engine(), make())
    resumed.set_state(position)
    assert resumed.get_state() == position
    assert [number for _, number in itertools.islice(resumed, 3)] == expected
    assert resumed.get_state()["batches"] == taken + 3


NO_POSITION = r"set_state: expected a position, got .*; give what"
NO_STATE = r"expected a source's state, got .*; give what"
COUNTED = {"batches": 1, "sources": [{"json": 1}]}
REFUSED = [
    *((False, position, NO_POSITION) for position in (None, {}, {"batches": -1}, [3])),
    (False, {"batches": True}, NO_POSITION),
    (False, COUNTED, "expected a source with get_state and set_state"),
    (True, {"batches": 1}, "expected one state per process, 1 in all, got no states"),
    (True, COUNTED | {"sources": [{"json": 1}] * 2}, "got 2 states; continue with as many proc"),
    *((True, COUNTED | {"sources": [one]}, NO_STATE) for one in (None, 3, {}, {"bytes": "!"})),
    (True, COUNTED | {"sources": [{"bytes": 3}]}, NO_STATE),
    (True, COUNTED | {"sources": [{"bytes": "e30=", "json": 1}]}, NO_STATE),
]


def test_positions_that_are_refused():
    plain, counter = Prefetcher(engine(), source(3)), Prefetcher(engine(), Counter())
    for counts, position, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            (counter if counts else plain).set_state(position)
    plain.set_state({"batches": 4})
    with pytest.raises(ValueError, match="expected 4 batches before the next one, got 3"):
        next(plain)
    next(counter)
    with pytest.raises(RuntimeError, match="expected a call before the first batch"):
        counter.set_state(counter.get_state())


def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(tmp_path):
    def learn(state, batches, steps):
        for placed, number in itertools.islice(batches, steps):
            gradients = {"x": np.full((SIZE, 2), number + 1, np.float32)}
            state = engine().update(state, placed, gradients)
        return state

    initial = engine().init(jax.random.key(0))
    whole = learn(initial, Prefetcher(engine(), source(9)), 9)
    with CheckpointManager(tmp_path, engine()) as manager:
        batches = Prefetcher(engine(), source(9), depth=3)
        manager.save(4, learn(initial, batches, 4), position=batches.get_state())
    with CheckpointManager(tmp_path, engine()) as manager:
        found = manager.restore()
    resumed = Prefetcher(engine(), source(9))
    resumed.set_state(found.position)
    jax.tree.map(np.testing.assert_array_equal, learn(found.state, resumed, 9), whole)


def test_no_more_is_placed_ahead_after_a_position():
    """Not as many batches as were taken before it."""
    read = []

    def counted():
        for number in range(1_000):
            read.append(number)
            yield batch(number)

    with Prefetcher(engine(), counted(), depth=3) as batches:
        batches.set_state({"batches": 50})
        next(batches)
        wait_for(lambda: len(read) >= 54)
        time.sleep(0.1)  # the thread has time for more
        assert len(read) == 50 + 1 + 3


def of_the_prefetcher(code):
    return code.co_filename.endswith("prefetcher.py")


@pytest.mark.parametrize("first", [False, True])
def test_no_batch_comes_twice_or_is_lost_after_an_interrupt(first):
    """Whichever line it hits, also of the first call, the position says what the loop took last."""
    hit, numbered = 0, [(batch(number), number) for number in range(1, 5)]
    for at in range(1, 300):
        with Prefetcher(engine(), numbered) as batches:
            given = [0 if first else next(batches)[1]]
            with Interrupt(of_the_prefetcher, at, from_a_signal, only_signals=True) as interrupt:
                given.append(next(batches)[1])
            hit += interrupt.seen >= at
            taken = batches.get_state()["batches"]
            assert [number for _, number in batches] == list(range(taken + 1, 5))
            assert given[-1] <= taken
        if interrupt.seen < at:
            break
    assert 10 < hit < 299, "all places of a call were reached"


V = 60


def engine_of(devices, **more):
    features = {"seen": FeatureConfig(TableConfig(V, 2, name="items"), jagged=True), **more}
    return EmbeddingEngine(features, SGD(0.1), mesh=mesh(devices))


def draw(seed, count):
    """Return batches of 8 histories, now long, now short."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        most = int(rng.choice([2, 40, 3, 900], p=[0.5, 0.2, 0.25, 0.05]))
        lengths = rng.integers(0, most + 1, 8)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        found.append({"seen": RaggedIds(rng.integers(0, V, splits[-1]), splits)})
    return found


@pytest.mark.parametrize("seed", range(6))
def test_shapes_are_those_of_an_unbroken_run(monkeypatch, seed):
    """Rooms grow in the middle of what is left."""
    monkeypatch.setattr(rooms, "SMALL", 16)
    rng, data = np.random.default_rng([seed, 1]), draw(seed, 30)
    unbroken, positions = [], []
    with Prefetcher(engine_of(1), data) as batches:
        for batch in batches:
            unbroken.append(batch.spec)
            positions.append(batches.get_state())
    assert len(set(unbroken)) > 1
    for stop in rng.choice(29, 3, replace=False):
        resumed = Prefetcher(engine_of(1), data, depth=int(rng.integers(1, 5)))
        resumed.set_state(json.loads(json.dumps(positions[stop])))
        assert resumed.get_state() == positions[stop]
        with resumed:
            assert [batch.spec for batch in resumed] == unbroken[stop + 1 :]
            assert resumed.get_state() == positions[-1]


def test_other_devices_and_features_choose_anew():
    with Prefetcher(engine_of(1), draw(0, 3)) as batches:
        list(batches)
        position = batches.get_state()
    more = FeatureConfig(TableConfig(V, 4, name="others"))
    for made, data in (
        (engine_of(8), draw(0, 4)),
        (engine_of(1, user=more), [one | {"user": np.arange(8)} for one in draw(0, 4)]),
    ):
        own = [made.place(one).spec for one in data][-1]
        with Prefetcher(made, data) as resumed:
            resumed.set_state(position)
            assert next(resumed).spec == own


def test_shapes_of_something_else_are_refused():
    batches = Prefetcher(engine_of(1), draw(0, 2))
    assert len(list(batches)) == 2
    position = batches.get_state()
    spec = position["shapes"][0][0]["spec"]
    specs = [
        # Its first batch would ask for terabytes.
        {"feature_shapes": [spec["feature_shapes"][0] | {"capacity": 10**12}]},
        {"replicas": "1"},
        {"routed": "all"},
        {"stacks": [{"features": [0]}]},
    ]
    wrong = [[[position["shapes"][0][0] | {"spec": spec | changed}]] for changed in specs]
    refused = Prefetcher(engine_of(1), draw(0, 2))
    for shapes in (7, [[1]], [[{"uses": 1}]], [[{"spec": {}}]], *wrong):
        with pytest.raises(ValueError, match=r"shapes: expected those of an engine.*get_state"):
            refused.set_state(position | {"shapes": shapes})
    assert refused.get_state() == {"batches": 0}
    refused.set_state(position)
