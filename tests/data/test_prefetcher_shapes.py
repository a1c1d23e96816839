"""A run that goes on from a position gives its batches the room that they would have had."""

import json

import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.core.place import rooms
from tpu_embed.data import Prefetcher
from tpu_embed.optimizers import SGD

V = 60


def engine_of(devices, **more):
    features = {"seen": FeatureConfig(TableConfig(V, 2, name="items"), jagged=True), **more}
    return EmbeddingEngine(features, SGD(0.1), mesh=mesh(devices))


def draw(seed, count):
    """Return batches of 8 histories, now long, now short."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        most = int(rng.choice([2, 40, 3, 900], p=[0.5, 0.2, 0.25, 0.05]))
        lengths = rng.integers(0, most + 1, 8)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        found.append({"seen": RaggedIds(rng.integers(0, V, splits[-1]), splits)})
    return found


@pytest.mark.parametrize("seed", range(6))
def test_shapes_are_those_of_an_unbroken_run(monkeypatch, seed):
    """Rooms grow in the middle of what is left."""
    monkeypatch.setattr(rooms, "SMALL", 16)
    rng, data = np.random.default_rng([seed, 1]), draw(seed, 30)
    unbroken, positions = [], []
    with Prefetcher(engine_of(1), data) as batches:
        for batch in batches:
            unbroken.append(batch.spec)
            positions.append(batches.get_state())
    assert len(set(unbroken)) > 1
    for stop in rng.choice(29, 3, replace=False):
        resumed = Prefetcher(engine_of(1), data, depth=int(rng.integers(1, 5)))
        resumed.set_state(json.loads(json.dumps(positions[stop])))
        assert resumed.get_state() == positions[stop]
        with resumed:
            assert [batch.spec for batch in resumed] == unbroken[stop + 1 :]
            assert resumed.get_state() == positions[-1]


def test_other_devices_and_features_choose_anew():
    with Prefetcher(engine_of(1), draw(0, 3)) as batches:
        list(batches)
        position = batches.get_state()
    more = FeatureConfig(TableConfig(V, 4, name="others"))
    for engine, data in (
        (engine_of(8), draw(0, 4)),
        (engine_of(1, user=more), [one | {"user": np.arange(8)} for one in draw(0, 4)]),
    ):
        own = [engine.place(one).spec for one in data][-1]
        with Prefetcher(engine, data) as resumed:
            resumed.set_state(position)
            assert next(resumed).spec == own


def test_only_jagged_features_need_it():
    engine = EmbeddingEngine(FeatureConfig(TableConfig(V, 2)), SGD(0.1), mesh=mesh(1))
    with Prefetcher(engine, [np.arange(8)]) as batches:
        assert next(batches).spec.replicas == 1
        assert batches.get_state() == {"batches": 1}


@pytest.mark.parametrize("shapes", [7, [[1]], [[{"uses": 1}]], [[{"spec": {}}]]])
def test_something_else_is_refused(shapes):
    batches = Prefetcher(engine_of(1), draw(0, 2))
    with pytest.raises(ValueError, match=r"shapes: expected those of an engine.*get_state"):
        batches.set_state({"batches": 1, "shapes": shapes})
    assert batches.get_state() == {"batches": 0}
    assert len(list(batches)) == 2
    position = batches.get_state()
    spec = position["shapes"][0][0]["spec"]
    endless = spec | {"feature_shapes": [spec["feature_shapes"][0] | {"capacity": 10**12}]}
    for wrong in (
        endless,  # its first batch would ask for terabytes
        spec | {"replicas": "1"},
        spec | {"routed": "all"},
        spec | {"stacks": [{"features": [0]}]},
    ):
        changed = json.loads(json.dumps(position))
        changed["shapes"][0][0]["spec"] = wrong
        with pytest.raises(ValueError, match="expected those of an engine"):
            Prefetcher(engine_of(1), draw(0, 2)).set_state(changed)
