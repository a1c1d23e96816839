"""Layers of keys stay in step: each call is done for all layers of a model, or for none."""

import signal
import threading
from typing import Any

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

ROWS = {"films": 12, "tags": 6}


def _tables(rows=None):
    rule, living = o.Adagrad(0.5), tpu_embed.DynamicVocabulary()
    return {
        name: TableConfig(size, 2, name=name, combiner="sum", vocabulary=living, optimizer=rule)
        for name, size in (rows or ROWS).items()
    }


def _model(devices=1, rows=None, seed=0):
    mesh = mesh_of(devices)
    return nnx.Dict(
        {
            name: nn.EmbeddingBag(table, mesh=mesh, rngs=nnx.Rngs(seed))
            for name, table in _tables(rows).items()
        }
    )


def _maps_of(one) -> Any:
    """Return the maps of a layer or an engine."""
    return getattr(one, "engine", one).vocabularies


def _maps(model):
    return [_maps_of(model[name]) for name in ROWS]


def _counts(model):
    return [(maps.placed, maps.admitted) for maps in _maps(model)]


def _keys(step):
    rng = np.random.default_rng(step)
    return {name: rng.integers(0, size + 4, (8, 2)) + step for name, size in ROWS.items()}


class _ReadLate:
    """Ids that are no integers; before they are read, another thread does something."""

    def __init__(self, run):
        self._run = run

    def __array__(self, dtype=None, copy=None):
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        thread.join(60)  # for ever if it waited for a turn that an evaluation holds
        return np.ones((8, 1))


def test_an_evaluation_that_is_refused_undoes_no_batch_of_another_thread():
    model, placed = _model(), []
    late = _ReadLate(lambda: placed.append(nn.ModelPlacer(model).place(_keys(1))))
    with pytest.raises(TypeError):
        nn.place(model, {"films": _keys(0)["films"], "tags": late}, training=False)
    assert len(placed) == 1
    assert _counts(model) == [(1, 0), (1, 0)]
    train_step(model, nn.admit(model, placed[0]))


