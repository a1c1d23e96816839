"""`Prefetcher`: what its loop gets, in which order, in one loop or several."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import facade_cases
import numpy as np
import pytest
from data_cases import SIZE, batch, engine, number_of, source

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.data import Prefetcher


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_batches_come_in_order(depth):
    with Prefetcher(engine(), source(20), depth) as batches:
        seen = [(number_of(placed), number) for placed, number in batches]
    assert seen == [(number, number) for number in range(20)]


def test_what_surrounds_the_features_is_kept():
    """A plain tuple begins with features; anything else is features."""
    assert [number_of(placed) for placed in Prefetcher(engine(), map(batch, range(3)))] == [0, 1, 2]
    label = object()
    [(placed, first, second)] = Prefetcher(engine(), [(batch(5), label, None)])
    assert (number_of(placed), first, second) == (5, label, None)
    [(placed,)] = Prefetcher(engine(), [(batch(6),)])
    assert number_of(placed) == 6


def test_weights_beside_the_features():
    config = {"x": FeatureConfig(TableConfig(9, 1, combiner="sum", name="t"))}
    weighing = EmbeddingEngine(config, mesh=engine().layout.axes.mesh)
    ids, weights = {"x": np.ones((4, 2), np.int32)}, {"x": np.full((4, 2), 0.25, np.float32)}
    [(placed, label)] = Prefetcher(weighing, [(ids, weights, "label")], weighted=True)
    expected = weighing.place(ids, weights)
    np.testing.assert_array_equal(placed.packed, expected.packed)
    assert (placed.spec, label) == (expected.spec, "label")
    for item in (ids, (ids,)):
        with pytest.raises(TypeError, match=r"expected a tuple \(features, weights, …\), got "):
            next(Prefetcher(weighing, [item], weighted=True))
    with pytest.raises(TypeError, match=r"expected a tuple \(features, …\), got a tuple of 0"):
        next(Prefetcher(weighing, [()]))


def test_options_of_place():
    [placed] = Prefetcher(engine(), [batch(0)], training=False)
    assert placed.spec.routed == "lookup"
    spec = engine().place(batch(0)).spec
    longer = {"x": RaggedIds.from_lists([[1, 2, 3]] * SIZE)}
    with pytest.raises(ValueError, match="feature 0: expected batch 4"):
        next(Prefetcher(engine(), [longer], spec=spec))


def test_a_bad_depth_and_no_iterable_are_refused():
    for depth in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="depth: expected an integer >= 1"):
            Prefetcher(engine(), [], depth)
    with pytest.raises(TypeError, match="batches: expected an iterable, got int"):
        Prefetcher(engine(), 3)


def test_a_loop_goes_on_where_the_last_one_stopped_and_is_the_only_one():
    batches = Prefetcher(engine(), source(7))
    assert next(batches)[1] == 0
    assert [number for _, number in itertools.islice(batches, 2)] == [1, 2]
    for _, number in batches:
        assert number == 3
        with pytest.raises(RuntimeError, match="expected one loop at a time, got a second iter"):
            iter(batches)
        break
    assert [number for _, number in batches] == [4, 5, 6]


@pytest.mark.parametrize("how", ["to its end", "closed"])
def test_a_pass_is_over_once(how):
    """A second epoch over the same prefetcher would have no batches, silently."""
    batches = Prefetcher(engine(), [batch(0)] * 3)
    if how == "closed":
        batches.close()
    else:
        assert len(list(batches)) == 3
    with pytest.raises(RuntimeError, match="make a new Prefetcher for each pass over the data"):
        iter(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_several_threads_share_the_batches():
    batches = Prefetcher(engine(), source(60))

    def take():
        return list(iter(lambda: next(batches, None), None))

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(take) for _ in range(4)]
    assert sorted(number for loop in loops for _, number in loop.result()) == list(range(60))


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_the_stateful_api_takes_placed_batches(pipelined):
    """The bits are those of `enqueue` alone."""
    options = {"pipeline_execution_with_tensor_core": pipelined}
    embedding, other = (facade_cases.make_embedding(**options) for _ in "ab")
    with Prefetcher(embedding.engine, map(facade_cases.batch, range(6))) as batches:
        if pipelined:
            embedding.enqueue(next(batches))
            other.enqueue(facade_cases.batch(0))
        for number, placed in enumerate(batches, int(pipelined)):
            embedding.enqueue(placed)
            other.enqueue(facade_cases.batch(number))
            for one in (embedding, other):
                one.apply_gradients(facade_cases.gradients(one.dequeue()))
    facade_cases.assert_same(embedding.state, other.state)
    with pytest.raises(ValueError, match="weights and spec: expected None with a Batch"):
        embedding.enqueue(placed, weights=facade_cases.batch(0))
    with pytest.raises(ValueError, match="Batch"):
        embedding.enqueue(engine().place(batch(0)))
    assert embedding.waiting == pipelined
