"""A placed batch carries the routes that its devices would compute themselves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh, PartitionSpec
from route_cases import way_of

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.batch import LocalIds, view_stacks
from tpu_embed.core.exchange import RowRoute, device_route
from tpu_embed.core.place.packing import pack_all
from tpu_embed.core.update import sums as row_sums

B, V, D = 96, 37, 2
SIZES = {"item": V, "small": 3, "big": 150}
"""A table with shards, and two that are replicated: with fewer rows than the batch has ids or not.

They are stacks of their own, because their dims differ.
"""
EXCHANGED = {"item": "exchange", "small": "psum", "big": "exchange"}


def make_engine(devices, placement="mod", *, batch_axes=None, shard_axes=None):
    """Return an engine of three stacks; each has several features, with different combiners."""
    item = {"placement": placement, "shard_axes": shard_axes}
    features = {}
    for i, (name, size) in enumerate(SIZES.items()):
        options = item if name == "item" else {"placement": "replicated"}
        table = TableConfig(size, D + i, name=name, combiner="mean", **options)
        features |= {f"{name}/bag": FeatureConfig(table), f"{name}/one": FeatureConfig(table)}
    return tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=devices, batch_axes=batch_axes)


def draw(seed, *, hot, ragged):
    """Return ids and weights: half of the ids are of few rows, and some are absent."""
    rng = np.random.default_rng(seed)
    ids, weights = {}, {}
    for name, size in SIZES.items():
        any_row, few = rng.integers(-1, size, (B, hot)), rng.integers(0, min(3, size), (B, hot))
        bags = np.where(rng.random((B, hot)) < 0.5, any_row, few)
        scales = rng.normal(size=(B, hot)).astype(np.float32)
        ids[f"{name}/bag"], weights[f"{name}/bag"] = bags, scales
        ids[f"{name}/one"], weights[f"{name}/one"] = rng.integers(-1, size, B), None
        if ragged:
            kept = [bag >= 0 for bag in bags]
            lists = [bag[k].tolist() for bag, k in zip(bags, kept, strict=True)]
            scales = [w[k].tolist() for w, k in zip(scales, kept, strict=True)]
            ids[f"{name}/bag"] = RaggedIds.from_lists(lists, weights=scales)
            weights[f"{name}/bag"] = None
    return ids, weights


def both_routes(engine, ids, weights):
    """Return the spec, and by stack and device the host's routes and the devices' own."""
    layout, batch = engine.layout, engine.place(ids, weights)
    axes, spec = layout.axes, batch.spec
    axes_of_batch = layout.axes.batch_axes
    replicas = np.arange(layout.axes.size(axes_of_batch))
    packed = pack_all(engine.host_ids(ids, weights), spec, layout, replicas)

    @functools.partial(
        jax.shard_map,
        mesh=axes.mesh,
        in_specs=(axes.spec(axes.names), axes.spec(axes.batch_axes)),
        out_specs=PartitionSpec(axes.names),
        check_vma=False,
    )
    def routes(batch, packed):
        found = []
        pairs = zip(view_stacks(spec, layout), batch.locate(layout).ids, packed, strict=True)
        for view, placed, given in pairs:
            rows, bags, scales, blocks = (None if x is None else x[0] for x in given[:4])
            if bags is None:  # ids inside a jit: the devices number their blocks, too
                bags, blocks = view.bags.dense_bags(), None
            found.append((placed, own_routes(LocalIds(rows, bags, scales, blocks), view)))
        return jax.tree.map(lambda x: x[None], found)

    quickly = {"xla_backend_optimization_level": 0}  # integers alone: the same at every level
    by_stack = jax.device_get(jax.jit(routes, compiler_options=quickly)(batch, packed))
    count = range(axes.size(axes.names))
    return spec, [[jax.tree.map(lambda x, d=d: x[d], found) for d in count] for found in by_stack]


def own_routes(ids, view):
    """Return the routes that a device computes of its own ids: rows, sums, and the merge."""
    if view.stack.num_shards == 1:  # every row is here
        rows, overflow = RowRoute(None, ids.row_ids), jnp.asarray(False)
    else:
        ordered = device_route.sort_ids(ids.row_ids, view.stack)
        rows, overflow = device_route.route_rows(ordered, view.stack, view.room.row_capacity)
    gradients = tuple(
        np.zeros((size * shape.bags, view.stack.dim), np.float32)
        for size, shape in zip(view.bags.sizes, view.bags.shapes, strict=True)
    )
    task = row_sums.Task(ids, gradients, view, {}, fits=True)
    if way_of(view) == "psum":
        order, touched = row_sums._order_of_cells(task)
        return rows, order, touched, overflow
    outgoing = row_sums.outgoing_sums(task, view.room.partials)
    merge = row_sums.exchange_sums(task, outgoing).merge
    return rows, outgoing.sums, merge, overflow | outgoing.overflow


def check_sums(found, expected, num_sums):
    """Compare the orders in which partial sums are made; what follows them is ignored."""
    kept, same = (route.segments < num_sums for route in (found, expected))
    assert kept.sum() == same.sum()
    assert kept[: kept.sum()].all()
    for name in ("index", "segments", "gains"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a[kept], b[same])


def check_merge(found, expected):
    """Compare how partial sums are merged; what is merged into no sum is ignored."""
    rows, more = found.row_ids, expected.row_ids[found.row_ids.size :]
    np.testing.assert_array_equal(rows, expected.row_ids[: rows.size])
    assert (more < 0).all()
    # The devices' room may be larger, and its padding then is another number.
    kept, same = (m.segments < np.count_nonzero(m.row_ids >= 0) for m in (found, expected))
    np.testing.assert_array_equal(found.segments[kept], expected.segments[same])
    np.testing.assert_array_equal(found.index[kept], expected.index[same])


def check_exchanged(engine, ids, weights):
    """Compare the routes of all stacks on all devices; return the ways of the stacks."""
    spec, stacks = both_routes(engine, ids, weights)
    views = view_stacks(spec, engine.layout)
    for view, devices in zip(views, stacks, strict=True):
        for placed, (rows, order, merge, overflow) in devices:
            assert not overflow
            jax.tree.map(np.testing.assert_array_equal, placed.rows, rows)
            if way_of(view) == "psum":
                check_sums(placed.sums, order, view.layout.blocks * view.stack.num_rows)
                np.testing.assert_array_equal(placed.merge.row_ids, merge)
            elif way_of(view) == "exchange":
                check_sums(placed.sums, order, view.stack.num_shards * view.room.partials)
                check_merge(placed.merge, merge)
    return {view.stack.tables[0].name: way_of(view) for view in views}


@pytest.mark.parametrize(
    ("devices", "placement", "ragged"),
    [(2, "mod", True), (2, "div", False), (8, "mod", False), (8, "div", True)],
)
@pytest.mark.quick(1)
def test_routes_are_those_that_the_devices_compute(devices, placement, ragged):
    engine = make_engine(mesh(devices), placement)
    ids, weights = draw(devices, hot=1, ragged=ragged)
    assert check_exchanged(engine, ids, weights) == EXCHANGED


BATCH_AXES = [("p",), ("d",), ("p", "d")]
IN_WHOLE = [(("p",), ("p",)), (("d",), ("d",)), (("p", "d"), ("p", "d")), (("d",), ("p", "d"))]


@pytest.mark.parametrize(
    ("batch_axes", "shard_axes"),
    [
        pytest.param(*case, marks=[pytest.mark.whole] if case in IN_WHOLE else [])
        for case in itertools.product(BATCH_AXES, BATCH_AXES)
    ],
    ids=str,
)
@pytest.mark.quick(1)
def test_routes_on_two_axes_are_those_that_the_devices_compute(batch_axes, shard_axes):
    devices = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("p", "d"))
    engine = make_engine(devices, batch_axes=batch_axes, shard_axes=shard_axes)
    ids, weights = draw(1, hot=1, ragged=batch_axes == ("d",))
    assert check_exchanged(engine, ids, weights) == EXCHANGED
