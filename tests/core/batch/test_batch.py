"""Ids are packed into one array, and each device unpacks the same ids."""

import dataclasses

import jax
import numpy as np
import pytest
from facade_cases import mesh
from route_cases import located_by_device, physical_rows

import tpu_embed
from tpu_embed import FeatureConfig, QuantizationConfig, RaggedIds, SparseIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.core.batch import view_stacks

B = 8


def make_engine(devices, dtype="float32", **options):
    item = TableConfig(23, 4, name="item", dtype=dtype, combiner="sum")
    shop = TableConfig(5, 4, name="shop", placement="div", dtype=dtype, combiner="sum")
    features = {
        "bag": FeatureConfig(item),
        "clicks": FeatureConfig(item),
        "first": FeatureConfig(item, max_sequence_length=2),
        "here": FeatureConfig(shop),
    }
    return tpu_embed.EmbeddingEngine(features, o.SGD(0.1), mesh=mesh(devices), **options)


def draw(*, ragged, seed=0):
    """Return ids, and the same as lists of bags of every example, by feature."""
    rng = np.random.default_rng(seed)
    ids = {
        "bag": rng.integers(-1, 23, (B, 3)),
        "first": rng.integers(-1, 23, (B, 3)),
        "here": rng.integers(-1, 5, (B,)),
    }
    clicks = [rng.integers(0, 23, rng.integers(0, 4)).tolist() for _ in range(B)]
    padded = np.array([bag + [-1] * (3 - len(bag)) for bag in clicks])
    ids["clicks"] = RaggedIds.from_lists(clicks) if ragged else padded
    bags = {
        "bag": [[row] for row in ids["bag"].tolist()],
        "clicks": [[bag] for bag in clicks],
        "first": [[[number] for number in row[:2]] for row in ids["first"].tolist()],
        "here": [[[number]] for number in ids["here"].tolist()],
    }
    return ids, bags


def expected_line(engine, g, bags, weights, examples):
    """Return (row, bag, weight) of a device's ids of stack g, feature after feature."""
    found, number = [], 0
    stack = engine.layout.stacks[g]
    for f in engine.layout.features_by_stack[g]:
        for example in examples:
            feature = engine.layout.features[f]
            name, position = feature.path, 0
            for bag in bags[name][example]:
                for row in bag:
                    if row >= 0:
                        weight = weights[name][example][position] if weights else 1.0
                        found.append((int(stack.physical(row, feature.table)), number, weight))
                    position += 1
                number += 1
    return found


def unpacked_lines(engine, batch, g):
    """Return the same, unpacked from the batch, a list a device."""
    axes, stack = engine.layout.axes, engine.layout.stacks[g]
    found, lines = located_by_device(engine, batch)[g], []
    assert all((ids.sum_index is not None) == (axes.replicas > 1) for ids in found)
    for device, ids in enumerate(found):
        rows, bags = physical_rows(axes, stack, found, device).tolist(), ids.bags
        gains = [1.0] * len(rows) if ids.gains is None else ids.gains.tolist()
        assert (np.diff(bags) >= 0).all()
        triples = zip(rows, bags.tolist(), gains, strict=True)
        lines.append([triple for triple in triples if triple[0] >= 0])
    return lines


def check(engine, batch, bags, weights=None):
    local = B // batch.spec.replicas
    for g in range(len(engine.layout.stacks)):
        for device, line in enumerate(unpacked_lines(engine, batch, g)):
            examples = range(device * local, (device + 1) * local)
            assert line == expected_line(engine, g, bags, weights, examples)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("stack_tables", [True, False])
@pytest.mark.quick(6)
def test_what_is_packed_is_unpacked(devices, ragged, stack_tables):
    engine = make_engine(devices, stack_tables=stack_tables)
    for seed in range(3):
        ids, bags = draw(ragged=ragged, seed=seed)
        batch = engine.place(ids)
        assert batch.packed.shape[0] == devices
        assert batch.packed.dtype == np.int32
        check(engine, batch, bags)


def draw_weights(rng):
    """Return weights of "bag" alone; those of other features of its stack become one."""
    weights = rng.normal(size=(B, 3)).astype(np.float32)
    by_example = {name: [[1.0] * 3] * B for name in ("clicks", "first", "here")}
    return {"bag": weights}, by_example | {"bag": weights.tolist()}


@pytest.mark.parametrize("ragged", [False, True])
def test_weights_travel_with_their_ids(ragged):
    engine = make_engine(2)
    ids, bags = draw(ragged=ragged)
    given, expected = draw_weights(np.random.default_rng(1))
    given |= dict.fromkeys(("clicks", "first", "here"))
    batch = engine.place(ids, given)
    weighted = [engine.layout.stacks[g].placement == "mod" for g in range(2)]
    assert [view.has_gains for view in view_stacks(batch.spec, engine.layout)] == weighted
    check(engine, batch, bags, expected)


