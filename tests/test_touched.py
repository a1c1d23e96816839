"""Touched rows agree with a plain model of the batches, in any order; a gap is an error."""

import dataclasses
import functools
import threading

import hypothesis
import jax
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.touched import TouchedRows, Version

BATCH = 8
SIZES = {"films": 19, "users": 7, "days": 5, "fixed": 6, "lone": 3}


@functools.cache
def engine(devices=8, placement="mod"):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    return EmbeddingEngine(features(placement), o.Adagrad(0.1), mesh=mesh)


def engine_on_two_axes(shard_axes, batch_axes, placement):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("p", "d"))
    split = features(placement, shard_axes=shard_axes)
    return EmbeddingEngine(split, o.Adagrad(0.1), mesh=mesh, batch_axes=batch_axes)


def features(placement, **options):
    films = TableConfig(SIZES["films"], 4, name="films", placement=placement, **options)
    users = TableConfig(SIZES["users"], 4, name="users", placement=placement, **options)
    days = TableConfig(SIZES["days"], 2, name="days", optimizer=o.Adam(0.1, lazy_adam=False))
    fixed = TableConfig(SIZES["fixed"], 4, name="fixed", trainable=False)
    lone = TableConfig(SIZES["lone"], 3, name="lone", optimizer=optax.adam(0.1), **options)
    return {
        "film": FeatureConfig(films, on_bad_id="drop"),
        "seen": FeatureConfig(films, max_sequence_length=2, on_bad_id="clip"),
        "tags": FeatureConfig(users, on_bad_id="clip"),
        "user": FeatureConfig(users),
        "day": FeatureConfig(days),
        "fixed": FeatureConfig(fixed),
        "lone": FeatureConfig(lone, output_shape=(BATCH,)),
    }


def draw(seed):
    """Return a batch, and what a reader of the rules says that it touches."""
    rng = np.random.default_rng(seed)
    film = rng.integers(-3, SIZES["films"] + 3, (BATCH, 3))
    seen = [rng.integers(0, SIZES["films"] + 3, rng.integers(0, 4)).tolist() for _ in range(BATCH)]
    tags = [rng.integers(0, SIZES["users"] + 3, rng.integers(0, 3)).tolist() for _ in range(BATCH)]
    batch = {
        "film": film,
        "seen": RaggedIds.from_lists(seen),
        "tags": SparseIds.from_lists(tags, weights=[[0.0] * len(bag) for bag in tags]),
        "user": rng.integers(-1, SIZES["users"], BATCH),
        "day": rng.integers(0, SIZES["days"], (BATCH, 1)),
        "fixed": rng.integers(0, SIZES["fixed"], BATCH),
        "lone": rng.integers(-1, SIZES["lone"], (BATCH, 2)),
    }
    kept = {i for bag in seen for i in bag[:2]}
    touched = {
        "films": {i for i in film.flat if 0 <= i < SIZES["films"]} | {min(i, 18) for i in kept},
        "users": {min(i, 6) for bag in tags for i in bag} | {i for i in batch["user"] if i >= 0},
        "days": set(range(SIZES["days"])),
        "fixed": set(),
        "lone": {i for i in batch["lone"].flat if i >= 0},
    }
    return batch, {name: {int(i) for i in ids} for name, ids in touched.items()}


def as_lists(found):
    return {name: ids.tolist() for name, ids in found.items()}


class Model:
    """The same in sets."""

    def __init__(self):
        self.by_step = []

    def since(self, step):
        later = [touched for at, touched in self.by_step if at > step]
        return {name: sorted(set().union(*(t[name] for t in later))) for name in SIZES}


AXES = [("p",), ("d",), ("p", "d")]


@pytest.mark.parametrize("placement", ["mod", "div", "replicated"])
@pytest.mark.parametrize("batch_axes", AXES, ids=str)
@pytest.mark.parametrize("shard_axes", AXES, ids=str)
@pytest.mark.quick(4)
def test_placed_batches_on_two_axes_touch_the_same_rows(shard_axes, batch_axes, placement):
    """Nothing is compiled: the rows are read from the routes that the host has sent."""
    chosen = engine_on_two_axes(shard_axes, batch_axes, placement)
    touched, model = TouchedRows(chosen), Model()
    for step in (1, 2):
        batch, rows = draw(step)
        touched.record(chosen.place(batch), step)
        model.by_step.append((step, rows))
    assert as_lists(touched.since(0)) == model.since(0)
    assert as_lists(touched.since(1)) == model.since(1)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_since_is_the_union_of_later_batches_in_any_order(data):
    first, steps = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    placement = data.draw(st.sampled_from(["mod", "div", "replicated"]))
    chosen = engine(data.draw(st.sampled_from([1, 2, 8])), placement)
    touched, model = TouchedRows(chosen, step=first), Model()
    for step in data.draw(st.permutations(range(first + 1, first + steps + 1))):
        batch, rows = draw(step)
        if data.draw(st.booleans()):
            batch = chosen.place(batch)
        touched.record(batch, step)
        model.by_step.append((step, rows))
    for step in range(first, first + steps + 1):
        assert as_lists(touched.since(step)) == model.since(step)
    everything = model.since(first)
    assert touched.never() == {name: n - len(everything[name]) for name, n in SIZES.items()}


