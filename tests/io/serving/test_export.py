"""Exported models give the bits of training in another process, from a whole directory only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from export_cases import DENSE, FEATURES, IDS, ROOT, WEIGHTS, Trained, batch, export_one, network
from facade_cases import mesh
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
    assert said["features"]["films/0"] == {
        "table": "films",
        "shape": [None, 4],
        "size": "b",
        "dtype": "int32",
        "weights": "float32",
        "max_sequence_length": 0,
        "jagged": False,
        "keep": "first",
        "on_bad_id": "error",
    }
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


CALLS = {
    "missing": (lambda i, w: ({"user": i["user"]}, w), r"features: expected exactly \['films/0'"),
    "no weights": (lambda i, w: (i, None), r"weights: expected exactly \['films/0'\], got \[\]"),
    "more weights": (lambda i, w: (i, w | {"user": w["films"][0]}), "weights: expected exactly"),
    "shape": (lambda i, w: (i | {"user": i["films"][0]}, w), r"shape \[B\], got \[16, 4\]"),
    "width": (
        lambda i, w: (i | {"small": np.zeros((16, 2, 4), int)}, w),
        r"'small': expected shape \[B, 2, 3\], got \[16, 2, 4\]; .* cut longer rows, or export",
    ),
    "bags": (lambda i, w: (i | {"small": i["small"][:, :1]}, w), r"2, 3\], got \[16, 1, 3\]; the"),
    "batch": (lambda i, w: (i | {"user": i["user"][:3]}, w), "'user': expected .* got 3"),
    "ragged": (
        lambda i, w: (i | {"user": RaggedIds.from_lists([[1]] * 16)}, w),
        r"'user': expected shape \[B\], got \[16, 1\]",
    ),
    "not finite": (
        lambda i, w: (i, w | {"films": [np.full((16, 4), np.nan), None]}),
        "weights of feature 'films/0': expected numbers finite",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_that_does_not_fit_is_refused(case, served):
    change, text = CALLS[case]
    ids, weights = change(dict(IDS), dict(WEIGHTS))
    with pytest.raises(ValueError, match=text):
        served(ids, DENSE, weights=weights)


def test_ids_of_another_kind_are_refused(served):
    with pytest.raises(TypeError, match="'user': expected ids of an integer dtype, got float64"):
        served(IDS | {"user": np.ones(16)}, DENSE, weights=WEIGHTS)
    with pytest.raises(TypeError, match=r"'user': .* a tracer; inside a jit, call .exported"):
        jax.jit(lambda ids: served(IDS | {"user": ids}, DENSE, weights=WEIGHTS))(IDS["user"])


@pytest.mark.whole
def test_features_of_their_own_size(tmp_path):
    """One program for any number of users, and any other number of items."""
    users, items = TableConfig(7, 3, name="users"), TableConfig(9, 3, name="items")
    features = {"user": users, "item": items, "seen": items}
    features = {name: FeatureConfig(table) for name, table in features.items()}
    rng = np.random.default_rng(0)
    shapes = {"users": (7, 3), "items": (9, 3)}
    tables = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def model(acts, owner, bias):
        taste = (acts["user"] + acts["seen"])[owner]
        return {"score": (taste * acts["item"]).sum(-1) + bias, "user": acts["user"].sum(-1)}

    def draw(requests, candidates):
        ids = {"user": rng.integers(0, 7, requests), "item": rng.integers(0, 9, candidates)}
        ids["seen"] = rng.integers(-1, 9, (requests, 4))
        bias = rng.normal(size=candidates).astype(np.float32)
        return ids, (rng.integers(0, requests, candidates), bias)

    def export(name, inputs, **options):
        export_model(tmp_path / name, model, tables, features, ids, inputs=inputs, **options)

    ids, inputs = draw(2, 5)
    export("model", inputs, platforms="cpu")
    served = load_model(tmp_path / "model")
    for requests, candidates in ((1, 500), (3, 3), (4, 2)):
        given, some = draw(requests, candidates)
        expected = model(serving_lookup(tables, given, features), *some)
        for name, values in served(given, *some).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"feature 'user': .* 3 as of feature 'seen', got 2"):
        served({**ids, "seen": np.zeros((3, 4), np.int32)}, *inputs)
    with pytest.raises(ValueError, match=r"inputs.*: expected int32 of shape \[5\], got .*\[4\]"):
        served(ids, inputs[0][:4], inputs[1])
    for size in (2, 9):
        with pytest.raises(ValueError, match="batch: expected None for features of the sizes 5, 2"):
            export("no", inputs, batch=size)
    with pytest.raises(ValueError, match=r"batch size 5 or 2 as first dimension, got shape \(3,\)"):
        export("no", (inputs[0][:3], inputs[1]))
    assert not (tmp_path / "no").exists()
