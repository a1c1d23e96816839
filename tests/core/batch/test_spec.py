"""Specs of batches: buckets, unions, given specs, and how many programs a stream needs."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from facade_cases import mesh
from hypothesis import given
from hypothesis import strategies as st

import tpu_embed
from tpu_embed import BatchSpec, FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.batch import StackSpec
from tpu_embed.core.ids import FeatureShape
from tpu_embed.core.layout import bucket
from tpu_embed.core.place.rooms import holds

B = 8


@given(st.integers(0, 10**9))
def test_buckets_waste_at_most_an_eighth(n):
    size = bucket(n)
    assert n <= size <= max(8, n + n // 8)
    assert bucket(size) == size
    assert bucket(n + 1) >= size


def test_there_are_eight_buckets_an_octave():
    assert len({bucket(n) for n in range(1025, 2049)}) == 8


def form(width=3, batch=B, inner=(), combines=True, weighted=False):
    return FeatureShape(batch, inner, combines, width, weighted)


CAPACITIES = ("ids", "row_capacity", "partials", "merged")
WIDTHS = st.none() | st.integers(0, 5)
STACKS = st.builds(StackSpec, st.just((0, 1)), *[st.integers(0, 50)] * 4)
FORMS = st.builds(form, WIDTHS, weighted=st.booleans())
SPECS = st.builds(BatchSpec, st.just(2), st.tuples(FORMS, FORMS), st.tuples(STACKS))


@given(SPECS, SPECS, SPECS)
def test_union_is_a_least_upper_bound(a, b, c):
    union = BatchSpec.union
    assert union(a) == union(a, a) == a
    assert union(a, b) == union(b, a) == union(union(a, b), a)
    assert union(a, b, c) == union(union(a, b), c) == union(a, union(b, c))
    for field in CAPACITIES:
        sizes = [getattr(spec.stacks[0], field) for spec in (a, b)]
        assert getattr(union(a, b).stacks[0], field) == max(sizes)
    assert holds(a, b) == (union(a, b) == a)


BASE = BatchSpec(2, (form(),), (StackSpec((0,), 4, 2, 2),))


OTHER_SPECS = [
    ({"replicas": 4}, "specs of one engine"),
    ({"feature_shapes": ()}, "specs of one engine"),
    ({"stacks": (StackSpec((1,), 4, 2, 2),)}, "specs of one engine"),
    ({"feature_shapes": (form(batch=16),)}, r"feature 0: expected batch 8"),
    ({"feature_shapes": (form(inner=(2,)),)}, r"activation shape \(\)"),
    ({"feature_shapes": (form(combines=False),)}, "combined True"),
]


@pytest.mark.parametrize(("change", "says"), OTHER_SPECS)
def test_specs_that_have_no_union(change, says, refused):
    refused(says, BatchSpec.union, BASE, dataclasses.replace(BASE, **change))
    refused("at least one spec", BatchSpec.union)


# -- placing -------------------------------------------------------------------------------------


def make_engine(devices=2):
    item, shop = TableConfig(97, 4, name="item"), TableConfig(5, 4, name="shop", placement="div")
    features = {"x": FeatureConfig(item), "y": FeatureConfig(shop)}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(devices))


def draw(rng, longest=6):
    bags = [rng.integers(0, 97, rng.integers(0, longest)).tolist() for _ in range(B)]
    return {"x": RaggedIds.from_lists(bags), "y": rng.integers(-1, 5, (B, 2))}


def test_a_given_spec_is_the_exact_shape():
    engine, rng = make_engine(), np.random.default_rng(0)
    spec = BatchSpec.union(*(engine.place(draw(rng)).spec for _ in range(5)))
    batches = [engine.place(draw(rng, longest=2), spec=spec) for _ in range(5)]
    assert {(one.spec, one.packed.shape) for one in batches} == {(spec, batches[0].packed.shape)}


def with_sizes(spec, **sizes):
    """Return a spec whose first stack has other capacities."""
    first, *others = spec.stacks
    return dataclasses.replace(spec, stacks=(dataclasses.replace(first, **sizes), *others))


@pytest.mark.parametrize("field", CAPACITIES)
def test_a_batch_that_does_not_fit_says_which_spec_does(field):
    engine, rng = make_engine(), np.random.default_rng(0)
    ids = draw(rng)
    small = with_sizes(engine.place(ids).spec, **{field: 1})
    with pytest.raises(ValueError, match=r"spec: expected one that the batch fits") as error:
        engine.place(ids, spec=small)
    names = {kind.__name__: kind for kind in (BatchSpec, StackSpec, FeatureShape)}
    fitting = eval(str(error.value).split("use ")[1].split(", or BatchSpec.union")[0], names)
    assert getattr(fitting.stacks[0], field) > 1
    assert engine.place(ids, spec=fitting).spec == fitting


@pytest.mark.parametrize("devices", [2, 8])
def test_capacities_are_the_exact_maxima(devices, refused):
    """The most distinct rows, and partial sums, that a device has for a shard."""
    engine, rng = make_engine(devices), np.random.default_rng(0)
    for _ in range(5):
        ids = draw(rng)
        found = collections.defaultdict(set)  # partial sums by device and shard
        examples = np.repeat(np.arange(B), np.diff(ids["x"].row_splits))
        for example, number in zip(examples, ids["x"].values, strict=True):
            found[example * devices // B, number % devices].add((number, example))
        rows = max(len({number for number, _ in some}) for some in found.values())
        partials = max(map(len, found.values()))
        spec = engine.place(ids).spec
        engine.place(ids, spec=with_sizes(spec, row_capacity=rows, partials=partials))
        for small in ({"row_capacity": rows - 1}, {"partials": partials - 1}):
            refused("spec: expected one", engine.place, ids, spec=with_sizes(spec, **small))


def test_a_wider_bag_does_not_fit(refused):
    engine = make_engine()
    ids = {"x": np.zeros((B, 2), int), "y": np.zeros((B, 2), int)}
    spec = engine.place(ids).spec
    assert engine.place(ids | {"x": np.zeros((B, 1), int)}, spec=spec).spec == spec
    wider = ids | {"x": np.zeros((B, 3), int)}
    weights = {"x": np.ones((B, 2), np.float32), "y": None}
    refused("spec: expected one that the batch fits", engine.place, wider, spec=spec)
    refused("spec: expected one that the batch fits", engine.place, ids, weights, spec=spec)


def test_without_a_spec_the_union_of_small_batches_grows_and_never_shrinks():
    """`test_rooms.py` has the large ones."""
    engine, rng, seen = make_engine(), np.random.default_rng(0), []
    for longest in (2, 6, 3, 9, 1, 9):
        seen.append(engine.place(draw(rng, longest)).spec)
        assert BatchSpec.union(*seen) == seen[-1]
    assert seen[-1] == seen[-2] == seen[-3]
    other = engine.place({"x": draw(rng)["x"], "y": np.zeros(B, int)}).spec  # another activation
    assert other.feature_shapes[1].combines is False
    assert engine.place(draw(rng)).spec == seen[-1]


def test_new_exchange_capacities_find_the_ids_packed_as_the_spec_says():
    """The second batch fits the ids of the first, but not its rows: placing it grows the union."""
    engine = make_engine()
    state = engine.init(jax.random.key(0))
    same, different = [[5] * 10] * B, [[*range(10 * i, 10 * i + 12)] for i in range(B)]
    for bags in (same, different, same):
        ids = {"x": RaggedIds.from_lists(bags), "y": np.zeros((B, 1), int)}
        found, alone = (engine.lookup(state, e.place(ids)) for e in (engine, make_engine()))
        np.testing.assert_array_equal(found["x"], alone["x"])


def test_a_stream_of_batches_compiles_a_few_times():
    engine, rng = make_engine(), np.random.default_rng(0)
    state, specs = engine.init(jax.random.key(0)), []
    for _ in range(200):
        batch = engine.place(draw(rng))
        specs.append(batch.spec)
        state = engine.update(state, batch, engine.lookup(state, batch))
    assert engine.compilations == {"lookup": len(set(specs)), "update": len(set(specs))}
    assert len(set(specs)) <= 4
    assert len(set(specs[20:])) == 1
    assert int(state.step) == 200