def test_rows_that_are_set_count_as_of_the_next_update():
    touched = TouchedRows(engine(), step=3)
    touched.record_rows("films", [4, 2], 5)
    touched.record_rows("fixed", np.array([1]), 5)
    touched.record_rows("lone", None, 5)
    found = {"films": [2, 4], "users": [], "days": [], "fixed": [1], "lone": [0, 1, 2]}
    assert as_lists(touched.since(5)) == found
    assert all(not ids.size for ids in touched.since(6).values())


def test_a_version_counts_the_edits():
    touched = TouchedRows(engine())
    assert touched.version(state_at(0))[1:] == (0, 0, 0)
    touched.record_rows("films", [4], 0)
    touched.record_rows("lone", None, 0)
    with pytest.raises(ValueError, match="got row 5"):
        touched.record_rows("days", [5], 0)
    assert touched.version(state_at(0))[1:] == (0, 2, 0)


def test_threads_record_at_the_same_time():
    touched = TouchedRows(engine())
    threads = [
        threading.Thread(target=touched.record, args=(draw(step)[0], step)) for step in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model = Model()
    model.by_step = [(step, draw(step)[1]) for step in range(1, 9)]
    assert all(as_lists(touched.since(step)) == model.since(step) for step in range(9))


@functools.cache
def first_state():
    return engine().init(jax.random.key(0))


def state_at(step):
    return dataclasses.replace(first_state(), step=jax.numpy.int32(step))


def test_a_version_has_all_its_updates():
    touched = TouchedRows(engine(), step=2)
    for step in (3, 4, 6):
        touched.record(draw(step)[0], step)
    assert isinstance(touched.version(state_at(4)), Version)
    assert touched.version(state_at(2)).step == 2
    assert touched.version(state_at(2)).run != TouchedRows(engine()).version(state_at(0)).run
    for step, missing in [(6, 5), (5, 5)]:
        with pytest.raises(ValueError, match=rf"to {step} recorded, got none for step {missing}; "):
            touched.version(state_at(step))
    text = r"expected a state of step 2 or later, got 1; make another TouchedRows with step=1, and"
    with pytest.raises(ValueError, match=text):
        touched.version(state_at(1))
    touched.record(draw(5)[0], 5)
    touched.record(draw(6)[0], 6)  # an update that was left out, and another in its place
    assert touched.version(state_at(6)).step == 6


REFUSED = {
    "before the first step": (lambda t: t.since(1), "expected a step from 2 on, where recording"),
    "a step of nothing": (lambda t: t.record(draw(0)[0], 2), "step: expected an integer >= 3"),
    "a state taken back": (
        lambda t: t.record(draw(0)[0], 3),
        "expected a step from 4 on, got 3; after a return to an earlier state, make another",
    ),
    "a bad id": (
        lambda t: t.record(draw(0)[0] | {"user": np.full(BATCH, 7)}, 5),
        r"feature 'user': expected ids in \[0, 7\) of table 'users', got id 7",
    ),
    "another engine's batch": (
        lambda t: t.record(engine(2).place(draw(0)[0]), 5),
        "expected a Batch of this engine's place",
    ),
    "a step too late": (lambda t: t.record(draw(0)[0], 2**31), "step: expected at most 2147483646"),
    "an unknown table": (lambda t: t.record_rows("none", [0], 5), "table: expected one of"),
    "a row outside": (lambda t: t.record_rows("days", [5], 5), r"rows in \[0, 5\), got row 5"),
    "rows that are none": (lambda t: t.record_rows("days", [0.5], 5), "expected integers"),
    "rows set before": (lambda t: t.record_rows("days", [0], 1), "an integer >= 2, got 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_changes_nothing(case):
    touched = TouchedRows(engine(), step=2)
    for step in (3, 4):
        touched.record(draw(step)[0], step)
    before = as_lists(touched.since(2))
    call, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        call(touched)
    assert as_lists(touched.since(2)) == before
    assert touched.version(state_at(4)).step == 4


def test_a_batch_inside_a_jit_is_refused():
    touched = TouchedRows(engine())
    with pytest.raises(ValueError, match="expected a Batch, got a tracer; record outside"):
        jax.jit(lambda batch: touched.record(batch, 1))(engine().place(draw(0)[0]))
