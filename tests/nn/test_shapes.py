"""A run over a model's layers that goes on from a position gives batches the same room."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from nn_models import mesh_of

import tpu_embed
from tpu_embed import RaggedIds, nn
from tpu_embed import optimizers as o
from tpu_embed.core.place import rooms
from tpu_embed.data import Prefetcher

V, D = 60, 2
LAYERS = {"bought": True, "item": False, "seen": True}  # path -> whether it is jagged


def make_placer(layers=LAYERS):
    """Return what places batches for a model with these layers."""
    made = {}
    for path, jagged in layers.items():
        table = tpu_embed.TableConfig(V, D, name=path, optimizer=o.SGD(0.1))
        made[path] = nn.EmbeddingBag(table, mesh=mesh_of(1), rngs=nnx.Rngs(0), jagged=jagged)
    return nn.ModelPlacer(nnx.Dict(made))


def draw(seed, count, layers=LAYERS):
    """Return batches of 8 examples, whose histories are now long and now short."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        ids = {}
        for path, jagged in layers.items():
            lengths = rng.integers(0, rng.choice([3, 40, 900]), 8)
            splits = np.concatenate([[0], np.cumsum(lengths)])
            history = RaggedIds(rng.integers(0, V, splits[-1]), splits)
            ids[path] = history if jagged else rng.integers(0, V, 8)
        found.append(ids)
    return found


def specs_of(batches):
    return {path: batch.spec for path, batch in batches.items()}


@pytest.mark.parametrize("training", [True, False])
def test_shapes_of_every_layer_are_those_of_an_unbroken_run(monkeypatch, training):
    monkeypatch.setattr(rooms, "SMALL", 16)
    data, unbroken, positions = draw(0, 12), [], []
    with Prefetcher(make_placer(), data, training=training) as batches:
        for one in batches:
            unbroken.append(specs_of(one))
            positions.append(batches.get_state())
    assert len({one["seen"] for one in unbroken}) > 1
    assert set(positions[-1]["shapes"]) == {"bought", "seen"}
    for stop in (2, 7):
        resumed = Prefetcher(make_placer(), data, training=training)
        resumed.set_state(json.loads(json.dumps(positions[stop])))
        with resumed:
            assert [specs_of(one) for one in resumed] == unbroken[stop + 1 :]
            assert resumed.get_state() == positions[-1]


def test_layers_of_another_model_choose_anew():
    with Prefetcher(make_placer(), draw(1, 3)) as batches:
        list(batches)
        position = batches.get_state()
    others = {"other": True, "seen": True}
    data = draw(2, 4, others)
    resumed = Prefetcher(make_placer(others), data)
    resumed.set_state(position)  # three batches, which are left out
    with resumed:
        found = specs_of(next(resumed))
    with Prefetcher(make_placer(others), data[3:]) as fresh:
        alone = specs_of(next(fresh))
    assert found["other"] == alone["other"]
    seen = [one["spec"] for kind in position["shapes"]["seen"] for one in kind]
    assert found["seen"].feature_shapes[0].capacity in {
        one["feature_shapes"][0]["capacity"] for one in seen
    }


def test_something_else_is_refused():
    for wrong in ([1], {"seen": 7}):
        batches = Prefetcher(make_placer(), draw(3, 1))
        with pytest.raises(ValueError, match=r"shapes: expected .*get_state returned"):
            batches.set_state({"batches": 0, "shapes": wrong})
        batches.close()
    assert jax.tree.leaves(make_placer({"item": False}).intake.shapes()) == []
