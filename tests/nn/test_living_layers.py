"""Layers whose ids are keys: evaluation, and what is refused; `test_embeddings` has more."""

import copy

import jax
import numpy as np
import pytest
from facade_cases import assert_same
from flax import nnx
from nn_models import activations_of, mesh_of, train_step

import tpu_embed
from tpu_embed import TableConfig, nn
from tpu_embed import optimizers as o

NAMES = ("films", "tags")


def _tables():
    films = tpu_embed.DynamicVocabulary(ttl=4)
    tags = tpu_embed.DynamicVocabulary(admit_after=2, unseen="shared")
    rule = o.Adam(0.125)
    return {
        "films": TableConfig(40, 4, name="films", vocabulary=films, optimizer=rule),
        "tags": TableConfig(12, 2, name="tags", vocabulary=tags, combiner="sum", optimizer=rule),
    }


def _model(devices=2, seed=0):
    def layer(table):
        return nn.EmbeddingBag(table, mesh=mesh_of(devices), rngs=nnx.Rngs(seed))

    return nnx.Dict({name: layer(table) for name, table in _tables().items()})


def _maps(layer):
    """Return the maps of a layer or an engine."""
    return getattr(layer, "engine", layer).vocabularies


def _keys(step):
    rng = np.random.default_rng(step)
    films = (rng.integers(0, 50, (24, 3)) + step) * (2**40 + 3)
    return {"films": films, "tags": rng.integers(0, 20, 24) + 10**12}


def _train(model, steps):
    for step in steps:
        train_step(model, nn.place(model, _keys(step)))


def test_evaluation_learns_nothing():
    model = _model()
    _train(model, range(2))
    batches = nn.place(model, _keys(1), training=False)
    assert_same(nnx.jit(activations_of)(model, batches), activations_of(model, batches))
    assert [_maps(model[name]).placed for name in NAMES] == [2, 2]
    _train(model, range(2, 12))
    with pytest.raises(ValueError, match="admit"):
        model["films"](batches["films"])  # its rows are other keys' by now
    late = nnx.jit(activations_of)(model, batches)
    assert np.isnan(np.asarray(late["films"])).all()


def test_a_jit_refuses_to_train_on_a_batch_whose_rows_are_other_keys():
    options = {"optimizer": o.Adagrad(0.5), "vocabulary": tpu_embed.DynamicVocabulary()}
    embed = nn.Embed(8, 2, **options, rngs=nnx.Rngs(0))
    model = nnx.Dict(films=embed)
    batches = [nn.place(model, {"films": np.arange(8) + 8 * step}) for step in range(3)]
    train_step(model, batches[2])
    before = jax.tree.map(np.array, (embed.embedding, embed.rows.logical_slots))
    assert np.isnan(train_step(model, batches[0]))
    assert_same((embed.embedding, embed.rows.logical_slots), before)
    state = embed.rows.state
    assert (int(state.step), int(state.counters["refused_batches"])) == (1, 1)


def test_an_embed_of_keys():
    options = {"optimizer": o.SGD(0.5), "vocabulary": tpu_embed.DynamicVocabulary()}
    embed = nn.Embed(16, 4, **options, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    keys = np.array([[7, 10**15], [7, -1]])
    batch = nn.place(embed, keys)
    found = np.asarray(embed(batch))
    np.testing.assert_array_equal(found[0, 0], found[1, 0])
    assert found.any(-1).tolist() == [[True, True], [True, False]]
    nn.fused_value_and_grad(lambda embed: embed(batch).sum())(embed)
    changed = np.asarray(embed(nn.place(embed, keys, training=False)))
    np.testing.assert_array_equal(changed[0], found[0] - np.array([[1.0], [0.5]], np.float32))


def test_what_is_refused_changes_nothing():
    model = _model()
    films, keys = model["films"], _keys(0)["films"]
    jitted = nnx.jit(lambda layer, keys: layer(keys))
    for call, given in ((films, (keys,)), (jitted, (films, np.zeros((8, 3), np.int32)))):
        with pytest.raises(ValueError, match=r"got keys; .*layer.place"):
            call(*given)
    for paths in ({**_keys(0), "users": np.arange(8)}, {"films": keys, "users": 0}):
        with pytest.raises(ValueError, match="paths among"):
            nn.place(model, paths)
    assert (_maps(films).placed, len(_maps(films))) == (0, 0)
    _train(model, [0, 1])
    with pytest.raises(TypeError, match="Vocabularies"):
        copy.deepcopy(model)
    stale = nnx.clone(model)  # it shares the maps, and may train until the other does
    _train(model, [2])
    with pytest.raises(ValueError, match="admitted before"):
        nn.place(stale, _keys(3))
    _train(model, [3])
