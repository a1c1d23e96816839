"""Layers whose ids are keys: the same bits as the engine's, saved and restored."""

import copy

import jax
import numpy as np
import pytest
from facade_cases import assert_same
from flax import nnx
from nn_models import activations_of, loss_of, mesh_of, train_step

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.io import restore_modules, save_modules

NAMES = ("films", "tags")


def _tables():
    films = tpu_embed.DynamicVocabulary(ttl=4)
    tags = tpu_embed.DynamicVocabulary(admit_after=2, unseen="shared")
    rule = o.Adam(0.125)
    return {
        "films": TableConfig(40, 4, name="films", vocabulary=films, optimizer=rule),
        "tags": TableConfig(12, 2, name="tags", vocabulary=tags, combiner="sum", optimizer=rule),
    }


def _model(devices=8, seed=0):
    def layer(table):
        return nn.EmbeddingBag(table, mesh=mesh_of(devices), rngs=nnx.Rngs(seed))

    return nnx.Dict({name: layer(table) for name, table in _tables().items()})


def _maps(layer):
    """Return the maps of a layer or an engine."""
    maps = getattr(layer, "engine", layer).vocabularies
    assert maps is not None
    return maps


def _keys(step):
    rng = np.random.default_rng(step)
    films = (rng.integers(0, 50, (24, 3)) + step) * (2**40 + 3)
    return {"films": films, "tags": rng.integers(0, 20, 24) + 10**12}


def _train(model, steps):
    for step in steps:
        train_step(model, nn.place(model, _keys(step)))


def _by_key(layer):
    """Return row and slots of every key of a layer."""
    (name,) = layer.engine.table_configs
    keys, rows = (np.asarray(one) for one in _maps(layer).keys(name))
    arrays, order = {"rows": layer.embedding, **layer.logical_slots}, np.argsort(keys)
    per_row = {n: np.asarray(x)[rows[order]] for n, x in arrays.items() if np.ndim(x)}
    return {"keys": keys[order], **per_row}


def _assert_same_models(one, other):
    for name in NAMES:
        assert_same(_by_key(one[name]), _by_key(other[name]))


def test_two_layers_equal_the_engine():
    model = _model()
    engines = {
        name: tpu_embed.EmbeddingEngine({name: FeatureConfig(table)}, mesh=mesh_of(8))
        for name, table in _tables().items()
    }
    states = {name: one.init(nnx.Rngs(0).params()) for name, one in engines.items()}
    for step in range(20):
        _train(model, [step])
        for name, engine in engines.items():
            placed = engine.place({name: _keys(step)[name]})
            states[name], batch = engine.admit(states[name], placed)
            gradients = jax.grad(loss_of)(engine.lookup(states[name], batch))
            states[name] = engine.update(states[name], batch, gradients)
    for name, engine in engines.items():
        layer = model[name]
        assert _maps(layer).counters == _maps(engine).counters
        assert_same(_maps(layer).keys(name), _maps(engine).keys(name))
        assert_same(layer.embedding, engine.tables(states[name])[name])
        assert_same(layer.logical_slots, engine.slots(states[name])[name])
        assert int(layer.step[...]) == 20
    assert _maps(model["films"]).counters["films"]["evicted"] > 0


@pytest.mark.whole
def test_saved_on_8_devices_and_continued_on_3(tmp_path):
    unbroken = _model()
    _train(unbroken, range(5))
    save_modules(tmp_path / "saved", {"model": unbroken})
    other = _model(devices=3, seed=1)
    _train(other, range(50, 52))  # what it knew is replaced
    restore_modules(tmp_path / "saved", {"model": other})
    _assert_same_models(other, unbroken)
    _train(unbroken, range(5, 9))
    _train(other, range(5, 9))
    _assert_same_models(other, unbroken)


def test_evaluation_learns_nothing():
    model = _model()
    _train(model, range(2))
    before = [_maps(model[name]).placed for name in NAMES]
    batches = nn.place(model, _keys(1), training=False)
    assert_same(nnx.jit(activations_of)(model, batches), activations_of(model, batches))
    assert [_maps(model[name]).placed for name in NAMES] == before == [2, 2]
    for step in range(2, 12):
        _train(model, [step])
    with pytest.raises(ValueError, match="admit"):
        model["films"](batches["films"])  # its rows are other keys' by now
    late = nnx.jit(activations_of)(model, batches)
    assert np.isnan(np.asarray(late["films"])).all()


def test_a_jit_refuses_to_train_on_a_batch_whose_rows_are_other_keys():
    vocabulary, rule = tpu_embed.DynamicVocabulary(), o.Adagrad(0.5)
    embed = nn.Embed(8, 2, optimizer=rule, vocabulary=vocabulary, rngs=nnx.Rngs(0))
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
    assert found.shape == (2, 2, 4)
    assert (found[0, 0] == found[1, 0]).all()
    assert found[0, 0].any()
    assert not found[1, 1].any()
    nn.fused_value_and_grad(lambda embed: embed(batch).sum())(embed)
    changed = np.asarray(embed(nn.place(embed, keys, training=False)))
    np.testing.assert_array_equal(changed[0], found[0] - np.array([[1.0], [0.5]], np.float32))


def test_what_is_refused_changes_nothing():
    model = _model()
    films, keys = model["films"], _keys(0)["films"]
    with pytest.raises(ValueError, match=r"got keys; .*layer.place"):
        films(keys)
    with pytest.raises(ValueError, match=r"got keys; .*layer.place"):
        nnx.jit(lambda layer, keys: layer(keys))(films, np.zeros((8, 3), np.int32))
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
