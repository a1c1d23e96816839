"""A host buffer may be overwritten as soon as any call that took it has returned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import mesh
from flax import nnx

import tpu_embed
from tpu_embed import io, nn, training
from tpu_embed import optimizers as o
from tpu_embed._snapshot import as_array, snapshot
from tpu_embed.io.quantize import quantize_rows
from tpu_embed.sparse import IndexedSlices, clip_by_global_norm, global_norm, scale

V, D, B, H = 100_000, 16, 1024, 8
"""Large enough that JAX copies in the background what it does not use where it lies."""
REPEATS = 4
RATE = np.array(0.5, np.float32)


def at_64_bytes(array):
    """Return a copy in memory that JAX's CPU backend would use as its own."""
    array = np.asarray(array)
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copied = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def anywhere_else(array):
    """Return a copy that JAX would copy, in the background if it is large."""
    return at_64_bytes(np.append(array.reshape(-1)[:1], array))[1:].reshape(array.shape)


@jax.jit
def product(x):
    return x @ x


def keep_busy():
    """Give JAX's threads other work first, so that what a call leaves to them comes late."""
    return [product(jnp.ones((700, 700))) for _ in range(4)]


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def row_ids(*shape):
    return np.random.default_rng(1).integers(0, V, shape, np.int32)


@functools.cache
def engine_and_state():
    table = tpu_embed.TableConfig(V, D, name="t", optimizer=o.SGD(lambda: RATE))
    other = tpu_embed.TableConfig(8, D, name="other", optimizer=optax.adam(0.1))
    features = {"x": tpu_embed.FeatureConfig(table), "y": tpu_embed.FeatureConfig(other)}
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(1))
    state = engine.init(jax.random.key(0))
    ids = {"x": row_ids(B, H), "y": np.zeros(B, np.int32)}
    return engine, state, engine.place(ids)


def read(state):
    engine = engine_and_state()[0]
    return engine.tables(state), engine.slots(state)


def set_rows(values, rows):
    engine, state, _ = engine_and_state()
    return read(engine.set_rows(state, "t", rows, values))


def load(table):
    engine, state, _ = engine_and_state()
    return read(engine.load(state, "t", iter([table[:7], table[7:]])))


def load_arrays(table, count):
    engine, state, _ = engine_and_state()
    return read(engine.load_arrays(state, {"t": table}, {"other": {"count": count}}))


def update(gradient):
    engine, state, batch = engine_and_state()
    return read(engine.update(state, batch, {"x": gradient, "y": jnp.ones((B, D))}))


def update_in_place(gradient, rate):
    engine, state, batch = engine_and_state()
    gradients, copied = {"x": gradient, "y": jnp.ones((B, D))}, jax.tree.map(jnp.copy, state)
    return read(engine.update_in_place(copied, batch, gradients, learning_rates=(rate,)))


def place(ids, weights):
    engine, state, _ = engine_and_state()
    features = {"x": ids, "y": np.zeros(B, np.int32)}
    return engine.lookup(state, engine.place(features, {"x": weights, "y": None}))


def look_up(combiner, *operands):
    return tpu_embed.embedding_lookup(*operands, combiner=combiner)


def squares(table):
    return (table**2).sum()


def differentiate(table):
    return tpu_embed.sparse_value_and_grad(squares)(table)


def gradients(x, cotangent):
    return training.gradients(jnp.sin, [x], grad_ys=cotangent)


def hook(activation):
    return training.hook({"x": activation}, {"x": {"x": np.zeros_like(activation)}})


OPTIMIZER = training.Optimizer(o.Adagrad(0.5), "adagrad")


def apply_gradients(param, gradient, slot, rate):
    params = {"w": param}
    state = OPTIMIZER.init(params)
    state = jax.tree.map(lambda x: slot if x.shape == slot.shape else x, state)
    pairs = [(gradient, "['w']")]
    params, state = OPTIMIZER.apply_gradients(pairs, params, state, learning_rate=rate)
    return params, state.inner


def apply_slices(param, values, indices):
    params = {"w": param}
    pairs = [(IndexedSlices(values, indices, (V, D)), "['w']")]
    params, _ = OPTIMIZER.apply_gradients(pairs, params, OPTIMIZER.init(params))
    return params


def minimize(param):
    params = {"w": param}
    params, _, loss = OPTIMIZER.minimize(
        lambda params: squares(params["w"]), params, OPTIMIZER.init(params)
    )
    return params, loss


KEEPS_PARAMS = optax.GradientTransformation(lambda params: params, optax.identity().update)


def init(param):
    return training.Optimizer(KEEPS_PARAMS, "keeps").init({"w": param}).inner


def as_optax(param, gradient, rate):
    transform = o.Momentum(0.5).as_optax()
    return transform.update(gradient, transform.init(param), param, learning_rate=rate)


def of_slices(values, indices):
    slices = IndexedSlices(values, indices, (V, D))
    return slices.deduplicate(), slices.to_dense(), slices + slices, slices * np.float32(2)


