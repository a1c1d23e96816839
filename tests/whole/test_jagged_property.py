"""Any jagged batch, in any form, gives the oracle's rows and update, with equal bits on 1 and 8.

So do dense ids inside a jit, but for the bits.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import oracle
import oracle_rules
import pytest
from facade_cases import assert_same, mesh
from hypothesis import given, settings
from hypothesis import strategies as st

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed import optimizers as o

V, D, WIDTH, CUT = 23, 4, 5, 3
BAD = (-3, V, V + 5)
WEIGHTS = (1.0, 0.5, 2.0, 0.0, -1.0)
SIZES = {"cut": 16, "whole": 8, "bag": 24}
LONGEST = {"cut": CUT, "whole": WIDTH}


def start():
    return np.random.default_rng(0).normal(size=(V, D)).astype(np.float32)


def initial(key, shape, dtype, shard_info):
    return jax.numpy.asarray(start())[shard_info.rows]


TABLE = TableConfig(V, D, name="t", initializer=initial)
OTHER = dataclasses.replace(TABLE, name="r", placement="replicated")
PADDED = {
    "cut": FeatureConfig(TABLE, CUT, on_bad_id="drop"),
    "whole": FeatureConfig(OTHER, WIDTH, on_bad_id="clip"),
    "bag": FeatureConfig(TABLE),
}
"""What the oracle reads: the same rows in the places of a padded sequence."""
FEATURES = {n: dataclasses.replace(f, jagged=n in LONGEST) for n, f in PADDED.items()}


class Rows(NamedTuple):
    """Sequences as an array: -1 stands for no id. A row ends after its last id, good or bad."""

    ids: np.ndarray  # int [B, WIDTH]
    weights: np.ndarray  # float32 [B, WIDTH]

    @property
    def lengths(self):
        return [max((p + 1 for p in range(WIDTH) if row[p] != -1), default=0) for row in self.ids]

    def given(self, form):
        """Return the ids in a form, and the weights beside them."""
        if form == "dense":
            return self.ids, self.weights
        there = self.ids != -1
        ids, weights = self.ids[there], self.weights[there]
        if form == "sparse":
            return SparseIds(np.argwhere(there), ids, self.ids.shape, weights), None
        return RaggedIds(ids, np.concatenate([[0], np.cumsum(self.lengths)]), weights), None


@st.composite
def sequences(draw, size, form):
    """Draw rows: of few ids, some of them bad; some rows empty; gaps where the form has them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    pool = draw(st.sampled_from((2, V)))
    bad, empty, gaps = (draw(st.sampled_from((0.0, 0.3, 1.0))) for _ in range(3))
    lengths = rng.integers(0, WIDTH + 1, size) * (rng.random(size) >= empty)
    shape = (size, WIDTH)
    ids = rng.integers(0, pool, shape)
    ids = np.where(rng.random(shape) < bad / 2, rng.choice(BAD, shape), ids)
    absent = np.arange(WIDTH) >= lengths[:, None]
    if form != "ragged":
        absent |= rng.random(shape) < gaps / 2
    return Rows(np.where(absent, -1, ids), rng.choice(WEIGHTS, shape).astype(np.float32))


@st.composite
def batches(draw):
    """Draw by jagged feature a form and rows of it."""
    forms = {name: draw(st.sampled_from(("ragged", "dense", "sparse"))) for name in LONGEST}
    return forms, {n: draw(sequences(SIZES[n], form)) for n, form in forms.items()}


@functools.cache
def run_of(devices, **options):
    engine = tpu_embed.EmbeddingEngine(FEATURES, o.Adagrad(0.1), mesh=mesh(devices), **options)
    state = engine.init(jax.random.key(0))
    return engine, state, jax.jit(engine.lookup), jax.jit(engine.update)


