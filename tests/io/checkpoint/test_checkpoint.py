"""Checkpoints from both APIs: tables, network and position together; odd input; refusals."""

import asyncio
import concurrent.futures
import functools
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_cases import contents, small, small_engine, small_state, table_of
from facade_cases import FEATURES, assert_same, batch, make_embedding, mesh, snapshot, train
from flax import nnx

import tpu_embed.io
from tpu_embed import EmbeddingEngine
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager, restore, save

KEY = jax.random.key(7)


class Network(nnx.Module):
    """One layer over three activations."""

    def __init__(self):
        self.layer = nnx.Linear(2, 1, rngs=nnx.Rngs(3))

    def __call__(self, activations):
        x = activations["clicks"].sum(1) * activations["shown"] + activations["user"]
        return self.layer(x)[:, 0]


GRAPH, _ = nnx.split(Network())
DENSE = optax.adam(0.125)


def fresh_model():
    params = nnx.split(Network())[1]
    return {"params": params, "optimizer": DENSE.init(params)}


@functools.cache
def engine(devices):
    return EmbeddingEngine(FEATURES, o.Adagrad(0.5), mesh=mesh(devices))


@functools.cache
def step_of(devices):
    """Return the step of a whole model, compiled; state and model are donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, model, batch):
        def loss_fn(params, activations):
            return jnp.mean((nnx.merge(GRAPH, params)(activations) - 1.0) ** 2)

        activations = engine(devices).lookup(state, batch)
        dense, sparse = jax.grad(loss_fn, argnums=(0, 1))(model["params"], activations)
        updates, optimizer = DENSE.update(dense, model["optimizer"], model["params"])
        params = optax.apply_updates(model["params"], updates)
        state = engine(devices).update(state, batch, sparse)
        return state, {"params": params, "optimizer": optimizer}

    return step


def run(devices, state, model, numbers):
    for number in numbers:
        placed = engine(devices).place(batch(number, 8))
        state, model = step_of(devices)(state, model, placed)
    return state, model


@pytest.fixture(autouse=True)
def readers_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        yield


@pytest.mark.parametrize("in_background", [True, False], ids=["in background", "waiting"])
@pytest.mark.quick(1)
def test_a_whole_run_goes_on_with_the_same_bits(tmp_path, in_background):
    devices = 2
    options = {"in_background": in_background}
    state, model = run(devices, engine(devices).init(KEY), fresh_model(), range(3))
    with CheckpointManager(tmp_path, engine(devices), **options) as manager:
        assert manager.save(3, state, model=model, position={"batch": 3})
        state, model = run(devices, state, model, range(3, 6))  # donates what is being saved
    undisturbed = contents(engine(devices), state), nnx.to_pure_dict(model["params"])

    with CheckpointManager(tmp_path, engine(devices), **options) as manager:
        restored = manager.restore(model=fresh_model())
    assert restored.position == {"batch": 3}
    last = run(devices, restored.state, restored.model, range(restored.position["batch"], 6))
    resumed = contents(engine(devices), last[0]), nnx.to_pure_dict(last[1]["params"])
    assert_same(resumed, undisturbed)
    assert_same(last[1]["optimizer"], model["optimizer"])


def test_a_model_moves_to_other_devices(tmp_path):
    state, model = run(2, engine(2).init(KEY), fresh_model(), range(2))
    save(tmp_path / "saved", engine(2), state, model=model)
    for given in (fresh_model(), jax.eval_shape(fresh_model)):  # no sharding was asked for
        restored = restore(tmp_path / "saved", engine(8), model=given)
        assert_same(contents(engine(8), restored.state), contents(engine(2), state))
        assert_same(jax.device_get(restored.model), jax.device_get(model))
        placed = [leaf.sharding.device_set for leaf in jax.tree.leaves(restored.model)]
        assert all(devices == set(jax.devices()) for devices in placed)
    there = jax.sharding.SingleDeviceSharding(jax.devices()[5])
    given = jax.device_put(fresh_model(), there)
    restored = restore(tmp_path / "saved", engine(8), model=given)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored.model)} == {there}


def test_leaves_of_many_kinds_come_back(tmp_path):
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
    save(tmp_path / "saved", small_engine(), small_state(), model=model)
    found = restore(tmp_path / "saved", small_engine(), model=model).model
    assert jax.tree.structure(found) == jax.tree.structure(model)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        if jax.dtypes.issubdtype(getattr(a, "dtype", np.int32), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert_same(a, b)


@pytest.fixture(scope="module")
def with_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "saved"
    save(path, small_engine(), small_state(), model={"w": jnp.ones(2), "n": np.array([2**40 + 5])})
    return path


LARGE = np.array([2**40 + 5])


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ({"w": np.ones(2, "f4"), "n": LARGE, "v": np.ones(1)}, {}, r"leaf 'v': expected one, got"),
        ({"n": LARGE}, {}, r"leaf 'w': expected none, got one"),
        ({"w": np.ones(3, "f4"), "n": LARGE}, {}, r"'w': expected shape \[3\], got shape \[2\]"),
        ({"w": np.ones(2, "f2"), "n": LARGE}, {}, "float16, got dtype float32; .*convert=True"),
        (
            {"w": np.ones(2, "f4"), "n": jax.ShapeDtypeStruct((1,), np.int64)},
            {},
            r"leaf 'n': expected .*, got int64, which JAX makes only",
        ),
        (
            {"w": np.ones(2, "f4"), "n": np.zeros(1, np.int32)},
            {"convert": True},
            r"leaf 'n': expected dtype .*, got dtype int64; give",
        ),
        (
            {"w": np.ones(2, "f4"), "n": np.zeros(1, np.float32)},
            {"convert": True},
            r"leaf 'n': expected dtype .*, got dtype int64; give",
        ),
    ],
)
def test_another_model_is_refused(with_model, model, options, said):
    with pytest.raises(ValueError, match=said):
        restore(with_model, small_engine(), model=model, **options)


def test_a_model_is_converted_when_asked_and_left_out_when_not(with_model, tmp_path):
    half = {"w": jnp.zeros(2, jnp.float16), "n": LARGE}
    found = restore(with_model, small_engine(), model=half, convert=True).model
    assert_same(found, {"w": jnp.ones(2, jnp.float16), "n": LARGE})
    assert restore(with_model, small_engine()).model is None
    save(tmp_path / "saved", small_engine(), small_state())
    with pytest.raises(FileNotFoundError, match=r"saved: expected .*, model, got none of model"):
        restore(tmp_path / "saved", small_engine(), model={})


def test_both_apis_go_on_from_a_checkpoint(tmp_path):
    first = make_embedding()
    train(first, range(2))
    save(tmp_path / "saved", first.engine, first.state)
    saved = first.retrieve()
    train(first, range(2, 4))

    second = make_embedding(seed=5)
    second.engine = first.engine  # its programs are compiled
    second.state = restore(tmp_path / "saved", second.engine).state
    train(second, range(2, 4))
    assert_same(snapshot(second), snapshot(first))
    state = restore(tmp_path / "saved", engine(8)).state
    assert_same(contents(engine(8), state), (*saved, 2))


ODD = {
    "one row": {"rows": 1, "dim": 1},
    "one row on eight": {"rows": 1, "dim": 3, "devices": 8},
    "fewer rows than devices": {"rows": 3, "dim": 2, "devices": 8, "placement": "div"},
    "wide": {"rows": 3, "dim": 1000, "devices": 2, "dtype": "bfloat16"},
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.quick(1)
def test_odd_tables_come_back(tmp_path, case):
    odd = small(**ODD[case])
    state = odd.init(KEY)
    save(tmp_path / "saved", odd, state)
    assert_same(contents(odd, restore(tmp_path / "saved", odd).state), contents(odd, state))


def test_blocks_are_put_together(tmp_path, monkeypatch):
    for module in ("io.checkpoint.row_files", "core.rows.devices"):
        monkeypatch.setattr(f"tpu_embed.{module}.BLOCK", 64)
    layouts = [("mod", 2), ("div", 2), ("mod", 1), ("div", 8)]
    engines, grown = (
        [small(rows, 3, placement=p, devices=n, optimizer=False) for p, n in layouts]
        for rows in (41, 90)
    )
    wanted = contents(engines[0], engines[0].init(KEY))[0]["item"]
    for i, one in enumerate(engines):
        save(tmp_path / f"{i}", one, one.init(KEY))
        for other in engines:
            state = restore(tmp_path / f"{i}", other).state
            np.testing.assert_array_equal(table_of(other, state), wanted)
        for other in grown[:2]:  # the key makes the rows that were saved, and those that were not
            state = restore(tmp_path / f"{i}", other, key=KEY).state
            assert_same(contents(other, state), contents(other, other.init(KEY)))
    assert len(list((tmp_path / "0").rglob("c.*"))) > 5


@pytest.mark.parametrize(
    "position",
    [None, 0, "π", [1, [2.5]], {"state": 2**100, "inf": float("inf")}, {"nested": {"a": []}}],
    ids=str,
)
def test_positions_come_back(tmp_path, position):
    save(tmp_path / "saved", small_engine(), small_state(), position=position)
    assert restore(tmp_path / "saved", small_engine()).position == position


def test_a_model_of_empty_arrays_comes_back(tmp_path):
    """Orbax has nothing to keep then."""
    model = {"device": jnp.zeros((0, 3)), "host": np.zeros(0, np.int8)}
    save(tmp_path / "saved", small_engine(), small_state(), model=model)
    assert_same(restore(tmp_path / "saved", small_engine(), model=model).model, model)
    for other in ({**model, "host": np.zeros(1, np.int8)}, {**model, "host": np.zeros((0, 1))}):
        with pytest.raises(ValueError, match=r"leaf 'host': expected shape .*, got shape \[0\]"):
            restore(tmp_path / "saved", small_engine(), model=other)


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("with spaces [0] é/at first", small_engine(), small_state())
    restore(tmp_path / "with spaces [0] é" / "at first", small_engine())
    (tmp_path / "file").write_text("")
    for path in ("with spaces [0] é/at first", "file"):
        with pytest.raises(ValueError, match=rf"path: expected no file, got .*{path[-4:]}"):
            save(path, small_engine(), small_state())
    for path in ("nowhere", "file", "with spaces [0] é"):
        with pytest.raises(FileNotFoundError, match=r"tables, position, got none of tables, po"):
            restore(path, small_engine())


def test_a_running_event_loop_does_not_matter(tmp_path):
    """A notebook runs one."""
    model = {"kernel": jax.numpy.arange(3.0)}

    async def saved_and_restored():
        save(tmp_path / "one", small_engine(), small_state(), model=model)
        return restore(tmp_path / "one", small_engine(), model=model).model

    np.testing.assert_array_equal(asyncio.run(saved_and_restored())["kernel"], [0, 1, 2])


def test_a_save_that_fails_leaves_nothing(tmp_path):
    full = mock.patch("tpu_embed.io.checkpoint.tables.write_rows", side_effect=OSError("full"))
    with full, pytest.raises(OSError, match="full"):
        save(tmp_path / "saved", small_engine(), small_state())
    assert not list(tmp_path.iterdir())


def test_who_serves_does_not_import_orbax():
    code = "import sys, tpu_embed.io; print('orbax.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    with pytest.raises(AttributeError, match=r"module 'tpu_embed\.io' has no attribute 'saved'"):
        tpu_embed.io.saved  # noqa: B018


def donated():
    state = small_state()
    jax.tree.map(lambda array: array.delete(), state)
    return state


def nested(depth):
    value = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


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
    "donated": ({"state": donated}, r"state: stack 'item@.*got one that was donated"),
}


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, case):
    options, said = NOT_KEPT[case]
    state = options.get("state", small_state)
    state = state() if callable(state) else state
    parts = {name: part for name, part in options.items() if name != "state"}
    with pytest.raises(ValueError, match=said):
        save(tmp_path / "saved", small_engine(), state, **parts)
    assert not list(tmp_path.iterdir())


def test_deep_positions_come_back(tmp_path):
    save(tmp_path / "saved", small_engine(), small_state(), position=nested(100))
    assert restore(tmp_path / "saved", small_engine()).position == nested(100)


def test_threads_may_save_to_one_path(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(save, tmp_path / "saved", small_engine(), small_state()) for _ in range(2)
        ]
    (error,) = [call.exception() for call in calls if call.exception()]
    assert "path: expected no file" in str(error)
    restored = restore(tmp_path / "saved", small_engine()).state
    assert_same(contents(small_engine(), restored), contents(small_engine(), small_state()))


def test_a_stateful_door_is_no_engine(tmp_path):
    embedding = make_embedding()
    for call in (
        lambda: save(tmp_path / "saved", embedding, embedding.state),
        lambda: restore(tmp_path / "saved", embedding),
        lambda: CheckpointManager(tmp_path / "run", embedding),
    ):
        with pytest.raises(TypeError, match=r"got TPUEmbedding; .* has one, embedding\.engine"):
            call()
    assert not list(tmp_path.iterdir())
