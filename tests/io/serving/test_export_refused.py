"""Exports that are refused leave nothing behind."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from export_cases import ONE, SMALL, export_one
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embed import FeatureConfig, RaggedIds
from tpu_embed.io import load_model

# -- exports that are refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "options"),
    [(ONE, {"batch": 4}), (FeatureConfig(SMALL, output_shape=(4,)), {})],
    ids=["batch", "output_shape"],
)
@pytest.mark.quick(1)
def test_a_batch_size_may_be_fixed(feature, options, tmp_path):
    export_one(tmp_path / "m", feature=feature, platforms=["cpu"], **options)
    served = load_model(tmp_path / "m")
    assert served.metadata["batch"] == 4
    assert served(np.zeros((4, 3), np.int32)).shape == (4, 4)
    with pytest.raises(ValueError, match=r"expected shape \[4, 3\], got \[3, 3\]"):
        served(np.zeros((3, 3), np.int32))


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


def over_devices(*axes):
    mesh = Mesh(np.asarray(jax.devices()), ("d",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def test_parameters_may_be_on_several_devices(tmp_path):
    parameters = jax.device_put(np.arange(8, dtype=np.float32), over_devices("d"))
    export_one(tmp_path / "m", lambda a: a * parameters[4:])
    found = load_model(tmp_path / "m")(np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(found, [[4, 5, 6, 7]] * 2)


REFUSED = {
    "ragged": (
        lambda: {"ids": RaggedIds.from_lists([[1], [2, 3]])},
        "'feature': expected an array of ids, or .* got RaggedIds; .*ShapeDtypeStruct",
    ),
    "rank 0": (lambda: {"ids": np.int32(3)}, "rank 0"),
    "floats": (lambda: {"ids": np.ones((4, 3))}, "expected ids of an integer dtype, got float64"),
    "weights": (
        lambda: {"weights": np.ones((4, 2), np.float32)},
        r"weights of feature 'feature': expected shape \(4, 3\), got \(4, 2\)",
    ),
    "input": (
        lambda: {"inputs": (np.ones(3, np.float32),)},
        r"inputs\[0\]: expected batch size 4 as first dimension, got shape \(3,\); what does not",
    ),
    "batch": (lambda: {"batch": 5}, "batch: expected that of features, 4, got 5"),
    "tables": (lambda: {"tables": {}}, "small missing"),
    "byte order": (
        lambda: {"tables": {"small": np.ones((20, 4), ">f4")}},
        r"table 'small': expected float32 .*, got >f4, of another",
    ),
    "devices": (
        lambda: {"model": lambda a: jax.device_put(a, over_devices()), "batch": 4},
        "model: expected a program of one device, got one of 8; take its shardings",
    ),
    "result": (lambda: {"model": lambda a: Pair(a, a)}, "in dicts, lists and tuples, got .*Pair"),
    "platform": (lambda: {"platforms": "gpu"}, "platforms: each: expected 'cpu' . 'cuda' | 'rocm'"),
    "platforms": (lambda: {"platforms": ("cpu", "gpu")}, "platforms: each: expected 'cpu' . 'cuda"),
    "none": (lambda: {"platforms": ()}, "platforms: each: expected 'cpu' . 'cuda' | 'rocm'"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.quick(4)
def test_an_export_that_cannot_be_served_leaves_nothing(case, tmp_path):
    options, text = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=text):
        export_one(tmp_path / "m", **options())
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path):
    full = mock.patch("numpy.save", side_effect=OSError("no space left on device"))
    with full, pytest.raises(OSError, match="no space left"):
        export_one(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(FileExistsError, match=r"m: expected nothing.*a directory of its own"):
        export_one(tmp_path / "m")


def test_flatbuffers_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"flatbuffers, got none; pip install .*\[export\]"):
        export_one(tmp_path / "m")


def test_what_a_loaded_model_is_given_is_checked(tmp_path):
    def model(activations, inputs, scale):
        return activations.sum(-1) * scale + inputs["dense"][:, 0]

    dense, several = np.ones((5, 1), np.float32), np.zeros((5, 3), int)
    export_one(tmp_path / "m", model, inputs=({"dense": dense[:4]}, 1.0))
    served = load_model(tmp_path / "m")
    found = served(several, {"dense": dense}, 2.0)
    np.testing.assert_array_equal(found, np.full(5, 9.0, np.float32))
    for given, said in [
        ((), r"inputs: expected exactly \[.*\], got \[\]"),
        (({"dense": dense}, 1.0, 2.0), "inputs: expected exactly"),
        (({"dense": dense[:3]}, 1.0), r"inputs\[0\]\['dense'\]: .*\[5, 1\], got float32 of.*\[3, "),
        (({"dense": dense.astype(int)}, 1.0), r"\['dense'\]: expected float32 .*, got int32 of"),
        (({"dense": dense}, "x"), r"inputs\[1\]: expected float32 of shape \[\], got <U1 of"),
    ]:
        with pytest.raises(ValueError, match=said):
            served(several, *given)


def test_a_model_of_one_batch_size_says_so(tmp_path):
    def model(activations):
        return activations + np.ones((4, 4), np.float32)

    with pytest.raises(TypeError) as error:
        export_one(tmp_path / "m", model)
    assert any("say which: batch=" in note for note in error.value.__notes__)
    export_one(tmp_path / "m", model, batch=4)
    assert load_model(tmp_path / "m")(np.zeros((4, 3), np.int32)).shape == (4, 4)
