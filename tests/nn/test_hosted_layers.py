"""Layers of tables on the host: the bits of those on the devices, saved and restored."""

from typing import Any

import jax
import numpy as np
import pytest
from facade_cases import assert_same
from flax import nnx
from nn_models import activations_of, loss_of, mesh_of

import tpu_embed
from tpu_embed import DynamicVocabulary, HostStorage, TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.io import restore_modules, save_modules

ROWS = {"films": 60, "tags": 40, "seen": 40}
B = 8


def _model(hosted, devices=2, seed=0, rows=34):
    """Return layers of row numbers, of keys and of sequences, all on the host or none."""
    drawn = jax.nn.initializers.normal(0.3)
    storage = HostStorage(device_rows=rows) if hosted else None
    where: dict[str, Any] = {"mesh": mesh_of(devices), "rngs": nnx.Rngs(seed)}
    options: dict[str, Any] = {"initializer": drawn, "storage": storage, "optimizer": o.Adam(0.25)}
    tags = TableConfig(ROWS["tags"], 2, name="tags", vocabulary=DynamicVocabulary(), **options)
    seen = TableConfig(ROWS["seen"], 2, name="seen", **options)
    own = {"optimizer": o.Adagrad(0.5), "embedding_init": drawn, "storage": storage}
    return nnx.Dict(
        films=nn.Embed(ROWS["films"], 4, name="films", **own, **where),
        tags=nn.EmbeddingBag(tags, **where),
        seen=nn.EmbeddingBag(seen, jagged=True, **where),
    )


def _ids(step):
    rng = np.random.default_rng(step)
    seen = [rng.integers(0, ROWS["seen"], rng.integers(0, 5)).tolist() for _ in range(B)]
    return {
        "films": rng.integers(0, ROWS["films"], (B, 2)),
        "tags": (rng.integers(0, 30, (B, 2)) + step) * (2**40 + 3),
        "seen": tpu_embed.RaggedIds.from_lists(seen),
    }


def _found(model, batches):
    """Return the activations of layers; sequences padded, whatever room there was for them."""
    every = activations_of(model, batches).items()
    return {name: x.to_padded(4)[0] if name == "seen" else x for name, x in every}


@nnx.jit(donate_argnums=0)
def train_step(model, batches):
    return nn.fused_value_and_grad(lambda model: loss_of(_found(model, batches)))(model)[0]


def _train(model, steps):
    return [np.asarray(train_step(model, nn.place(model, _ids(step)))) for step in steps]


def _bag(layer):
    return getattr(layer, "rows", layer)


def _contents(model):
    """Return rows and slots of all ids and of all keys, and the steps."""
    found = {}
    for name, size in ROWS.items():
        bag = _bag(model[name])
        engine, state, ids = bag.engine, bag.state, np.arange(size)
        if name == "tags":
            found["keys"], ids = engine.vocabularies.keys(name)
        for slot in (None, *(["accumulators"] if name == "films" else ["momenta", "velocities"])):
            found[f"{name} {slot}"] = engine.rows(state, name, ids, slot=slot)
        found[f"{name} step"] = int(state.step)
    return found


ACTIONS = ["train", "train", "look", "drop", "restore"]


@pytest.mark.parametrize(("seed", "devices"), [(0, 2), (1, 4), (2, 1)])
@pytest.mark.whole
def test_random_calls_equal_those_of_layers_on_the_devices(seed, devices, tmp_path):
    rng, done = np.random.default_rng(seed), set()
    hosted, plain = _model(True, devices), _model(False, devices)
    moved = 0
    for number in range(30):
        kind, ids = rng.choice(ACTIONS), _ids(number)
        done.add(str(kind))
        if kind == "train":
            losses = train_step(hosted, nn.place(hosted, ids))
            assert_same(losses, train_step(plain, nn.place(plain, ids)))
        elif kind == "look":
            looked = [nn.place(each, ids, training=False) for each in (hosted, plain)]
            expected = _found(plain, looked[1])
            assert_same(_found(hosted, looked[0]), expected)
            assert_same(nnx.jit(_found)(hosted, looked[0]), expected)
            assert looked[0]["films"].visit_rows
        elif kind == "drop":
            for name in ROWS:
                _bag(hosted[name]).engine.vocabularies.rewind(_bag(hosted[name]).state)
        else:
            save_modules(tmp_path / f"{number}", {"model": hosted})
            hosted = _model(True, devices, seed=1, rows=int(rng.integers(34, 40)))
            restore_modules(tmp_path / f"{number}", {"model": hosted})
        counters = _bag(hosted["films"]).engine.storage.counters["films"]
        moved = max(moved, min(counters["sent"], counters["brought"]))
    assert done == {*ACTIONS}
    assert moved > 0
    assert_same(_contents(hosted), _contents(plain))


WAYS = [(True, True), (False, True), pytest.param(True, False, marks=pytest.mark.whole)]


@pytest.mark.whole
@pytest.mark.parametrize(("saved", "restored"), WAYS)
@pytest.mark.quick(1)
def test_saved_and_restored_to_the_host_or_from_it(saved, restored, tmp_path):
    model = _model(saved)
    _train(model, range(3))
    save_modules(tmp_path / "early", {"model": model})
    _train(model, range(3, 5))
    save_modules(tmp_path / "saved", {"model": model})  # of the host's rows, those that changed
    other = _model(restored, devices=4, seed=1, rows=40)
    _train(other, range(50, 53))  # what it knew is replaced
    restore_modules(tmp_path / "saved", {"model": other})
    assert_same(_contents(other), _contents(model))
    if restored:  # the next save goes on from this checkpoint if that has rows by id
        assert len(_bag(other["films"]).engine.storage.saves) == saved
    _train(model, [5])
    _train(other, [5])
    assert_same(_contents(other), _contents(model))
    save_modules(tmp_path / "again", {"model": other})
    third = nnx.eval_shape(lambda: _model(True, seed=2))
    restore_modules(tmp_path / "again", {"model": third})
    assert_same(_contents(third), _contents(model))


def test_what_a_layer_on_the_host_refuses():
    model = _model(True)
    films = model["films"]
    with pytest.raises(ValueError, match=r"table 'films': expected a Batch .*layer.place"):
        films(np.arange(8))
    with pytest.raises(ValueError, match=r"engine.rows"):
        _ = films.embedding
    with pytest.raises(ValueError, match="at most 34 distinct ids"):
        nn.place(model, _ids(0) | {"films": np.arange(40).reshape(8, 5)})
    assert [_bag(model[name]).engine.vocabularies.placed for name in ROWS] == [0, 0, 0]


def test_inputs_by_name_are_looked_up_together():
    hosted, plain = layers = [_bag(_model(on_host)["films"]) for on_host in (True, False)]

    @nnx.jit(donate_argnums=0)
    def step(layer, batch):
        return nn.fused_value_and_grad(lambda layer: loss_of(layer(batch)))(layer)[0]

    for number in range(4):
        ids = {"history": _ids(number)["films"], "item": _ids(50 + number)["films"][:, 0]}
        assert_same(*(step(layer, nn.place(layer, ids)) for layer in layers))
        looked = [nn.place(layer, ids, training=False) for layer in layers]
        assert_same(hosted(looked[0]), plain(looked[1]))
    assert_same(*(one.engine.rows(one.state, "films", np.arange(60)) for one in layers))
