"""Exports that are refused leave nothing behind."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest
from export_cases import ONE, SMALL, export_one
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed.io import export_model, load_model

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
    "devices": (
        lambda: {"model": lambda a: jax.device_put(a, over_devices()), "batch": 4},
        "model: expected a program of one device, got one of 8; take its shardings",
    ),
    "result": (lambda: {"model": lambda a: Pair(a, a)}, "in dicts, lists and tuples, got .*Pair"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.quick(4)
def test_an_export_that_cannot_be_served_leaves_nothing(case, tmp_path):
    options, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        export_one(tmp_path / "m", **options())
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="no space left"):
        export_one(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(FileExistsError, match=r"m: expected nothing.*a directory of its own"):
        export_one(tmp_path / "m")


def test_ids_must_be_integers_and_flatbuffers_there(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="expected ids of an integer dtype, got float32"):
        export_one(tmp_path / "m", ids=np.ones((4, 3), np.float32))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"flatbuffers, got none; pip install .*\[export\]"):
        export_one(tmp_path / "m")


@pytest.mark.parametrize("platforms", ["gpu", ("cpu", "gpu"), ()])
@pytest.mark.quick(1)
def test_platforms_are_known_ones(tmp_path, platforms):
    table = TableConfig(4, 2, name="item")
    arguments = {"item": np.ones((4, 2), np.float32)}, FeatureConfig(table), np.zeros((2, 3), int)
    with pytest.raises(ValueError, match=r"platforms: each: expected 'cpu' . 'cuda' | 'rocm'"):
        export_model(tmp_path / "m", lambda a: a, *arguments, platforms=platforms)
    assert not list(tmp_path.iterdir())
    export_model(tmp_path / "m", lambda a: a, *arguments, platforms="cpu")
    assert load_model(tmp_path / "m").metadata["platforms"] == ["cpu"]


def test_tables_of_another_byte_order_are_refused(tmp_path):
    table = TableConfig(4, 2, name="item")
    swapped = {"item": np.ones((4, 2), ">f4")}
    with pytest.raises(ValueError, match=r"table 'item': expected float32 .*, got >f4, of another"):
        export_model(
            tmp_path / "m", lambda a: a, swapped, FeatureConfig(table), np.zeros((2, 3), int)
        )


def test_what_a_loaded_model_is_given_is_checked(tmp_path):
    table = TableConfig(4, 2, name="item")
    features, ids = FeatureConfig(table), np.zeros((2, 3), int)

    def model(activations, inputs, scale):
        return activations.sum(-1) * scale + inputs["dense"][:, 0]

    inputs = {"dense": np.ones((2, 1), np.float32)}, 1.0
    tables = {"item": np.ones((4, 2), np.float32)}
    export_model(tmp_path / "m", model, tables, features, ids, inputs=inputs)
    served = load_model(tmp_path / "m")
    several = np.zeros((5, 3), int)
    found = served(several, {"dense": np.ones((5, 1))[:, :1].astype(np.float32)}, 2.0)
    np.testing.assert_array_equal(found, np.full(5, 5.0, np.float32))
    dense = np.ones((5, 1), np.float32)
    for given, said in [
        ((), r"inputs: expected exactly \[.*\], got \[\]"),
        (({"dense": dense}, 1.0, 2.0), "inputs: expected exactly"),
        (
            ({"dense": dense[:3]}, 1.0),
            r"inputs\[0\]\['dense'\]: .*\[5, 1\], got float32 of.*\[3, 1\]",
        ),
        (({"dense": dense.astype(int)}, 1.0), r"\['dense'\]: expected float32 .*, got int32 of"),
        (({"dense": dense}, "x"), r"inputs\[1\]: expected float32 of shape \[\], got <U1 of"),
    ]:
        with pytest.raises(ValueError, match=said):
            served(several, *given)


def test_a_model_of_one_batch_size_says_so(tmp_path):
    table = TableConfig(4, 2, name="item")
    arguments = {"item": np.ones((4, 2), np.float32)}, FeatureConfig(table), np.zeros((2, 3), int)

    def model(activations):
        return activations + np.ones((2, 2), np.float32)

    with pytest.raises(TypeError) as error:
        export_model(tmp_path / "m", model, *arguments)
    assert any("say which: batch=" in note for note in error.value.__notes__)
    export_model(tmp_path / "m", model, *arguments, batch=2)
    assert load_model(tmp_path / "m")(np.zeros((2, 3), int)).shape == (2, 2)
