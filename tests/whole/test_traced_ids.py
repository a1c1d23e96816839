"""Ids inside a jit lose nothing, on any number of devices, with any number of blocks.

Random cases of small tables: traced ids, a placed batch, and the oracle's float64 loop. Batches are
full of duplicates, so that the static capacities of the exchange are met or nearly met: the worst
case is common here. Gradients are whole numbers, weights are halves or whole: in a "sum" every
float32 sum is exact, and has the same bits in any order. More of them:

    RANDOM_SEEDS=1000:3000 python -m pytest tests/whole/test_traced_ids.py -k many
"""

import functools
import math
import os
from collections import namedtuple

import jax
import numpy as np
import optimizer_cases
import oracle
import oracle_rules
import pytest
from facade_cases import assert_same
from jax.sharding import Mesh
from random_cases import Known
from random_optimizers import choose

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed import optimizers as o

MESHES = {4: ((2, 2),), 6: ((2, 3), (3, 2)), 8: ((2, 4), (4, 2))}
COMBINERS = ("sum", "sum", "mean", "sqrtn")
FIELDS = "seed mesh_shape batch_axes sum_blocks optimizer features ids weights gradients"


class Case(namedtuple("Case", FIELDS)):
    """Features, where their tables live, and one batch of them.

    Attributes:
      mesh_shape: the sizes of the axes p and q, or of d alone.
      sum_blocks: G.
    """

    @property
    def axes(self):
        """The axes of the mesh."""
        return ("p", "q") if len(self.mesh_shape) == 2 else ("d",)

    @property
    def replicas(self):
        """Into how many parts the batch is split."""
        sizes = dict(zip(self.axes, self.mesh_shape, strict=True))
        return math.prod(sizes[axis] for axis in self.batch_axes)

    @property
    def blocks(self):
        """Into how many blocks sums are cut."""
        return max(self.sum_blocks, self.replicas)

    @property
    def keeps_bits(self):
        """Whether sums have the same bits however they are cut: they are exact, or cut alike."""
        sums = all(feature.table.combiner == "sum" for feature in self.features)
        return sums or self.blocks % self.replicas == 0

    def engine(self):
        """Return its engine, on the first devices."""
        count = math.prod(self.mesh_shape)
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(self.mesh_shape), self.axes)
        options = {"mesh": mesh, "batch_axes": self.batch_axes, "sum_blocks": self.sum_blocks}
        return tpu_embed.EmbeddingEngine(list(self.features), self.optimizer, **options)


def draw_case(seed):
    """Return the case of a seed."""
    rng = np.random.default_rng(seed)
    devices, shape, batch_axes = int(rng.integers(1, 9)), None, ("d",)
    if devices in MESHES and rng.random() < 0.4:
        shape = choose(rng, MESHES[devices])
        batch_axes = choose(rng, (("p",), ("q",), ("p", "q")))
    optimizer = _draw_optimizer(rng)
    features = _draw_features(rng, optimizer, on_two_axes=shape is not None)
    blocks, drawn = int(rng.integers(1, 25)), ((), (), ())
    case = Case(seed, shape or (devices,), batch_axes, blocks, optimizer, features, *drawn)
    # That of the first is 50 at most.
    size = case.replicas * int(rng.integers(1, max(1, 50 // case.replicas) + 1))
    sizes = [size, *(size * choose(rng, (1, 1, 2, 3)) for _ in features[1:])]
    drawn = [_draw_ids(rng, *pair) for pair in zip(features, sizes, strict=True)]
    ids, weights, gradients = zip(*drawn, strict=True)
    return case._replace(ids=ids, weights=weights, gradients=gradients)


def _draw_optimizer(rng):
    accumulate = bool(rng.random() < 0.85)
    rule, rate = (o.SGD, 1.0) if rng.random() < 0.6 else (o.Adagrad, 0.5)
    return rule(rate, use_gradient_accumulation=accumulate)


def _draw_features(rng, optimizer, *, on_two_axes):
    """Return one or two features of one table or of two, which may share a stack."""
    placements = ("mod", "mod", "div", "replicated")
    if not optimizer.use_gradient_accumulation:
        placements = placements[:3]
    kind = {
        "dim": int(rng.integers(1, 4)),
        "placement": choose(rng, placements),
        "shard_axes": choose(rng, (None, "p", "q")) if on_two_axes else None,
    }
    largest = choose(rng, (1, 3, 9, 50))
    tables = []
    for name in "ab":
        size, combiner = int(rng.integers(1, largest + 1)), choose(rng, COMBINERS)
        kind["initializer"] = Known(int(rng.integers(1000)))
        tables.append(TableConfig(size, combiner=combiner, name=name, **kind))
    used = choose(rng, (tables[:1], [tables[0], tables[0]], tables))
    lengths = [2 if rng.random() < 0.15 else 0 for _ in used]
    return tuple(map(FeatureConfig, used, lengths))


def _draw_ids(rng, feature, size):
    """Return the ids, weights and gradients of a feature."""
    table, width = feature.table, int(rng.integers(1, 4))
    shapes = ((size,), (size, width), (size, width), (size, width), (size, 2, width))
    shape = (size, width) if feature.max_sequence_length else choose(rng, shapes)
    few = min(table.vocabulary_size, choose(rng, (1, 2, 50, 50)))
    ids = rng.integers(0, few, shape)
    ids = np.where(rng.random(shape) < choose(rng, (0.0, 0.0, 0.3)), -1, ids).astype(np.int32)
    weights = None
    if ids.ndim > 1 and rng.random() < 0.4:
        weights = rng.choice(np.float32([0.5, 1, 2]), shape)
    length = feature.max_sequence_length
    inner = (length,) if length else shape[1:-1]
    numbers = rng.integers(1, 5, (size, *inner, table.dim))
    signs = rng.choice([-1, 1], numbers.shape) if rng.random() < 0.5 else 1
    return ids, weights, (numbers * signs).astype(np.float32)


MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "0:2000").split(":")))
NEAR = {"rtol": 1e-4, "atol": 2e-3}
"""Float32 sums of a few hundred numbers below 10; a gradient that is lost makes more than 0.1."""


