"""Files that were cut, lost or changed give a clear error, or the same bits."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import contents, small
from facade_cases import assert_same

from tpu_embed import optimizers as o
from tpu_embed.io import restore, save

MODEL = {"w": jnp.arange(6.0).reshape(2, 3), "b": np.arange(2, dtype=np.int32)}
POSITION = {"epoch": 3, "batch": 141}


@pytest.fixture(scope="module")
def engine():
    return small(6, 2, optimizer=o.Adagrad(0.5), devices=2, placement="div")


@pytest.fixture(scope="module")
def whole(engine, tmp_path_factory):
    """Return a checkpoint, and what is in it."""
    path = tmp_path_factory.mktemp("damage") / "saved"
    state = engine.init(jax.random.key(0))
    save(path, engine, state, model=MODEL, position=POSITION)
    return path, contents(engine, state)


def files(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def damages(data):
    """Yield (what was done, bytes): cut short, and single bits flipped."""
    for length in (0, len(data) // 2, len(data) - 1):
        yield f"cut to {length}", data[:length]
    rng = np.random.default_rng(len(data))
    for place in (0, len(data) // 2, len(data) - 1, *rng.integers(0, len(data), 2)):
        bit = 1 << int(rng.integers(8))
        yield f"bit {bit} of byte {place}", flipped(data, place, bit)
    yield "longer", data + b" " * 8 + data


def flipped(data, place, bit):
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def outcome(engine, path, wanted):
    """Restore; return "refused" for an error that names the path, "same" for the same bits."""
    try:
        restored = restore(path, engine, model=MODEL)
    except (ValueError, FileNotFoundError) as error:
        return "refused" if str(path) in str(error) else f"unclear: {error!r}"
    assert_same(contents(engine, restored.state), wanted)
    assert_same(restored.model, MODEL)
    assert restored.position == POSITION
    return "same"


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copy")


NOTES = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Orbax's own, which are not read."""


def test_damaged_files_are_refused(engine, whole, copy):
    assert outcome(engine, copy, whole[1]) == "same"
    for name in files(copy):
        file = copy / name
        data = file.read_bytes()
        for what, damaged in damages(data):
            file.write_bytes(damaged)
            found = outcome(engine, copy, whole[1])
            assert found == ("same" if name.endswith(NOTES) else "refused"), (name, what)
        file.unlink()
        lost = "same" if name.endswith(NOTES) else "refused"
        assert outcome(engine, copy, whole[1]) == lost, name
        file.write_bytes(data)
    assert outcome(engine, copy, whole[1]) == "same"


@pytest.mark.parametrize("part", ["tables", "tables/item/slots", "model", "position"])
def test_lost_directories_are_refused(engine, whole, copy, part):
    shutil.rmtree(copy / part)
    assert outcome(engine, copy, whole[1]) == "refused"
