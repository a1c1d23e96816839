"""`TPUEmbedding.adopt` does what `EmbeddingEngine.adopt` does, and looks at both queues."""

import signal
import threading

import jax
import numpy as np
import pytest
from adopt_cases import contents, draw, engine, features, map_contents
from facade_cases import make_embedding_of

from tpu_embed import DynamicVocabulary, FeatureConfig, TableConfig, optimizers
from tpu_embed.vocabulary import Vocabularies

SMALL = {"capacity": 9}
LARGE = {"capacity": 20, "on_host": ("items", "tags"), "device_rows": 40}


def embedding(devices, pipelined, **options):
    made, options = features(placement="mod", **options), {"seed": 3}
    options |= {"pipeline_execution_with_tensor_core": pipelined}
    return make_embedding_of(made, None, devices, **options)


def gradients_of(activations):
    return jax.tree.map(lambda a: np.cos(np.asarray(a)), activations)


def train(made, batches):
    """Train on batches; return their activations."""
    found = []
    for batch in batches:
        made.enqueue(batch)
        found.append(jax.tree.map(np.asarray, made.dequeue()))
        made.apply_gradients(gradients_of(found[-1]))
    return found


def train_engine(made, state, batches):
    """Return the state after batches, and their activations."""
    found = []
    for batch in batches:
        state, batch = made.admit(state, made.place(batch))
        found.append(made.lookup(state, batch))
        state = made.update_in_place(state, batch, gradients_of(found[-1]))
    return state, found


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.whole
def test_both_apis_adopt_alike(pipelined):
    rng = np.random.default_rng(0)
    batches = [draw(rng, 30) for _ in range(6)]
    small, large = embedding(1, pipelined, **SMALL), embedding(2, pipelined, **LARGE)
    train(small, batches[:4])
    own = draw(rng)
    large.enqueue(own, training=False)
    large.enqueue(own)
    engines = (
        engine(1, lookahead=int(pipelined), **SMALL),
        engine(2, lookahead=int(pipelined), **LARGE),
    )
    state, _ = train_engine(engines[0], engines[0].init(jax.random.key(3)), batches[:4])
    assert contents(small.engine, small.state) == contents(engines[0], state)
    with pytest.warns(UserWarning, match="2 from before, now forgotten"):
        large.adopt(small)
    state = engines[1].adopt(state, engines[0])
    assert large.waiting == 0
    found = train(large, batches[4:])
    state, expected = train_engine(engines[1], state, batches[4:])
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert contents(large.engine, large.state) == contents(engines[1], state)
    assert map_contents(large.engine) == map_contents(engines[1])
    assert small.engine.vocabularies.capacity("items") == 9
    train(small, batches[4:])  # it goes on by itself


def plain(devices, size=16, pipelined=False, **options):
    config = {"x": FeatureConfig(TableConfig(size, 2, name="t", **options))}
    options = {"seed": devices}  # so that two differ
    options |= {"pipeline_execution_with_tensor_core": pipelined}
    return make_embedding_of(config, optimizers.SGD(0.5), devices, **options)


def test_training_batches_of_the_other_must_be_done():
    one, other, ids = plain(1), plain(2), {"x": np.arange(8)}
    other.enqueue(ids)
    refusal = r"adopt: other: expected no training batch .*, got 1; dequeue them and apply"
    with pytest.raises(RuntimeError, match=refusal):
        one.adopt(other)
    activations = other.dequeue()
    with pytest.raises(RuntimeError, match=refusal):
        one.adopt(other)
    other.apply_gradients(activations)
    one.adopt(other)
    assert int(one.state.step) == 1


@pytest.mark.parametrize("pipelined", [False, True])
def test_own_batches_are_looked_up_again(pipelined):
    one, other, ids = plain(1, pipelined=pipelined), plain(2), {"x": np.arange(8)}
    for made in (one, other):
        made.enqueue(ids, training=False)
    one.adopt(other)
    assert (one.waiting, other.waiting) == (1, 1)
    np.testing.assert_array_equal(*(np.asarray(made.dequeue()["x"]) for made in (one, other)))


def test_what_is_refused_changes_nothing():
    one, other = plain(1), plain(1, size=17)
    one.build()
    before = one.retrieve()[0]["t"]
    with pytest.raises(ValueError, match=r"table 't': vocabulary size: expected 16, got 17"):
        one.adopt(other)
    with pytest.raises(TypeError, match=r"other: expected a TPUEmbedding, got EmbeddingEngine"):
        one.adopt(other.engine)
    np.testing.assert_array_equal(one.retrieve()[0]["t"], before)


def test_two_that_adopt_each_other_do_not_wait_for_ever():
    one, other = plain(1), plain(2)

    def many(mine, theirs):
        for _ in range(10):
            mine.adopt(theirs)

    pairs = (one, other), (other, one)
    threads = [threading.Thread(target=many, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    found = [made.retrieve()[0]["t"] for made in (one, other)]
    np.testing.assert_array_equal(*found)


@pytest.mark.whole
def test_after_an_interrupt_tables_and_maps_belong_together(monkeypatch):
    small, large = (plain(1, size, vocabulary=DynamicVocabulary()) for size in (8, 16))
    train(small, [{"x": np.arange(8)}])
    load = Vocabularies.load_states

    def interrupted(*args):
        load(*args)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Vocabularies, "load_states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            large.adopt(small)
    said = "expected the newest state of these maps, got none"  # the maps have changed alone
    with pytest.raises(RuntimeError, match=said):
        train(large, [{"x": np.arange(8)}])
    large.adopt(small)
    keys = [{"x": np.arange(first, first + 8)} for first in (0, 4)]
    found, expected = train(large, keys), train(small, keys[:1])
    np.testing.assert_array_equal(found[0]["x"], expected[0]["x"])
    assert len(large.engine.vocabularies) == 12
