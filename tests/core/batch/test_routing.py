"""A placed batch carries the routes that its devices would compute themselves."""

import functools

import jax
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh, PartitionSpec

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.batch import LocalIds, pack_all, view_stacks
from tpu_embed.core.exchange import device_route
from tpu_embed.core.update import sums as row_sums

B, V, D = 96, 37, 2
SIZES = {"item": V, "small": 3, "big": 150}
"""A table with shards, and two that are replicated: with fewer rows than the batch has ids or not.

They are stacks of their own, because their dims differ.
"""
EXCHANGED = {"item": "exchange", "small": "psum", "big": "exchange"}


def make_engine(devices, placement="mod", *, batch_axes=None, shard_axes=None):
    """Return an engine of three stacks; each has several features, with different combiners."""
    options = dict.fromkeys(SIZES, {"placement": "replicated"})
    options["item"] = {"placement": placement, "shard_axes": shard_axes}
    features = {}
    for i, (name, size) in enumerate(SIZES.items()):
        table = TableConfig(size, D + i, name=name, combiner="mean", **options[name])
        features |= {f"{name}/bag": FeatureConfig(table), f"{name}/one": FeatureConfig(table)}
    return tpu_embed.EmbeddingEngine(
        features, o.Adagrad(0.1), mesh=devices, batch_axes=batch_axes
    )


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
    packed = pack_all(engine.host_ids(ids, weights), spec, layout)

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
            rows, bags, scales = (None if part is None else part[0] for part in given)
            bags = view.dense_bags() if bags is None else bags
            found.append((placed, own_routes(LocalIds(rows, bags, scales), view)))
        return jax.tree.map(lambda x: x[None], found)

    by_stack = jax.device_get(jax.jit(routes)(batch, packed))
    count = range(axes.size(axes.names))
    return spec, [
        [jax.tree.map(lambda x, d=d: x[d], found) for d in count] for found in by_stack
    ]


def own_routes(ids, view):
    """Return the routes that a device computes of its own ids: rows, sums, and the merge."""
    rows, overflow = device_route.route_rows(ids.row_ids, view.stack, view.room.row_capacity)
    gradients = tuple(
        np.zeros((view.spec.local_batch * shape.bags, view.stack.dim), np.float32)
        for shape in view.shapes
    )
    task = row_sums.Task(ids, gradients, view, fits=True)
    if view.way == "psum":
        order, touched = row_sums._order_of_cells(task)
        return rows, order, touched, overflow
    order, _ = row_sums._order_of_sums(task, view.room.partials)
    merge = row_sums.exchange_sums(task, view.room.partials).merge
    return rows, order, merge, overflow


def check_sums(found, expected, num_sums):
    """Compare the orders in which partial sums are made; what follows them is ignored."""
    kept, same = (route.segments < num_sums for route in (found, expected))
    assert kept.sum() == same.sum()
    assert kept[: kept.sum()].all()
    for name in ("index", "segments", "weights"):
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
            if view.way == "psum":
                check_sums(placed.sums, order, view.blocks * view.stack.num_rows)
                np.testing.assert_array_equal(placed.merge.row_ids, merge)
            elif view.way == "exchange":
                check_sums(placed.sums, order, view.stack.num_shards * view.room.partials)
                check_merge(placed.merge, merge)
    return {view.stack.tables[0].name: view.way for view in views}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("devices", "placement"), [(2, "mod"), (2, "div"), (8, "mod"), (8, "div")])
def test_routes_are_those_that_the_devices_compute(devices, placement, ragged):
    engine = make_engine(mesh(devices), placement)
    ids, weights = draw(devices, hot=1, ragged=ragged)
    assert check_exchanged(engine, ids, weights) == EXCHANGED


@pytest.mark.parametrize("batch_axes", [("p",), ("d",), ("p", "d")], ids=str)
@pytest.mark.parametrize("shard_axes", [("p",), ("d",), ("p", "d")], ids=str)
def test_routes_on_two_axes_are_those_that_the_devices_compute(shard_axes, batch_axes):
    devices = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("p", "d"))
    engine = make_engine(devices, batch_axes=batch_axes, shard_axes=shard_axes)
    ids, weights = draw(1, hot=1, ragged=batch_axes == ("d",))
    assert check_exchanged(engine, ids, weights) == EXCHANGED
