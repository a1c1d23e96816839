"""Any ids, in any container, on any mesh, give the oracle's result and the same bits."""

import contextlib
import dataclasses
import functools
import itertools

import jax
import numpy as np
import oracle
import oracle_rules
import pytest
from facade_cases import assert_same, mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, SparseIds, TableConfig, optimizers
from tpu_embed.core.layout import MeshAxes
from tpu_embed.kernels import dispatch

B, WIDTH, V, D = 8, 4, 23, 4
COMBINERS = ("sum", "mean", "sqrtn")
# Multiples of a half add exactly, so a bag's divisor is zero or at least a half in float32 too.
WEIGHTS = (1.0, 0.5, 2.0, 0.0, -0.5, -1.0)


def start(size):
    return np.random.default_rng(size).normal(size=(size, D)).astype(np.float32)


def initial(key, shape, dtype, shard_info):
    return jax.numpy.asarray(start(shard_info.table_shape[0]))[shard_info.rows]


# -- forms ---------------------------------------------------------------------------------------


@st.composite
def bags(draw):
    """Draw B bags of (id, weight, column), columns ascending: few ids, so duplicates are common."""
    entry = st.tuples(st.integers(0, V - 1) | st.integers(0, 2), st.sampled_from(WEIGHTS))
    drawn = []
    for _ in range(B):
        entries = draw(st.lists(entry, max_size=WIDTH))
        columns = sorted(draw(st.permutations(range(WIDTH)))[: len(entries)])
        drawn.append([(*pair, column) for pair, column in zip(entries, columns, strict=True)])
    return drawn


def as_dense(drawn):
    ids, weights = np.full((B, WIDTH), -1), np.full((B, WIDTH), 7.0, np.float32)
    for b, bag in enumerate(drawn):
        for number, weight, column in bag:
            ids[b, column], weights[b, column] = number, weight
    return ids, weights


def as_sparse(drawn):
    places = [(b, column) for b, bag in enumerate(drawn) for _, _, column in bag]
    ids, weights = ([entry[i] for bag in drawn for entry in bag] for i in (0, 1))
    return SparseIds(places, np.array(ids, int), (B, WIDTH), np.array(weights, np.float32)), None


def as_ragged(drawn):
    ids, weights = ([[entry[i] for entry in bag] for bag in drawn] for i in (0, 1))
    return RaggedIds.from_lists(ids, weights=weights), None


@functools.cache
def form_engine(combiner):
    table = TableConfig(V, D, name="t", combiner=combiner, initializer=initial)
    engine = EmbeddingEngine({"x": FeatureConfig(table)}, optimizers.Adagrad(0.1), mesh=mesh(2))
    return engine, engine.init(jax.random.key(0))


def roomy(spec):
    """Return the spec with room for any such batch, so that each form is compiled once."""
    room = dict.fromkeys(("ids", "row_capacity", "partials", "merged"), B * WIDTH)
    stacks = tuple(dataclasses.replace(g, **room) for g in spec.stacks)
    forms = tuple(dataclasses.replace(form, weighted=True) for form in spec.feature_shapes)
    return dataclasses.replace(spec, feature_shapes=forms, stacks=stacks)


def gradient():
    return {"x": np.random.default_rng(1).normal(size=(B, D)).astype(np.float32)}


def results(engine, state, batch):
    new = engine.update(state, batch, gradient())
    return engine.lookup(state, batch)["x"], engine.tables(new), engine.slots(new)


@pytest.mark.parametrize("combiner", COMBINERS)
@settings(max_examples=25)
@given(drawn=bags())
@pytest.mark.quick(1)
def test_every_form_of_the_same_ids_gives_the_same_bits(combiner, drawn):
    engine, state = form_engine(combiner)
    flat = roomy(engine.place({"x": RaggedIds.from_lists([[0]] * B)}).spec)
    dense = roomy(engine.place({"x": np.zeros((B, WIDTH), int)}).spec)
    found = []
    # Dense ids may be packed flat, too.
    for form, spec in ((as_dense, dense), (as_dense, flat), (as_sparse, flat), (as_ragged, flat)):
        ids, weights = form(drawn)
        found.append(results(engine, state, engine.place({"x": ids}, {"x": weights}, spec=spec)))
        assert_same(found[-1], found[0])
    check_step(engine, ids, found[0])
    assert max(engine.compilations.values()) <= 2


def check_step(engine, ids, found):
    """Compare with the oracle: sums of at most 32 float32 terms of size 1, and one Adagrad step."""
    feature = engine.layout.features[0].config
    table, (activation, tables, slots) = feature.table, found
    expected = oracle.lookup(start(V), feature, ids)
    np.testing.assert_allclose(activation, expected, rtol=1e-5, atol=1e-5)
    rows, kept = oracle.train_step(
        {table: start(V)},
        {table: {"accumulators": np.full((V, D), 0.1)}},
        [(feature, ids)],
        [gradient()["x"]],
        optimizers={table: ("Adagrad", {}, 0.1)},
        step=1,
        apply=oracle_rules.apply,
    )
    np.testing.assert_allclose(tables["t"], rows[table], rtol=1e-5, atol=1e-5)
    expected = kept[table]["accumulators"]
    np.testing.assert_allclose(slots["t"]["accumulators"], expected, rtol=1e-5, atol=1e-5)


# -- meshes --------------------------------------------------------------------------------------

AXES = ("p", "q")