def test_float64_weights_take_two_numbers():
    with jax.enable_x64(True):
        engine = make_engine(2, dtype="float64")
        ids, bags = draw(ragged=True)
        weights = np.random.default_rng(1).normal(size=(B, 3))
        given = dict.fromkeys(("clicks", "first", "here")) | {"bag": weights}
        expected = {name: [[1.0] * 3] * B for name in given} | {"bag": weights.tolist()}
        check(engine, engine.place(ids, given), bags, expected)


def test_sparse_and_ragged_pack_alike():
    engine = make_engine(2)
    ids, _ = draw(ragged=True)
    ragged = engine.place(ids)
    lists = [bag.tolist() for bag in np.split(ids["clicks"].values, ids["clicks"].row_splits[1:-1])]
    sparse = engine.place(ids | {"clicks": SparseIds.from_lists(lists)})
    assert sparse.spec == ragged.spec
    np.testing.assert_array_equal(sparse.packed, ragged.packed)


@pytest.mark.parametrize("odd", ["strided", "reversed", "broadcast", "in a record", "big-endian"])
def test_ids_and_weights_may_lie_anywhere_in_memory(odd):
    """The compiled loops read contiguous arrays, which a column of a matrix is not."""

    def laid(array):
        record = np.zeros(array.shape, [("odd", "i1"), ("one", array.dtype)])
        record["one"] = array
        return {
            "strided": np.stack([array, array], axis=1)[:, 0],
            "reversed": array[::-1].copy()[::-1],
            "broadcast": np.broadcast_to(array[0], array.shape),
            "in a record": record["one"],
            "big-endian": array.astype(array.dtype.newbyteorder(">")),
        }[odd]

    engine = make_engine(2)
    ids, _ = draw(ragged=True)
    clicks = ids["clicks"]
    values, splits = laid(clicks.values.astype(np.int32)), clicks.row_splits
    weights = laid(np.arange(1, 1 + values.size, dtype=np.float32))
    rows = np.repeat(np.arange(B), np.diff(splits))
    indices = np.stack([rows, np.arange(rows.size) - splits[rows]], axis=1)
    plain = RaggedIds(
        np.array(values, np.int32, order="C"), splits, np.array(weights, np.float32, order="C")
    )
    expected = engine.place(ids | {"clicks": plain})
    for one in (RaggedIds(values, splits, weights), SparseIds(indices, values, (B, 3), weights)):
        placed = engine.place(ids | {"clicks": one})
        np.testing.assert_array_equal(placed.packed, expected.packed)


def test_a_dense_feature_packs_flat_beside_a_ragged_one():
    engine = make_engine(2)
    ids, bags = draw(ragged=True)
    dense, _ = draw(ragged=False)
    spec = engine.place(ids).spec
    check(engine, engine.place(dense, spec=spec), bags)
    assert all(
        spec.feature_shapes[f].width is None
        for f, feature in enumerate(engine.layout.features)
        if feature.path == "clicks"
    )


def test_a_changed_batch_is_refused():
    engine = make_engine(2)
    batch = engine.place(draw(ragged=False)[0])
    for packed in (batch.packed[:, :-1], batch.packed[None], batch.packed[:1]):
        with pytest.raises(ValueError, match="batch: expected a Batch of this engine's place"):
            dataclasses.replace(batch, packed=packed).check(engine.layout)
    with pytest.raises(ValueError, match=r"placed for mesh \[\('d', 2\)\], not"):
        batch.check(make_engine(1).layout)


@pytest.mark.parametrize("other", [{"placement": "div"}, {"vocabulary_size": 24}], ids=str)
def test_a_batch_whose_rows_mean_others_is_refused(other):
    """Features, devices and the shape of the batch are the same."""

    def engine(**options):
        table = TableConfig(**{"vocabulary_size": 16, "dim": 2, "name": "item", **options})
        return tpu_embed.EmbeddingEngine({"x": FeatureConfig(table)}, mesh=mesh(8))

    batch = engine().place({"x": np.arange(8)})
    batch.check(engine(quantization_config=QuantizationConfig(8, -1.0, 1.0)).layout)
    with pytest.raises(ValueError, match="batch: expected a Batch of this engine's place"):
        batch.check(engine(**other).layout)


def test_a_feature_without_bags_stands_beside_others():
    table = TableConfig(16, 2, name="item")
    features = {"none": FeatureConfig(table), "some": FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(2))
    batch = engine.place({"none": np.zeros((8, 0, 3), int), "some": np.arange(16).reshape(8, 2)})
    activations = engine.lookup(engine.init(jax.random.key(0)), batch)
    assert {name: a.shape for name, a in activations.items()} == {"none": (8, 0, 2), "some": (8, 2)}
