"""Capacities that the host counts, compared with counts by Python sets."""

import dataclasses

import jax
import numpy as np
import pytest
from facade_cases import mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import BatchSpec, FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o

V = 23


def make_engine(on, placement="mod", **options):
    table = TableConfig(V, 2, placement=placement, shard_axes=options.pop("shard_axes", None))
    features = {"x": FeatureConfig(table), "y": FeatureConfig(table, max_sequence_length=2)}
    return tpu_embed.EmbeddingEngine(features, o.SGD(0.1), mesh=on, **options)


def exact(engine, ids):
    """Return the capacities that the batch needs: a spec of one less is refused, it is not."""
    spec = engine.place(ids).spec
    stack = spec.stacks[0]
    for field in ("row_capacity", "partials"):
        least = next(
            n for n in range(getattr(stack, field) + 1) if fits(engine, ids, spec, **{field: n})
        )
        stack = dataclasses.replace(stack, **{field: least})
    return stack.row_capacity, stack.partials


def fits(engine, ids, spec, **sizes):
    stack = dataclasses.replace(spec.stacks[0], **sizes)
    try:
        engine.place(ids, spec=dataclasses.replace(spec, stacks=(stack,)))
    except ValueError:
        return False
    return True


def counted(engine, bags):
    """Return the most distinct rows, and partial sums, that a device has for a shard."""
    (stack,), layout = engine.layout.stacks, engine.layout
    batch = len(bags)
    local = batch // layout.axes.replicas
    blocks = max(layout.sum_blocks, layout.axes.replicas)
    rows, partials = {}, {}
    for example, bag in enumerate(bags):
        for number in bag:
            row = int(stack.physical(number, stack.tables[0]))
            pair = example // local, row // stack.num_rows
            rows.setdefault(pair, set()).add(row)
            partials.setdefault(pair, set()).add((row, example * blocks // batch))
    return tuple(max(map(len, found.values()), default=0) for found in (rows, partials))


BAGS = st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=8, max_size=8)
MESHES = {
    "2": lambda: mesh(2),
    "8": lambda: mesh(8),
    "2x4": lambda: Mesh(np.array(jax.devices()).reshape(2, 4), ("p", "q")),
}


def both_features(bags):
    """Return the ids of two features, the second a sequence, and all ids of each example."""
    last = [bag[-1:] for bag in bags]
    sequence = np.array([[*(bag or [-1]), -1] for bag in last])
    ids = {"x": RaggedIds.from_lists(bags), "y": sequence}
    return ids, [bag + more for bag, more in zip(bags, last, strict=True)]


@pytest.mark.parametrize("placement", ["mod", "div"])
@pytest.mark.parametrize("on", MESHES)
@settings(max_examples=10)
@given(bags=BAGS)
@pytest.mark.quick(3)
def test_capacities_are_the_exact_maxima(on, placement, bags):
    engine = make_engine(MESHES[on](), placement)
    ids, by_example = both_features(bags)
    assert exact(engine, ids) == counted(engine, by_example)


def test_blocks_on_a_device_send_apart():
    engine = make_engine(mesh(2))
    bags = [[3]] * 16  # 8 blocks of two examples, 4 a device
    ids = {"x": RaggedIds.from_lists(bags), "y": np.full((16, 1), -1)}
    assert exact(engine, ids) == (1, 4) == counted(engine, bags)
    few = make_engine(mesh(2), sum_blocks=1)
    assert exact(few, ids) == (1, 1) == counted(few, bags)


def test_nothing_is_exchanged_on_one_device():
    spec = make_engine(mesh(1)).place({"x": np.zeros((8, 2), int), "y": np.zeros((8, 2), int)}).spec
    assert (spec.stacks[0].row_capacity, spec.stacks[0].partials) == (0, 0)
    assert BatchSpec.union(spec, spec) == spec
