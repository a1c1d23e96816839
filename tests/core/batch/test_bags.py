"""How the bags of features with batch sizes of their own are numbered, and their blocks."""

import numpy as np
from facade_cases import mesh
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.core.batch import BatchSpec, StackSpec, view_stacks
from tpu_embed.core.ids import FeatureShape

FEATURES = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4
)
"""Local batch size, bags per example and ids per bag, of several features."""


def view_of(features, devices, blocks):
    """Return the view of the only stack, of features of these sizes."""
    table = TableConfig(5, 2)
    configs = [FeatureConfig(table)] * len(features)
    engine = EmbeddingEngine(configs, mesh=mesh(devices), sum_blocks=blocks)
    shapes = tuple(
        FeatureShape(size * devices, (bags,), combines=True, width=width, weighted=False)
        for size, bags, width in features
    )
    spec = BatchSpec(devices, shapes, (StackSpec(tuple(range(len(features))), 0, 0, 0),))
    (view,) = view_stacks(spec, engine.layout)
    return view


@settings(max_examples=60)
@given(FEATURES, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 4, 8, 11]))
def test_bags_and_blocks(features, devices, blocks):
    """Loops over all bags, by the definition of their numbers and of the blocks."""
    view = view_of(features, devices, blocks)
    places = [
        (f, example, bag)
        for f, (size, bags, _) in enumerate(features)
        for example in range(size)
        for bag in range(bags)
    ]
    widths = [features[f][2] for f, _, _ in places]
    found = view.dense_bags(np)
    if sum(widths):
        assert found.tolist() == np.repeat(np.arange(len(places)), widths).tolist()
        assert np.array_equal(view.dense_bags(), found)
    assert view.starts[-1] == len(places)
    for f, start in enumerate(view.starts[:-1]):
        assert places[start] == (f, 0, 0)
    number = view.layout.blocks
    if devices == 1:
        for f in range(len(features)):
            starts = np.asarray(view.block_starts(f, {})).tolist()
            mine = [i for i, place in enumerate(places) if place[0] == f]
            counted = [sum(i >= start for start in starts) for i in mine]
            assert counted == [places[i][1] * number // features[f][0] for i in mine]
    spans = []
    for replica in range(devices):
        last = max(
            ((replica + 1) * size - 1) * number // (size * devices) for size, _, _ in features
        )
        spans.append(last - replica * number // devices + 1)
    assert view.blocks_per_device == max(spans)


def test_a_jagged_feature_has_a_bag_for_each_place():
    shapes = (
        FeatureShape(4, (), combines=True, width=2, weighted=False),
        FeatureShape(4, (), combines=False, width=None, weighted=False, capacity=5),
    )
    table = TableConfig(5, 2)
    features = [FeatureConfig(table), FeatureConfig(table, jagged=True)]
    spec = BatchSpec(2, shapes, (StackSpec((0, 1), 0, 0, 0),))
    for blocks, starts in ((2, [2 + 2]), (4, [2 + 2, 2 + 2, 2 + 5])):
        engine = EmbeddingEngine(features, mesh=mesh(2), sum_blocks=blocks)
        (view,) = view_stacks(spec, engine.layout)
        assert (view.counts, view.widths, view.num_ids) == ((2, 5), (2, 1), 9)
        assert view.dense_bags(np).tolist() == [0, 0, 1, 1, 2, 3, 4, 5, 6]
        splits = {1: np.int32([[0, 2, 5]])}  # of the two examples, if it were the only device
        assert view.block_starts(1, splits).tolist() == starts
