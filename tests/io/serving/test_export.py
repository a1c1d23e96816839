"""Exported models give the bits of training in another process, from a whole directory only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from export_cases import (
    DENSE,
    FEATURES,
    IDS,
    ONE,
    ROOT,
    SMALL,
    WEIGHTS,
    Trained,
    batch,
    export_one,
    network,
)
from facade_cases import mesh
from jax.sharding import NamedSharding, PartitionSpec
from kernel_cases import assert_same_bits

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig
from tpu_embed.io import export_model, load_model, serving_lookup
from tpu_embed.kernels import cpu, dispatch


@pytest.fixture(scope="module")
def trained():
    engine = EmbeddingEngine(FEATURES, mesh=mesh(1))
    state = engine.init(jax.random.key(3))

    @jax.jit
    def infer(state, batch, dense):
        return network(engine.lookup(state, batch), dense)

    outputs = infer(state, engine.place(IDS, WEIGHTS), DENSE)
    return Trained(engine.tables(state), outputs)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "ranker" / "1"
    tables = trained.tables
    export_model(path, network, tables, FEATURES, IDS, weights=WEIGHTS, inputs=(DENSE,))
    return path


@pytest.fixture(scope="module")
def served(exported):
    return load_model(exported)


# -- numbers ------------------------------------------------------------------------------------


def test_a_loaded_model_has_the_bits_of_training(trained, served):
    assert_same_bits(served(IDS, DENSE, weights=WEIGHTS), trained.outputs)


def test_another_process_without_this_package_has_them_too(trained, exported, tmp_path):
    paths = {"user": IDS["user"], "films/0": IDS["films"][0], "films/1": IDS["films"][1]}
    paths["small"] = IDS["small"]
    given = {f"features {path}": ids.astype(np.int32) for path, ids in paths.items()}
    given |= {"weights films/0": WEIGHTS["films"][0], "dense": DENSE}
    np.savez(tmp_path / "arguments.npz", **given)
    program = ROOT / "tests" / "helpers" / "processes" / "second_process.py"
    files = tmp_path / "arguments.npz", tmp_path / "outputs.npz"
    command = [sys.executable, program, exported, *files]
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same_bits(dict(np.load(tmp_path / "outputs.npz")), trained.outputs)


def test_any_batch_size_is_served_and_a_path_is_as_good_as_a_nest(trained, served):
    ids, weights, dense = batch(3, seed=1)
    activations = serving_lookup(trained.tables, ids, FEATURES, weights)
    by_path = {"user": ids["user"], "small": ids["small"]}
    by_path |= {f"films/{i}": films for i, films in enumerate(ids["films"])}
    found = served(by_path, dense, weights={"films/0": weights["films"][0]})
    assert_same_bits(found, jax.jit(network)(activations, dense))


# -- what is in the directory ---------------------------------------------------------------------


def test_the_program_holds_xla_operations_and_no_table(trained, exported, served):
    program = served.exported.mlir_module()
    targets = set(re.findall(r"custom_call @(\w+)", program))
    assert targets <= {"shape_assertion"}  # jax.export's own, of the batch size
    assert served.exported.platforms == ("cpu", "cuda", "tpu")
    assert served.exported.nr_devices == 1
    assert sorted(path.name for path in (exported / "tables").iterdir()) == [
        "films.values.npy",
        "small.values.npy",
        "users-v1-eu~a4480370e732c8e2.values.npy",
    ]
    for name, table in trained.tables.items():
        stored = np.asarray(served.tables[name]["values"])
        np.testing.assert_array_equal(stored.view(table.dtype), table)


def test_no_other_thread_is_kept_from_its_kernels_meanwhile(tmp_path, monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "load", lambda: cpu.Loaded(Path("as if it were built")))
    before, seen = dict(os.environ), []

    def model(activations):
        with ThreadPoolExecutor() as pool:
            other = pool.submit(dispatch.kernels_in_use).result()
        seen.append((dispatch.kernels_in_use(), other, dict(os.environ) == before))
        return activations

    export_one(tmp_path / "m", model)
    assert set(seen) == {("reference", "native", True)}
    assert dispatch.kernels_in_use() == "native"
    assert dict(os.environ) == before


def test_metadata_says_what_goes_in_and_what_comes_out(served):
    said = served.metadata
    assert (said["jax"], said["batch"]) == (jax.__version__, None)
    assert said["platforms"] == ["cpu", "cuda", "tpu"]
    films = {"table": "films", "shape": [None, 4], "dtype": "int32", "weights": "float32"}
    assert said["features"]["films/0"].items() >= films.items()
    assert said["inputs"] == [{"path": "[0]", "shape": [None, 7], "size": "b", "dtype": "float32"}]
    assert said["outputs"] == [
        {"path": "['score']", "shape": [None], "size": "b", "dtype": "float32"},
        {"path": "['sequence']", "shape": [None, 3, 8], "size": "b", "dtype": "float32"},
    ]
    users = said["tables"]["users.v1/eu"]
    assert users["dtype"] == "bfloat16"
    assert users["files"]["values"]["dtype"] == "uint16"


def test_a_loaded_table_is_the_file_itself(tmp_path):
    config = TableConfig(5000, 16, name="t")
    table = np.ones((5000, 16), np.float32)
    example = jax.ShapeDtypeStruct((2,), np.int32)
    export_model(tmp_path / "m", lambda a: a, {"t": table}, FeatureConfig(config), example)
    values = load_model(tmp_path / "m").tables["t"]["values"]
    address = values.unsafe_buffer_pointer()
    lines = Path("/proc/self/maps").read_text().splitlines()
    (mine,) = [line for line in lines if line.endswith(str(tmp_path / "m/tables/t.values.npy"))]
    first, last = (int(number, 16) for number in mine.split()[0].split("-"))
    assert first <= address < last


# -- calls ----------------------------------------------------------------------------------------


def test_ids_are_judged_as_by_the_engine(trained, served):
    ids, weights, dense = batch(2, seed=2)
    bad = ids | {"user": np.array([3, 2**32 + 1])}
    with pytest.raises(ValueError, match=r"'user': .*table 'users.v1/eu', got id 4294967297 at"):
        served(bad, dense, weights=weights)
    ids["films"][1][0, 0], ids["small"][1, 0, 0] = 2**32, -(2**33)  # clipped; dropped
    activations = serving_lookup(trained.tables, ids, FEATURES, weights)
    expected = jax.jit(network)(activations, dense)
    assert_same_bits(served(ids, dense, weights=weights), expected)


NANS = [np.full((16, 4), np.nan), None]
CALLS = {
    "missing": ({"user": IDS["user"]}, WEIGHTS, r"features: expected exactly \['films/0'"),
    "no weights": (IDS, None, r"weights: expected exactly \['films/0'\], got \[\]"),
    "more weights": (IDS, WEIGHTS | {"user": WEIGHTS["films"][0]}, "weights: expected exactly"),
    "shape": (IDS | {"user": IDS["films"][0]}, WEIGHTS, r"shape \[B\], got \[16, 4\]"),
    "width": (IDS | {"small": np.zeros((16, 2, 4), int)}, WEIGHTS, r"2, 3\], got \[16, 2, 4\]; "),
    "bags": (IDS | {"small": IDS["small"][:, :1]}, WEIGHTS, r"2, 3\], got \[16, 1, 3\]; the"),
    "batch": (IDS | {"user": IDS["user"][:3]}, WEIGHTS, "'user': expected .* got 3"),
    "ragged": (IDS | {"user": RaggedIds.from_lists([[1]] * 16)}, WEIGHTS, r"\], got \[16, 1\]"),
    "not finite": (IDS, WEIGHTS | {"films": NANS}, "'films/0': expected numbers finite"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_does_not_fit_is_refused(case, served):
    ids, weights, text = CALLS[case]
    with pytest.raises(ValueError, match=text):
        served(ids, DENSE, weights=weights)


def test_ids_of_another_kind_are_refused(served):
    with pytest.raises(TypeError, match="'user': expected ids of an integer dtype, got float64"):
        served(IDS | {"user": np.ones(16)}, DENSE, weights=WEIGHTS)
    with pytest.raises(TypeError, match=r"'user': .* a tracer; inside a jit, call .exported"):
        jax.jit(lambda ids: served(IDS | {"user": ids}, DENSE, weights=WEIGHTS))(IDS["user"])


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
    return NamedSharding(mesh(8), PartitionSpec(*axes))


def test_parameters_may_be_on_several_devices(tmp_path):
    parameters = jax.device_put(np.arange(8, dtype=np.float32), over_devices("d"))
    export_one(tmp_path / "m", lambda a: a * parameters[4:])
    found = load_model(tmp_path / "m")(np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(found, [[4, 5, 6, 7]] * 2)


def over_all(activations):
    return jax.device_put(activations, over_devices())


REFUSED = {
    "ragged": ({"ids": RaggedIds.from_lists([[1], [2, 3]])}, "got RaggedIds; .*ShapeDtypeStruct"),
    "rank 0": ({"ids": np.int32(3)}, "rank 0"),
    "floats": ({"ids": np.ones((4, 3))}, "expected ids of an integer dtype, got float64"),
    "weights": ({"weights": np.ones((4, 2), "f4")}, r"expected shape \(4, 3\), got \(4, 2\)"),
    "input": ({"inputs": (np.ones(3, "f4"),)}, r"inputs\[0\]: expected batch size 4 as first dim"),
    "batch": ({"batch": 5}, "batch: expected that of features, 4, got 5"),
    "tables": ({"tables": {}}, "small missing"),
    "byte order": ({"tables": {"small": np.ones((20, 4), ">f4")}}, "'small': .* >f4, of another"),
    "devices": ({"model": over_all, "batch": 4}, "expected a program of one device, got one of 8"),
    "result": ({"model": lambda a: Pair(a, a)}, "in dicts, lists and tuples, got .*Pair"),
    "platform": ({"platforms": "gpu"}, r"platforms: each: expected 'cpu' \| 'cuda' \| 'rocm'"),
    "platforms": ({"platforms": ("cpu", "gpu")}, "platforms: each: expected 'cpu' . 'cuda"),
    "none": ({"platforms": ()}, "platforms: each: expected 'cpu' . 'cuda"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.quick(4)
def test_an_export_that_cannot_be_served_leaves_nothing(case, tmp_path):
    options, text = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=text):
        export_one(tmp_path / "m", **options)
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