def run(case, engine):
    """Return the first tables; activations, tables, slots and counters of traced and placed ids."""
    ids, weights, gradients = map(list, (case.ids, case.weights, case.gradients))
    batch = engine.place(ids, weights)

    def step(state, given, weights, gradients):
        found = engine.lookup(state, given, weights)
        new = engine.update(state, given, gradients, weights)
        return found, engine.tables(new), engine.slots(new), new.counters

    @jax.jit
    def steps(key, batch, ids, weights, gradients):
        state = engine.init(key)
        placed = step(state, batch, None, gradients)
        return engine.tables(state), step(state, ids, weights, gradients), placed

    return jax.device_get(steps(jax.random.key(0), batch, ids, weights, gradients))


def check_case(seed):
    case = draw_case(seed)
    first, traced, placed = run(case, case.engine())
    again = f"RANDOM_SEEDS={seed}:{seed + 1} python -m pytest {__file__} -k many"
    try:
        check_oracle(case, first, traced)
        check_route(case, traced, placed)
    except AssertionError as error:
        error.add_note(f"{case}\nrun it alone: {again}")
        raise


def check_route(case, route, placed):
    """Compare a route with that of the placed batch."""
    activations, *new, _ = route
    # Shards add up their parts of traced bags, and a program rounds the gains of means and weighted
    # bags more often than the host does.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, activations, placed[0])
    if any(feature.table.combiner != "sum" for feature in case.features):
        jax.tree.map(close, new, list(placed[1:3]))
        return
    if case.keeps_bits:
        assert_same(new, list(placed[1:3]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, **NEAR), new, list(placed[1:3]))


def check_oracle(case, first, traced):
    """Compare a route with the loop in float64."""
    activations, tables, slots, _ = traced
    configs = {feature.table.name: feature.table for feature in case.features}
    features = list(zip(case.features, case.ids, case.weights, strict=True))
    for (feature, *ids), found in zip(features, activations, strict=True):
        expected = oracle.lookup(first[feature.table.name], feature, *ids)
        np.testing.assert_allclose(found, expected, **NEAR)
    hyper = optimizer_cases.hyper(case.optimizer)
    rule = type(case.optimizer).__name__, hyper, case.optimizer.learning_rate
    new, new_slots = oracle.train_step(
        {config: first[name] for name, config in configs.items()},
        {
            config: {slot: np.full_like(first[name], 0.1) for slot in slots[name]}
            for name, config in configs.items()
        },
        features,
        case.gradients,
        optimizers=dict.fromkeys(configs.values(), rule),
        step=1,
        apply=oracle_rules.apply,
        blocks=case.blocks,
        replicas=case.replicas,
    )
    for name, config in configs.items():
        np.testing.assert_allclose(tables[name], new[config], **NEAR)
        for slot, array in slots[name].items():
            np.testing.assert_allclose(array, new_slots[config][slot], **NEAR)


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.quick(1)
def test_many(seed):
    check_case(seed)
