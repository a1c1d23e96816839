"""The order of bags of features that have batch sizes of their own."""

from fractions import Fraction

import numpy as np
from facade_cases import mesh
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig
from tpu_embed.core.batch import BatchSpec, StackSpec, view_stacks
from tpu_embed.core.ids import FeatureShape

FEATURES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=4)
"""Local batch size and bags per example, of several features."""


def view_of(features, devices, blocks):
    """Return the view of the only stack, of features of these sizes."""
    table = TableConfig(5, 2)
    configs = [FeatureConfig(table)] * len(features)
    engine = EmbeddingEngine(configs, mesh=mesh(devices), sum_blocks=blocks)
    shapes = tuple(
        FeatureShape(size * devices, (bags,), combines=True, width=1, weighted=False)
        for size, bags in features
    )
    spec = BatchSpec(devices, shapes, (StackSpec(tuple(range(len(features))), 0, 0, 0),))
    (view,) = view_stacks(spec, engine.layout)
    return view


@settings(max_examples=60)
@given(FEATURES, st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 4, 8, 11]))
def test_bags_are_in_batch_order(features, devices, blocks):
    """A loop over all bags, by the definition of the order and of the blocks."""
    view = view_of(features, devices, blocks)
    expected = sorted(
        (Fraction(e, size * devices), f, bag, e)
        for f, (size, bags) in enumerate(features)
        for e in range(size * devices)
        for bag in range(bags)
    )
    bags = view.bags.period
    found = [
        (f, period * bags.counts[f] // features[f][1] + e)
        for period in range(view.bags.periods * devices)
        for f, e in zip(bags.feature, bags.example, strict=True)
    ]
    assert found == [(f, e) for _, f, _, e in expected]
    # Counted feature by feature, the bags of a period are those of its first, second, ….
    order = bags.order or range(len(bags.feature))
    starts = np.cumsum([0, *bags.counts])
    assert [int(np.searchsorted(starts, n, side="right")) - 1 for n in order] == list(bags.feature)
    assert sorted(order) == list(range(len(bags.feature)))
    blocks_of = [place * view.layout.blocks // 1 for place, *_ in expected]
    assert view.block_starts.tolist() == [
        sum(block < number for block in blocks_of) for number in range(view.layout.blocks + 1)
    ]
    local = np.split(np.array(blocks_of), devices)
    firsts = [r * view.layout.blocks // devices for r in range(devices)]
    lasts = [int(numbers.max()) for numbers in local]
    spans = [last - first + 1 for first, last in zip(firsts, lasts, strict=True)]
    assert view.blocks_per_device == max(spans)


def test_features_of_one_size_have_one_example_in_a_period():
    view = view_of([(6, 1), (6, 2)], 2, 8)
    assert (view.bags.periods, view.bags.period.feature, view.bags.period.order) == (
        6,
        (0, 1, 1),
        (),
    )
