"""A restore of layers of keys fills all maps, tables and other arrays of a model, or none."""

from typing import Any

import numpy as np
import pytest
from flax import nnx
from interrupt_cases import Interrupt, from_a_signal
from nn_models import mesh_of, train_step

from tpu_embed import DynamicVocabulary, TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.io import TouchedRows, restore_modules, save_modules
from tpu_embed.io.checkpoint.module_checkpoint import Modules
from tpu_embed.vocabulary import map_version, vocabularies

ROWS = {"films": 12, "tags": 6}


class Model(nnx.Module):
    """Two layers of keys, a variable, and an array that is in none."""

    films: nn.EmbeddingBag
    tags: nn.EmbeddingBag

    def __init__(self, seed):
        rule, living = o.Adagrad(0.5), DynamicVocabulary()
        for name, size in ROWS.items():
            table = TableConfig(size, 2, name=name, vocabulary=living, optimizer=rule)
            setattr(self, name, nn.EmbeddingBag(table, mesh=mesh_of(1), rngs=nnx.Rngs(seed)))
        self.bias = nnx.Param(np.full(2, seed, np.float32))
        self.plain = np.full(2, seed, np.float32)


def keys(step):
    rng = np.random.default_rng(step)
    return {name: rng.integers(0, size + 4, (8, 2)) + step for name, size in ROWS.items()}


def trained(model, *steps):
    layers = nnx.Dict({name: getattr(model, name) for name in ROWS})
    for step in steps:
        train_step(layers, nn.place(layers, keys(step)))
    return model


def contents(model):
    """Return all that a model holds, after a check that maps and tables are of one step."""
    found = [np.asarray(model.bias[...]).tobytes(), np.asarray(model.plain).tobytes()]
    for name in ROWS:
        layer = getattr(model, name)
        maps: Any = layer.engine.vocabularies
        assert map_version(layer.state) == maps.now
        assert maps.placed == maps.admitted
        found += [array.tobytes() for array in maps.keys(name)]
        found += [np.asarray(layer.embedding).tobytes(), *maps.admitted_counters[name].values()]
        found += [np.asarray(slot).tobytes() for slot in layer.logical_slots.values()]
        found += [maps.last[name].admitted.size if maps.last else 0]
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a model, two functions that fill it, and what it holds after each."""
    model, fills, found, root = Model(0), [], [], tmp_path_factory.mktemp("saved")
    fill = Modules.fill
    for seed, steps in enumerate([(0, 1), (5, 6, 7)]):
        save_modules(root / f"{seed}", {"model": trained(Model(seed), *steps)})
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Modules, "fill", lambda *args: fills.append(lambda: fill(*args)))
            restore_modules(root / f"{seed}", {"model": model})
        fills[-1]()
        found.append(contents(model))
    assert found[0] != found[1]
    return model, fills, found


def in_filling(code):
    names = ("checkpoint/module_checkpoint", "vocabulary/vocabularies")
    names += ("vocabulary/timeline", "vocabulary/table_maps")
    return code.co_filename.endswith(tuple(f"{name}.py" for name in names))


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.whole)])
def test_interrupted_anywhere_a_restore_has_happened_wholly_or_not(stride, filled):
    model, fills, found = filled
    ends = []
    for at in range(1, 100_000, stride):
        fills[0]()
        with Interrupt(in_filling, at, from_a_signal, only_signals=True) as interrupt:
            fills[1]()
        ends.append(found.index(contents(model)))
        if interrupt.seen < at:
            break
    assert ends == sorted(ends)  # first nothing has happened, from some point on all has
    assert ends[0] == 0
    assert ends[-1] == 1
    assert len(ends) > 200 / stride
    for name, some in keys(8).items():
        getattr(model, name).engine.place({"ids": some})  # no turn was lost: this would wait for it


FAILURES = {
    "maps": (vocabularies, "_store", 1),
    "tables": (nn.EmbeddingBag, "set_state", 2),
    "variables": (nnx.Param, "set_raw_value", 1),
    "other arrays": (nnx, "update", 1),
}
"""What is called so many times, at least, to fill the model."""


@pytest.mark.parametrize("what", FAILURES)
def test_whatever_fails_nothing_has_happened(what, filled, monkeypatch):
    model, fills, found = filled
    holder, name, calls = FAILURES[what]
    function = getattr(holder, name)
    for wrong in range(1, calls + 1):
        fills[0]()
        touched, seen = TouchedRows(model.films.engine), []

        def fail(*args, wrong=wrong, seen=seen):
            seen.append(name)
            if len(seen) == wrong:
                raise MemoryError("no room")
            return function(*args)

        with monkeypatch.context() as patched:
            patched.setattr(holder, name, fail)
            with pytest.raises(MemoryError):
                fills[1]()
        assert contents(model) == found[0]
        touched.never()  # its maps were not replaced
        fills[1]()
        assert contents(model) == found[1]
        with pytest.raises(ValueError, match="from before they were loaded"):
            touched.never()


def test_a_model_and_its_copy_share_their_maps(tmp_path):
    model = trained(Model(0), 0, 1)
    save_modules(tmp_path / "saved", {"model": model, "copy": nnx.clone(model)})
    expected = [one for one in contents(model) if isinstance(one, bytes)]
    trained(model, 2)
    restore_modules(tmp_path / "saved", {"model": model, "copy": nnx.clone(model)})
    assert [one for one in contents(model) if isinstance(one, bytes)] == expected