def test_an_interrupt_admits_a_batch_in_all_layers(monkeypatch):
    model = _model()
    placed = nn.ModelPlacer(model).place(_keys(0))
    set_state = nn.EmbeddingBag.set_state

    def interrupted(layer, state):
        set_state(layer, state)
        if layer is model["films"]:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(nn.EmbeddingBag, "set_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nn.admit(model, placed)
    monkeypatch.undo()
    assert _counts(model) == [(1, 1), (1, 1)]
    train_step(model, nn.place(model, _keys(1)))


def test_an_embed_leaves_missing_keys_out():
    embed = nn.Embed(
        8,
        2,
        name="films",
        optimizer=o.SGD(0.5),
        vocabulary=tpu_embed.DynamicVocabulary(),
        mesh=mesh_of(1),
        rngs=nnx.Rngs(0),
    )
    masked = np.ma.array([[7, 8], [9, 10]], mask=[[False, True], [False, False]])
    found = np.asarray(embed(nn.place(embed, masked)))
    assert sorted(_maps_of(embed.rows).keys("films")[0].tolist()) == [7, 9, 10]
    assert not found[0, 1].any()
    ragged: Any = [[1, 2], [3]]
    with pytest.raises(TypeError, match="expected an array, got RaggedIds"):
        embed.place(ragged)


@pytest.mark.parametrize("rows", [{"films": 5, "tags": 3}, {"films": 30, "tags": 9}], ids=str)
@pytest.mark.whole
def test_another_capacity_keeps_the_best_keys(tmp_path, rows):
    model = _model(devices=8)
    for step in range(4):
        train_step(model, nn.place(model, _keys(step)))
    save_modules(tmp_path / "saved", {"model": model})
    other = nnx.eval_shape(lambda: _model(1, rows, seed=1))
    restore_modules(tmp_path / "saved", {"model": other})
    for name, maps, kept in zip(ROWS, _maps(model), _maps(other), strict=True):
        state = maps.state().maps[name]
        best = np.lexsort((-state.rows, -state.last_seen))[: rows[name]]  # of equals, high rows
        keys, places = kept.keys(name)
        assert sorted(keys) == sorted(state.keys[best])
        was = dict(zip(state.keys.tolist(), state.rows.tolist(), strict=True))
        before = [was[key] for key in keys.tolist()]
        assert_same(
            np.asarray(other[name].embedding)[places], np.asarray(model[name].embedding)[before]
        )
    train_step(other, nn.place(other, _keys(4)))  # 16 ids of each, as before


class _Plain:
    """The same layers as engines, in a loop by hand: batches are placed only when trained on."""

    def __init__(self):
        self.engines = {
            name: tpu_embed.EmbeddingEngine({name: FeatureConfig(table)}, mesh=mesh_of(1))
            for name, table in _tables().items()
        }
        self.states = {n: one.init(nnx.Rngs(0).params()) for n, one in self.engines.items()}

    def train(self, keys):
        for name, ids in keys.items():
            engine = self.engines[name]
            placed = engine.place({name: ids})
            state, batch = engine.admit(self.states[name], placed)
            gradients = jax.grad(loss_of)(engine.lookup(state, batch))
            self.states[name] = engine.update_in_place(state, batch, gradients)

    def check(self, model):
        for name, engine in self.engines.items():
            maps, expected = _maps_of(model[name]), _maps_of(engine)
            assert_same(maps.keys(name), expected.keys(name))
            assert maps.admitted_counters == expected.admitted_counters
            assert_same(model[name].embedding, engine.tables(self.states[name])[name])
            assert_same(model[name].logical_slots, engine.slots(self.states[name])[name])


def _bad(rng, keys):
    """Return keys of which one layer refuses its own, or a path that no layer has."""
    name = ["films", "tags", "users"][rng.integers(3)]
    return {**keys, name: np.ones((8, 2))}


def _some(rng, keys):
    """Return the keys of one layer or of both: a layer that is not named is not placed."""
    which = rng.integers(3)
    return keys if which == 2 else {name: keys[name] for name in [[*ROWS][which]]}


def _ahead(rng, placer, waiting, keys):
    some = _some(rng, keys)
    waiting.append((some, placer.place(some)))


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.quick(1)
def test_random_calls_equal_a_plain_loop(seed, tmp_path):
    rng, model, plain = np.random.default_rng(seed), _model(), _Plain()
    placer, waiting, kinds = nn.ModelPlacer(model), [], set()
    for number in range(40):
        keys, before = _keys(number), _counts(model)
        kind = rng.choice(["ahead", "ahead", "train", "train", "bad", "look", "drop", "restore"])
        kinds.add(kind)
        if kind == "ahead":
            _ahead(rng, placer, waiting, keys)
        elif kind == "train" and waiting:
            trained, batches = waiting.pop(0)
            train_step(model, nn.admit(model, batches))
            plain.train(trained)
        elif kind == "train":
            keys = _some(rng, keys)
            train_step(model, nn.place(model, keys))
            plain.train(keys)
        elif kind == "bad":
            with pytest.raises((ValueError, TypeError)):
                placer.place(_bad(rng, keys), training=bool(rng.integers(2)))
            assert _counts(model) == before
        elif kind == "look":
            nn.place(model, keys, training=False)
            assert _counts(model) == before
        elif kind == "drop":
            for name in ROWS:
                _maps_of(model[name]).rewind(model[name].state)
            waiting = []
        else:
            save_modules(tmp_path / f"{number}", {"model": model})
            model = _model(seed=1)
            restore_modules(tmp_path / f"{number}", {"model": model})
            placer, waiting = nn.ModelPlacer(model), []
        plain.check(model)
    assert len(kinds) == 6


def test_later_batches_compile_nothing():
    model, traces = _model(), []

    @nnx.jit(donate_argnums=0)
    def step(model, batches):
        traces.append(None)
        return nn.fused_value_and_grad(lambda m: loss_of(activations_of(m, batches)))(model)[0]

    for number in range(6):
        step(model, nn.place(model, _keys(number)))
    assert len(traces) == 1
