"""Checkpoints from both APIs: tables, network and position together; odd input; refusals."""

import asyncio
import concurrent.futures
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_cases import contents, small, small_engine, small_state, table_of
from facade_cases import FEATURES, assert_same, make_embedding, mesh, snapshot, train
from flax import nnx

import tpu_embed.io
from tpu_embed import EmbeddingEngine
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager, restore, save

KEY = jax.random.key(7)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


def save_small(path, **parts):
    save(path, small_engine(), small_state(), **parts)


def restore_small(path, **options):
    return restore(path, small_engine(), **options)


def engine(devices):
    return EmbeddingEngine(FEATURES, o.Adagrad(0.5), mesh=mesh(devices))


def fresh_model():
    params = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(3)))[1]
    return {"params": params, "optimizer": optax.adam(0.125).init(params)}


def test_a_model_moves_to_other_devices(path):
    two, eight, zeros = engine(2), engine(8), fresh_model()
    model = jax.tree.map(lambda leaf: leaf + 3, zeros)
    save(path, two, state := two.init(KEY), model=model)
    for given in (zeros, jax.eval_shape(fresh_model)):  # no sharding was asked for
        restored = restore(path, eight, model=given)
        assert_same(contents(eight, restored.state), contents(two, state))
        assert_same(jax.device_get(restored.model), jax.device_get(model))
        placed = [leaf.sharding.device_set for leaf in jax.tree.leaves(restored.model)]
        assert all(devices == set(jax.devices()) for devices in placed)
    there = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    restored = restore(path, eight, model=jax.device_put(zeros, there))
    assert {leaf.sharding for leaf in jax.tree.leaves(restored.model)} == {there}