def placed(engine, ids, weights):
    """Place a batch with room for any other of its sizes, so that it is compiled once."""
    spec = engine.place(ids, weights).spec
    sizes = [shape.batch // spec.replicas for shape in spec.feature_shapes]
    total = WIDTH * sum(sizes)
    room = {"row_capacity": total, "partials": total, "merged": 8 * total}
    pairs = zip(spec.feature_shapes, sizes, strict=True)
    shapes = [shape.with_capacity(size * WIDTH) for shape, size in pairs]
    stacks = [dataclasses.replace(one, ids=total, **room) for one in spec.stacks]
    roomy = dataclasses.replace(spec, feature_shapes=tuple(shapes), stacks=tuple(stacks))
    return engine.place(ids, weights, spec=roomy)


def in_places(padded, lengths, like):
    """Return padded gradients in the places of a `Jagged`, and NaN where no id is."""
    values = np.full(like.values.shape, np.nan, np.float32)
    examples = len(lengths) // len(values)
    for e, length in enumerate(lengths):
        begin = int(like.row_splits[e // examples, e % examples])
        values[e // examples, begin : begin + length] = padded[e, :length]
    return values


def check_lookup(found, expected, lengths):
    """Compare a `Jagged` with padded rows, row by row; what is left of its room holds zeros."""
    values, splits = np.asarray(found.values), np.asarray(found.row_splits)
    np.testing.assert_array_equal(np.diff(splits, axis=1).reshape(-1), lengths)
    assert (splits[:, 0] == 0).all()
    examples = splits.shape[1] - 1
    for e, length in enumerate(lengths):
        s, begin = e // examples, splits[e // examples, e % examples]
        # One product of a weight and a row, rounded to float32.
        mine = values[s, begin : begin + length]
        np.testing.assert_allclose(mine, expected[e, :length], rtol=1e-6)
    for s, end in enumerate(splits[:, -1]):
        assert not values[s, end:].any()


def draw_gradients(rng):
    """Return padded gradients of every feature, in the order of the features."""
    shapes = {"bag": (SIZES["bag"], D)}
    shapes |= {name: (SIZES[name], length, D) for name, length in LONGEST.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@settings(max_examples=12)
@given(drawn=batches(), seed=st.integers(0, 9))
def test_any_jagged_batch_is_looked_up_and_trained_as_the_oracle_does(drawn, seed):
    (forms, rows), rng = drawn, np.random.default_rng(seed)
    bags, gradients = rng.integers(-1, V, (SIZES["bag"], 2)), draw_gradients(rng)
    both = {name: rows[name].given(form) for name, form in forms.items()} | {"bag": (bags, None)}
    ids, weights = ({name: pair[i] for name, pair in both.items()} for i in (0, 1))
    lengths = {n: np.minimum(rows[n].lengths, length) for n, length in LONGEST.items()}
    dense = {n: rows[n].ids.astype(np.int32) for n in LONGEST} | {"bag": bags.astype(np.int32)}
    scales = {n: rows[n].weights for n in LONGEST} | {"bag": None}
    items = [(PADDED["bag"], bags), *((PADDED[name], *rows[name]) for name in LONGEST)]
    results = []
    for devices in (1, 8):
        engine, state, lookup, update = run_of(devices)
        for source, beside in ((placed(engine, ids, weights), None), (dense, scales)):
            found = lookup(state, source, beside)
            for name in LONGEST:
                expected = oracle.lookup(start(), PADDED[name], *rows[name])
                check_lookup(found[name], expected, lengths[name])
            moved = {n: in_places(gradients[n], lengths[n], found[n]) for n in LONGEST}
            new = update(state, source, gradients | moved, beside)
            results.append((engine.tables(new), engine.slots(new)))
            check_update(results[-1], items, list(gradients.values()))
        assert lookup._cache_size() <= 2
    assert_same(results[0], results[2])


def check_update(found, features, gradients):
    """Compare with the oracle: sums of at most 200 float32 terms of size 1, one Adagrad step."""
    both = TABLE, OTHER
    tables, slots = oracle.train_step(
        dict.fromkeys(both, start()),
        {table: {"accumulators": np.full((V, D), 0.1)} for table in both},
        features,
        gradients,
        optimizers=dict.fromkeys(both, ("Adagrad", {}, 0.1)),
        step=1,
        apply=oracle_rules.apply,
    )
    for table in both:
        sums = found[1][table.name]["accumulators"]
        np.testing.assert_allclose(found[0][table.name], tables[table], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(sums, slots[table]["accumulators"], rtol=1e-4, atol=1e-4)


def test_gradients_may_be_jagged_or_none_and_the_guard_reads_rows_alone():
    engine, state, lookup, update = run_of(8, on_bad_gradient="error")
    rng = np.random.default_rng(0)
    ids = {n: RaggedIds.from_lists([[1] * k for k in rng.integers(0, 5, SIZES[n])]) for n in SIZES}
    batch = engine.place(ids)
    found = lookup(state, batch)
    values, _ = tpu_embed.split_activations(found)
    nothing = {n: tpu_embed.Jagged(a.values, None) if n in LONGEST else a for n, a in found.items()}
    expected = update(state, batch, values)
    for one in (found, nothing):
        assert_same(update(state, batch, one).tables, expected.tables)
    lengths = {n: np.minimum(np.diff(ids[n].row_splits), LONGEST[n]) for n in LONGEST}
    gradients = draw_gradients(rng)
    moved = {n: in_places(gradients[n], lengths[n], found[n]) for n in LONGEST}
    assert int(engine.update(state, batch, gradients | moved).step) == 1
    moved["cut"][:] = np.inf
    with pytest.raises(ValueError, match="activation gradient of feature 'cut'"):
        engine.update(state, batch, gradients | moved)
