"""Touched rows agree with a plain model of the batches, in any order; a gap is an error."""

import dataclasses
import functools
from concurrent import futures

import hypothesis
import jax
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows, Version

BATCH = 8
SIZES = {"films": 19, "users": 7, "days": 5, "fixed": 6, "lone": 3}


@functools.cache
def engine(devices=8, placement="mod"):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("d",))
    return EmbeddingEngine(features(placement), o.Adagrad(0.1), mesh=mesh)


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


def since(model, step):
    """Return what was touched later than a step, of sets by step."""
    later = [touched for at, touched in model.items() if at > step]
    return {name: sorted(set().union(*(t[name] for t in later))) for name in SIZES}


AXES = [("p",), ("d",), ("p", "d")]


@pytest.mark.parametrize("placement", ["mod", "div", "replicated"])
@pytest.mark.parametrize("batch_axes", AXES, ids=str)
@pytest.mark.parametrize("shard_axes", AXES, ids=str)
@pytest.mark.quick(4)
def test_placed_batches_on_two_axes_touch_the_same_rows(shard_axes, batch_axes, placement):
    """Nothing is compiled: the rows are read from the routes that the host has sent."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("p", "d"))
    split = features(placement, shard_axes=shard_axes)
    chosen = EmbeddingEngine(split, o.Adagrad(0.1), mesh=mesh, batch_axes=batch_axes)
    touched, model = TouchedRows(chosen), {}
    for step in (1, 2):
        batch, model[step] = draw(step)
        touched.record(chosen.place(batch), step)
    for step in (0, 1):
        assert as_lists(touched.since(step)) == since(model, step)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_since_is_the_union_of_later_batches_in_any_order(data):
    first, steps = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    placement = data.draw(st.sampled_from(["mod", "div", "replicated"]))
    chosen = engine(data.draw(st.sampled_from([1, 2, 8])), placement)
    touched, model = TouchedRows(chosen, step=first), {}
    for step in data.draw(st.permutations(range(first + 1, first + steps + 1))):
        batch, model[step] = draw(step)
        touched.record(chosen.place(batch) if data.draw(st.booleans()) else batch, step)
    for step in range(first, first + steps + 1):
        assert as_lists(touched.since(step)) == since(model, step)
    everything = since(model, first)
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
    assert touched.version(state_at(0))[1:] == (0, 2, 0)


def test_threads_record_at_the_same_time():
    touched = TouchedRows(engine())
    batches = [draw(step)[0] for step in range(1, 9)]
    with futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(touched.record, batches, range(1, 9)))
    model = {step: draw(step)[1] for step in range(1, 9)}
    assert all(as_lists(touched.since(step)) == since(model, step) for step in range(9))


first_state = functools.cache(lambda: engine().init(jax.random.key(0)))


def state_at(step):
    return dataclasses.replace(first_state(), step=jax.numpy.int32(step))


def test_a_version_has_all_its_updates():
    touched = TouchedRows(engine(), step=2)
    for step in (3, 4, 6):
        touched.record(draw(step)[0], step)
    assert isinstance(touched.version(state_at(4)), Version)
    assert touched.version(state_at(2)).step == 2
    assert touched.version(state_at(2)).run != TouchedRows(engine()).version(state_at(0)).run
    earlier = "a state of step 2 or later, got 1; make another TouchedRows with step=1, and"
    for step, text in ((6, "to 6 recorded, got none for step 5; "), (5, "to 5 rec"), (1, earlier)):
        with pytest.raises(ValueError, match=text):
            touched.version(state_at(step))
    touched.record(draw(5)[0], 5)
    touched.record(draw(6)[0], 6)  # an update that was left out, and another in its place
    assert touched.version(state_at(6)).step == 6


ROWS = draw(0)[0]
REFUSED = [
    (lambda t: t.since(1), "expected a step from 2 on, where recording"),
    (lambda t: t.record(ROWS, 2), "step: expected an integer >= 3"),
    (lambda t: t.record(ROWS, 3), "a step from 4 on, got 3; after a return to an earlier state"),
    (lambda t: t.record(ROWS | {"user": np.full(BATCH, 7)}, 5), r"'user': .* 'users', got id 7"),
    (lambda t: t.record(engine(2).place(ROWS), 5), "expected a Batch of this engine's place"),
    (lambda t: t.record_rows("none", [0], 5), "table: expected one of"),
    (lambda t: t.record_rows("days", [5], 5), r"rows in \[0, 5\), got row 5"),
    (lambda t: t.record_rows("days", [0], 1), "an integer >= 2, got 1"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_cannot_be_recorded_changes_nothing(call, text):
    touched = TouchedRows(engine(), step=2)
    for step in (3, 4):
        touched.record(draw(step)[0], step)
    before = as_lists(touched.since(2))
    with pytest.raises(ValueError, match=text):
        call(touched)
    assert as_lists(touched.since(2)) == before
    assert touched.version(state_at(4)).step == 4


def test_a_batch_inside_a_jit_is_refused():
    touched = TouchedRows(engine())
    with pytest.raises(ValueError, match="expected a Batch, got a tracer; record outside"):
        jax.jit(lambda batch: touched.record(batch, 1))(engine().place(draw(0)[0]))