def test_leaves_of_many_kinds_come_back(path):
    model = {
        "numpy": np.arange(3, dtype=np.int16),
        "bfloat16": jnp.full((2, 2), 1.5, jnp.bfloat16),
        "scalar": jnp.int32(4),
        "number": 5,
        "host number": np.int64(2**40),
        "flag": np.bool_(True),
        "nothing": None,
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "empty on the host": np.zeros((2, 0), np.int16),
        "nested": ({"a/b": jnp.ones(2)}, [jnp.zeros(1)]),
        "key": jax.random.key(11),
    }
    save_small(path, model=model)
    found = restore_small(path, model=model).model
    assert jax.tree.structure(found) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        if jax.dtypes.issubdtype(getattr(a, "dtype", np.int32), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert_same(a, b)


WIDE = np.array([2**40 + 5])
MODEL = {"w": np.ones(2, np.float32), "n": WIDE}


@pytest.fixture(scope="module")
def with_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "saved"
    save_small(path, model=MODEL | {"w": jnp.ones(2)})
    return path


@pytest.mark.parametrize(
    ("model", "convert", "said"),
    [
        (MODEL | {"v": np.ones(1)}, False, "leaf 'v': expected one, got"),
        ({"n": WIDE}, False, "leaf 'w': expected none, got one"),
        (MODEL | {"w": np.ones(3, "f4")}, False, r"'w': expected shape \[3\], got shape \[2\]"),
        (MODEL | {"w": np.ones(2, "f2")}, False, "float16, got dtype float32; .*convert=True"),
        (
            MODEL | {"n": jax.ShapeDtypeStruct((1,), np.int64)},
            False,
            "'n': .*, got int64, which JAX",
        ),
        (MODEL | {"n": np.zeros(1, "i4")}, True, "'n': expected dtype .*, got dtype int64; give"),
        (MODEL | {"n": np.zeros(1, "f4")}, True, "'n': expected dtype .*, got dtype int64; give"),
    ],
)
def test_another_model_is_refused(with_model, model, convert, said):
    with pytest.raises(ValueError, match=said):
        restore_small(with_model, model=model, convert=convert)


def test_a_model_is_converted_when_asked_and_left_out_when_not(with_model, path):
    half = MODEL | {"w": jnp.ones(2, jnp.float16)}
    found = restore_small(with_model, model=jax.tree.map(lambda leaf: leaf * 0, half), convert=True)
    assert_same(found.model, half)
    assert restore_small(with_model).model is None
    save_small(path)
    with pytest.raises(FileNotFoundError, match=r"saved: expected .*, model, got none of model"):
        restore_small(path, model={})


def test_both_apis_go_on_from_a_checkpoint(path):
    first = make_embedding()
    train(first, range(2))
    save(path, first.engine, first.state)
    saved = first.retrieve()
    train(first, range(2, 4))

    second = make_embedding(seed=5)
    second.engine = first.engine  # its programs are compiled
    second.state = restore(path, second.engine).state
    train(second, range(2, 4))
    assert_same(snapshot(second), snapshot(first))
    eight = engine(8)
    assert_same(contents(eight, restore(path, eight).state), (*saved, 2))


ODD = [
    {"rows": 1, "dim": 1},
    {"rows": 1, "dim": 3, "devices": 8},
    {"rows": 3, "dim": 2, "devices": 8, "placement": "div"},
    {"rows": 3, "dim": 1000, "devices": 2, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", ODD, ids=str)
@pytest.mark.quick(1)
def test_odd_tables_come_back(path, options):
    odd = small(**options)
    save(path, odd, state := odd.init(KEY))
    assert_same(contents(odd, restore(path, odd).state), contents(odd, state))


def test_blocks_are_put_together(tmp_path, monkeypatch):
    for module in ("io.checkpoint.row_files", "core.rows.devices"):
        monkeypatch.setattr(f"tpu_embed.{module}.BLOCK", 64)
    layouts = [("mod", 2), ("div", 2), ("mod", 1), ("div", 8)]
    of = lambda rows, p, n: small(rows, 3, placement=p, devices=n, optimizer=False)  # noqa: E731
    engines, grown = ([of(rows, *one) for one in layouts] for rows in (41, 90))
    wanted = contents(engines[0], engines[0].init(KEY))[0]["item"]
    for i, one in enumerate(engines):
        save(tmp_path / f"{i}", one, one.init(KEY))
        for other in engines:
            state = restore(tmp_path / f"{i}", other).state
            np.testing.assert_array_equal(table_of(other, state), wanted)
        for other in grown[:3]:  # the key makes the rows that were saved, and those that were not
            state = restore(tmp_path / f"{i}", other, key=KEY).state
            assert_same(contents(other, state), contents(other, other.init(KEY)))
    assert len(list((tmp_path / "0").rglob("c.*"))) > 5


def nested(depth):
    value = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


LARGE = {"state": 2**100, "inf": float("inf")}


@pytest.mark.parametrize("position", [None, 0, "π", [1, [2.5]], LARGE, {"a": []}, nested(100)])
def test_positions_come_back(path, position):
    save_small(path, position=position)
    assert restore_small(path).position == position


def test_a_model_of_empty_arrays_comes_back(path):
    """Orbax has nothing to keep then."""
    model = {"device": jnp.zeros((0, 3)), "host": np.zeros(0, np.int8)}
    save_small(path, model=model)
    assert_same(restore_small(path, model=model).model, model)
    for other in ({**model, "host": np.zeros(1, np.int8)}, {**model, "host": np.zeros((0, 1))}):
        with pytest.raises(ValueError, match=r"leaf 'host': expected shape .*, got shape \[0\]"):
            restore_small(path, model=other)


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_small("with spaces [0] é/at first")
    restore_small(tmp_path / "with spaces [0] é" / "at first")
    (tmp_path / "file").write_text("")
    for path in ("with spaces [0] é/at first", "file"):
        with pytest.raises(ValueError, match=rf"path: expected no file, got .*{path[-4:]}"):
            save_small(path)
    for path in ("nowhere", "file", "with spaces [0] é"):
        with pytest.raises(FileNotFoundError, match=r"tables, position, got none of tables, po"):
            restore_small(path)


def test_a_running_event_loop_does_not_matter(path):
    """A notebook runs one."""
    model = {"kernel": jax.numpy.arange(3.0)}

    async def saved_and_restored():
        save_small(path, model=model)
        return restore_small(path, model=model).model

    np.testing.assert_array_equal(asyncio.run(saved_and_restored())["kernel"], [0, 1, 2])


def test_a_save_that_fails_leaves_nothing(path):
    full = mock.patch("tpu_embed.io.checkpoint.tables.write_rows", side_effect=OSError("full"))
    with full, pytest.raises(OSError, match="full"):
        save_small(path)
    jax.tree.map(lambda array: array.delete(), state := small_state())
    with pytest.raises(ValueError, match=r"state: stack 'item@.*got one that was donated"):
        save(path, small_engine(), state)
    assert not list(path.parent.iterdir())


def test_who_serves_does_not_import_orbax():
    code = "import sys, tpu_embed.io; print('orbax.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match=r"module 'tpu_embed\.io' has no attribute 'saved'"):
        tpu_embed.io.saved  # noqa: B018


NOT_KEPT = {
    "a leaf": ({"model": np.ones(2)}, "model: expected a dict, list or other container, got one"),
    "nothing": ({"model": {}}, r"model: expected arrays, got \{\}; leave it out"),
    "dots": ({"model": {"a": {"w": np.ones(2)}, "a.w": np.ones(2)}}, "leaf 'a.w': expected one"),
    "slashes": ({"model": {"a": [np.ones(2)], "a/0": np.ones(2)}}, "leaf 'a/0': expected one"),
    "text": ({"model": {"a": "x"}}, "leaf 'a': expected an array .*, got str"),
    "texts": ({"model": {"a": [np.array(["x"])]}}, "leaf 'a/0': expected an array .* dtype <U1"),
    "a large integer": ({"model": {"a": 2**70}}, "takes more than 64 bits"),
    "a set": ({"position": {1, 2}}, "position: expected a JSON value, got"),
    "an array": ({"position": np.arange(2)}, "position: expected a JSON value, got"),
    "a number as key": ({"position": {"a": [{1: 2}]}}, "expected string keys, got key 1"),
    "too deep": ({"position": nested(101)}, "position: expected at most 100 values inside each"),
    "far too deep": ({"position": nested(5000)}, "expected at most 100 values inside each"),
    "no state": ({"state": {}}, r"expected a TableState, got dict"),
}


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(path, case):
    parts, said = NOT_KEPT[case]
    with pytest.raises(ValueError, match=said):
        save(path, small_engine(), **{"state": small_state()} | parts)
    assert not list(path.parent.iterdir())


def test_threads_may_save_to_one_path(path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(save_small, path) for _ in range(2)]
    (error,) = [call.exception() for call in calls if call.exception()]
    assert "path: expected no file" in str(error)
    states = restore_small(path).state, small_state()
    assert_same(*(contents(small_engine(), state) for state in states))


def test_a_stateful_door_is_no_engine(path):
    embedding = make_embedding()
    for call in (
        lambda: save(path, embedding, embedding.state),
        lambda: restore(path, embedding),
        lambda: CheckpointManager(path, embedding),
    ):
        with pytest.raises(TypeError, match=r"got TPUEmbedding; .* has one, embedding\.engine"):
            call()
    assert not list(path.parent.iterdir())