def of_gradients(dense, factor):
    clipped = clip_by_global_norm({"w": dense}, factor)
    return scale({"w": dense}, factor), global_norm({"w": dense}), clipped


@functools.cache
def layer():
    table = tpu_embed.TableConfig(V, D, combiner="sum", trainable=False)
    return nn.EmbeddingBag(table, mesh=mesh(1), rngs=nnx.Rngs(0))


def layer_lookup(ids, weights):
    return layer()(ids, weights)


@functools.cache
def quantized():
    return quantize_rows(floats(V, D))


def dequantized(values, scale, offset):
    return io.QuantizedTable(values, scale, offset).dequantized()


FILMS = tpu_embed.TableConfig(V, D, name="films", combiner="sum")


def served_partly_on_host(scale, ids, weights):
    table = quantized()
    mixed = io.QuantizedTable(jnp.asarray(table.values), scale, table.offset)
    return io.serving_lookup({"films": mixed}, ids, tpu_embed.FeatureConfig(FILMS), weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "exported"
    io.export_model(
        path,
        lambda activations, x: activations + x,
        {"films": floats(V, D)},
        tpu_embed.FeatureConfig(FILMS),
        row_ids(2, H),
        weights=floats(2, H),
        inputs=(floats(2, D),),
    )
    return io.load_model(path)


BAGS, WEIGHTS = row_ids(B, H), floats(B, H)
TABLE, SMALL, SLICES = floats(V, D), floats(B, D), (floats(B * H, D), row_ids(B * H))
CASES = {
    "set_rows": (set_rows, TABLE, np.random.default_rng(2).permutation(V).astype(np.int32)),
    "load": (load, TABLE),
    "load_arrays": (load_arrays, TABLE, np.array(7, np.int32)),
    "update": (update, SMALL),
    "update_in_place": (update_in_place, SMALL, RATE),
    "place": (place, BAGS, WEIGHTS),
    "embedding_lookup": (functools.partial(look_up, None), TABLE, BAGS, WEIGHTS),
    "embedding_lookup of bags": (functools.partial(look_up, "mean"), TABLE, BAGS, WEIGHTS),
    "sparse_value_and_grad": (differentiate, TABLE),
    "gradients": (gradients, TABLE, TABLE),
    "tag": (functools.partial(training.tag, name="t"), TABLE),
    "hook": (hook, TABLE),
    "apply_gradients": (apply_gradients, TABLE, TABLE, np.square(TABLE) + 1, RATE),
    "apply_gradients of slices": (apply_slices, TABLE, *SLICES),
    "minimize": (minimize, TABLE),
    "init": (init, TABLE),
    "as_optax": (as_optax, TABLE, TABLE, RATE),
    "IndexedSlices": (of_slices, *SLICES),
    "scale and clip": (of_gradients, TABLE, RATE),
    "layer": (layer_lookup, BAGS, WEIGHTS),
    "dequantized": (dequantized, quantized().values, quantized().scale, quantized().offset),
    "serving_lookup": (served_partly_on_host, quantized().scale, BAGS, WEIGHTS),
}


def check(call, *buffers):
    """Call with buffers that are overwritten at once; compare with buffers that are left alone."""
    expected = jax.device_get(call(*map(np.copy, buffers)))
    for repeat in range(REPEATS):
        mine = [(at_64_bytes, anywhere_else)[repeat % 2](buffer) for buffer in buffers]
        waiting = keep_busy()
        result = call(*mine)
        for buffer in mine:
            buffer[...] = 1
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), expected)
        jax.block_until_ready(waiting)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(1)
def test_buffers_may_be_filled_anew(case):
    check(*CASES[case])


def test_buffers_of_a_model_may_be_filled_anew(model):
    check(lambda ids, weights, x: model(ids, x, weights=weights), BAGS, WEIGHTS, SMALL)


def test_what_a_learning_rate_returned_may_be_changed():
    buffer = at_64_bytes(RATE)
    table = tpu_embed.TableConfig(V, D, name="t", optimizer=o.SGD(lambda: buffer))
    engine = tpu_embed.EmbeddingEngine({"x": tpu_embed.FeatureConfig(table)})
    (rate,) = engine.learning_rates()
    buffer[...] = 7
    assert float(rate) == 0.5


def test_what_jax_refuses_it_still_refuses():
    engine, state, batch = engine_and_state()
    masked = np.ma.masked_array(SMALL, SMALL > 0)
    with pytest.raises(ValueError, match="masked"):
        engine.update(state, batch, {"x": masked, "y": None})


def test_only_arrays_of_the_host_are_copied():
    for kept in (jnp.ones(2), nnx.Param(jnp.ones(2)), None, 2.0, [1, 2]):
        assert snapshot(kept) is kept
    assert not np.shares_memory(snapshot(SMALL), SMALL)
    assert as_array(2.0).weak_type
