"""Which specs batches get: few of them, no larger than needed for long, alike in all processes."""

import concurrent.futures

import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import BatchSpec, FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.batch import StackSpec
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.place.rooms import Rooms

B, V = 8, 100_000


def make_engine(devices=1):
    feature = FeatureConfig(TableConfig(V, 2, name="film", combiner="sum"))
    return tpu_embed.EmbeddingEngine(feature, o.SGD(0.5), mesh=mesh(devices))


def draw(rng, ids):
    """Return a ragged batch with this many ids in all, about as many in each bag."""
    splits = np.linspace(0, ids, B + 1).astype(np.int64)
    return RaggedIds(rng.integers(0, V, ids).astype(np.int32), splits)


@pytest.mark.parametrize("devices", [1, 8])
def test_after_an_outlier_the_spec_is_what_it_was_before(devices):
    engine, rng = make_engine(devices), np.random.default_rng(0)
    usual = engine.place(draw(rng, 1000)).spec
    outlier = engine.place(draw(rng, 300_000)).spec
    assert outlier.stacks[0].ids > 100 * usual.stacks[0].ids / devices
    for _ in range(3):
        assert engine.place(draw(rng, 900)).spec == usual
        assert engine.place(draw(rng, 290_000)).spec == outlier


def test_an_outlier_that_comes_first_slows_no_other_batch():
    engine, rng = make_engine(), np.random.default_rng(0)
    first = engine.place(draw(rng, 300_000)).spec
    (usual,) = {engine.place(draw(rng, 1000 + step)).spec for step in range(100)}
    assert usual.stacks[0].ids < 1500
    assert engine.place(draw(rng, 300_000)).spec == first
    fresh = make_engine()  # a given spec is not remembered
    assert fresh.place(draw(rng, 1000), spec=first).spec == first
    assert fresh.place(draw(rng, 1000)).spec == usual


def test_it_is_told(caplog):
    engine, rng = make_engine(), np.random.default_rng(0)
    for n in (1000, 1100, 1200, 300_000, 1000, 300_000):
        engine.place(draw(rng, n))
    (record,) = caplog.records
    assert "far from that of earlier batches (1,280)" in record.getMessage()


def test_the_places_of_jagged_features_are_not_counted_twice():
    """What two of them have together does not enlarge a spec that has room for each."""
    features = [FeatureConfig(TableConfig(V, 2), jagged=True)] * 2
    engine = tpu_embed.EmbeddingEngine(features, o.SGD(), mesh=mesh(1))

    def spec_of(*lengths):
        return engine.place([RaggedIds.from_lists([[1] * n, []]) for n in lengths]).spec

    spec_of(900, 100)
    spec = spec_of(100, 900)
    assert spec.stacks[0].ids == 0
    assert spec_of(900, 900) == spec


# -- long streams, without ids ---------------------------------------------------------------------

DEVICES = 8


def make_rooms():
    features = [FeatureConfig(TableConfig(V, 2 + g)) for g in range(3)]
    return Rooms(tpu_embed.EmbeddingEngine(features, o.SGD(), mesh=mesh(DEVICES)).layout)


def settle(rooms, needed):
    """Do what one process does that has no others to agree with."""
    return rooms.accept(rooms.propose(needed))


def needs(rng, scale=1.0, weighted=False):
    """Return what a batch needs of three stacks, about 40,000 ids each times the scales."""
    ids = rng.poisson(40_000 * np.broadcast_to(scale, 3)).tolist()
    stacks = tuple(StackSpec((g,), n, n // 10, n // 8, n) for g, n in enumerate(ids))
    form = FeatureShape(batch=B, inner=(), combines=True, weighted=weighted, width=None)
    return BatchSpec(DEVICES, (form,) * 3, stacks, "update")


def fits(spec, needed):
    return BatchSpec.union(spec, needed) == spec


def test_a_stream_with_rare_outliers_has_few_specs():
    """Outliers differ in size and in the stacks that they are outliers of."""
    rooms, rng, specs, usual = make_rooms(), np.random.default_rng(0), [], 0
    for _ in range(3000):
        rare = rng.random() < 0.01
        scale = 1 + rare * rng.exponential(20, 3) * (rng.random(3) < 0.5)
        needed = needs(rng, scale)
        specs.append(settle(rooms, needed))
        assert fits(specs[-1], needed)
        usual += specs[-1].stacks[0].ids < 2 * 40_000
    assert len(set(specs)) <= 16
    assert len(set(specs[1500:]) - set(specs[:1500])) <= 4
    assert usual > 0.97 * 3000


def test_a_stream_that_changes_for_good_leaves_the_larger_spec():
    rooms, rng = make_rooms(), np.random.default_rng(0)
    large, small, again = (
        [settle(rooms, needs(rng, scale)) for _ in range(200)] for scale in (10, 1, 10)
    )
    assert len(set(small)) == 1
    assert fits(large[-1], small[-1])
    assert not fits(small[-1], large[-1])
    assert set(again) == {large[-1]}


def test_weights_of_usual_batches_leave_the_outliers_alone():
    rooms, rng = make_rooms(), np.random.default_rng(0)
    usual = settle(rooms, needs(rng))
    settle(rooms, needs(rng, 20))
    weighted = settle(rooms, needs(rng, weighted=True))
    assert weighted.stacks[0].ids < 1.2 * usual.stacks[0].ids
    outlier = settle(rooms, needs(rng, 19))
    assert not outlier.feature_shapes[0].weighted


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_see_different_parts_have_the_same_specs(seed):
    """What `Agreement` does: all accept the union of what each proposes."""
    processes, rng = [make_rooms() for _ in range(3)], np.random.default_rng(seed)
    specs = []
    for _ in range(1000):
        scales = 1 + (rng.random((3, 3)) < 0.005) * rng.exponential(20, (3, 3))
        needed = [needs(rng, scale, weighted=rng.random() < 0.001) for scale in scales]
        agreed = BatchSpec.union(*map(Rooms.propose, processes, needed))
        (spec,) = {one.accept(agreed) for one in processes}
        assert all(fits(spec, one) for one in needed)
        specs.append(spec)
    assert len(set(specs)) <= 25


def test_threads_that_place_outliers():
    engine, rng = make_engine(), np.random.default_rng(0)
    batches = [draw(rng, 40_000 if n % 4 == 1 else 1000 + n) for n in range(80)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for batch in threads.map(engine.place, batches):
            batch.check(engine.layout)