@dataclasses.dataclass(frozen=True)
class MeshCase:
    """A mesh, what its axes do, two tables, and the examples a part of the batch has."""

    shape: tuple[int, ...]
    explicit: bool
    batch_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    sizes: tuple[int, int]
    placements: tuple[str, str]
    per_part: int

    @property
    def parts(self):
        sizes = dict(zip(AXES, self.shape, strict=False))
        return int(np.prod([sizes[axis] for axis in self.batch_axes], dtype=int))

    def engine(self):
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        devices = np.array(jax.devices()[: np.prod(self.shape)]).reshape(self.shape)
        names = AXES[: len(self.shape)]
        on = Mesh(devices, names, axis_types=(kind,) * len(names))
        axes = {"batch_axes": self.batch_axes, "shard_axes": self.shard_axes}
        return make_engine(on, self.sizes, self.placements, **axes)


def make_engine(on, sizes, placements, *, batch_axes=None, shard_axes=None):
    """Return an engine of two tables and three features; one feature is a sequence."""
    x, y = (
        TableConfig(size, D, initial, name=n, combiner=c, placement=place, shard_axes=shard_axes)
        for n, c, size, place in zip("xy", ("mean", "sum"), sizes, placements, strict=True)
    )
    features = {"bag": FeatureConfig(x), "one": FeatureConfig(x)}
    features["row"] = FeatureConfig(y, max_sequence_length=2)
    return EmbeddingEngine(features, optimizers.Adam(0.1), mesh=on, batch_axes=batch_axes)


def draw_batch(case, seed):
    rng, size = np.random.default_rng(seed), case.parts * case.per_part
    v, w = case.sizes
    drawn = ("bag", v, (size, 3)), ("one", v, (size,)), ("row", w, (size, 3))
    ids = {name: rng.integers(-1, most, shape, np.int32) for name, most, shape in drawn}
    weights = {"bag": rng.choice(WEIGHTS, (size, 3)).astype(np.float32), "one": None, "row": None}
    shapes = {"bag": (size, D), "one": (size, D), "row": (size, 2, D)}
    return ids, weights, {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


@functools.cache
def single(sizes):
    return make_engine(mesh(1), sizes, ("mod", "mod"))


@functools.cache
def program(engine):
    """Return the jitted step of an engine from its initial state, over several sources of ids."""

    def step(state, source, gradients, weights):
        new = engine.update(state, source, gradients, weights)
        return engine.lookup(state, source, weights), engine.tables(new), engine.slots(new)

    @jax.jit
    def steps(state, sources, gradients):
        return [step(state, source, gradients, weights) for source, weights in sources]

    # The step number must not be a constant of the program, or the rule's rounding may change.
    return functools.partial(steps, engine.init(jax.random.key(0)))


# Example e of B is in block e * 8 // B of the sums. With 5 parts of 2 examples these are
#   0 0 | 1 2 | 3 4 | 4 5 | 6 7
# and block 4 is summed on two devices, so the last bit may be another. The same bits are promised
# where no block is cut, as in none of these cases.
# shape, explicit, batch axes, shard axes, sizes, placements, examples a part of the batch
P, PQ = ("p",), ("p", "q")
CHOSEN = [
    MeshCase((3,), False, P, P, (23, 4), ("mod", "div"), 2),
    MeshCase((5,), True, P, P, (1, 4), ("div", "replicated"), 1),
    MeshCase((8,), False, P, P, (5, 4), ("div", "div"), 3),
    MeshCase((2, 3), False, P, ("q",), (23, 4), ("mod", "mod"), 3),
    MeshCase((3, 2), True, PQ, ("q",), (23, 1), ("div", "mod"), 1),
    MeshCase((2, 4), False, ("q",), PQ, (5, 4), ("mod", "replicated"), 2),
    # Blocks of three examples; devices have all of them, or 4, or 2.
    MeshCase((1,), False, P, P, (23, 4), ("mod", "div"), 24),
    MeshCase((4,), False, P, P, (23, 4), ("mod", "replicated"), 6),
]
SPLIT = [
    MeshCase((2, 3), False, P, ("q",), (23, 4), ("mod", "mod"), 4),
    MeshCase((4, 2), False, P, PQ, (23, 4), ("mod", "div"), 2),
    MeshCase((2, 4), False, PQ, P, (23, 4), ("mod", "div"), 1),
]
"""Rows and batch are split over other axes; parcels do not arrive in the order of the batch."""


@contextlib.contextmanager
def as_several():
    """Have the host route as if it knew its own part of the batch alone, one of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshAxes, "one_process", False)
        yield


WAYS = {
    "default": contextlib.nullcontext,
    "reference": dispatch.reference_only,
    "several": as_several,
}
CASES = [*itertools.product(CHOSEN, ("default", "reference")), *((c, "several") for c in SPLIT)]


@pytest.mark.parametrize(("case", "way"), CASES)
@pytest.mark.quick(2)  # 3 x 2 devices; 2 x 4 whose rows and batch are split over other axes
def test_chosen_meshes_give_the_bits_of_one_device(case, way):
    """A step, placed and traced, has the bits of one device, but for sums of traced bags."""
    ids, weights, gradients = draw_batch(case, 0)
    alone = single(case.sizes)
    expected = program(alone)([(alone.place(ids, weights), None)], gradients)[0]
    with WAYS[way]():
        engine = case.engine()
        both = [(engine.place(ids, weights), None), (ids, weights)]
        placed, traced = jax.device_get(program(engine)(both, gradients))
    assert_same(placed, expected)
    (activations, *new), (one, *others) = traced, expected
    assert_same(new, others)
    # Shards add up their parts of traced bags.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, activations, one)
