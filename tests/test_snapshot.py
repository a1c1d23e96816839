"""A host buffer may be overwritten as soon as any call that took it has returned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import at_64_bytes, mesh
from flax import nnx

import tpu_embed
from tpu_embed import io, nn, training
from tpu_embed import optimizers as o
from tpu_embed.sparse import IndexedSlices, clip_by_global_norm, global_norm, scale

V, D, B, H = 100_000, 16, 1024, 8
"""Large enough that JAX copies in the background what it does not use where it lies."""
REPEATS = 4
RATE = np.array(0.5, np.float32)


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


def look_up_mean(*operands):
    return tpu_embed.embedding_lookup(*operands, combiner="mean")


def squares(table):
    return (table**2).sum()


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
    params, pairs = {"w": param}, [(IndexedSlices(values, indices, (V, D)), "['w']")]
    return OPTIMIZER.apply_gradients(pairs, params, OPTIMIZER.init(params))[0]


def minimize(param):
    params = {"w": param}
    state = OPTIMIZER.init(params)
    return OPTIMIZER.minimize(lambda params: squares(params["w"]), params, state)[::2]


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


def layer_lookup(ids, weights):
    table = tpu_embed.TableConfig(V, D, combiner="sum", trainable=False)
    return nn.EmbeddingBag(table, mesh=mesh(1), rngs=nnx.Rngs(0))(ids, weights)


QUANTIZED = io.quantize_rows(floats(V, D))


def dequantized(values, scale, offset):
    return io.QuantizedTable(values, scale, offset).dequantized()


FILMS = tpu_embed.TableConfig(V, D, name="films", combiner="sum")


def served_partly_on_host(scale, ids, weights):
    mixed = io.QuantizedTable(jnp.asarray(QUANTIZED.values), scale, QUANTIZED.offset)
    return io.serving_lookup({"films": mixed}, ids, tpu_embed.FeatureConfig(FILMS), weights)


BAGS, WEIGHTS = row_ids(B, H), floats(B, H)
TABLE, SMALL, SLICES = floats(V, D), floats(B, D), (floats(B * H, D), row_ids(B * H))
CASES = {
    "set_rows": (set_rows, TABLE, np.random.default_rng(2).permutation(V).astype(np.int32)),
    "load": (load, TABLE),
    "load_arrays": (load_arrays, TABLE, np.array(7, np.int32)),
    "update": (update, SMALL),
    "update_in_place": (update_in_place, SMALL, RATE),
    "place": (place, BAGS, WEIGHTS),
    "embedding_lookup": (tpu_embed.embedding_lookup, TABLE, BAGS, WEIGHTS),
    "embedding_lookup of bags": (look_up_mean, TABLE, BAGS, WEIGHTS),
    "sparse_value_and_grad": (tpu_embed.sparse_value_and_grad(squares), TABLE),
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
    "dequantized": (dequantized, QUANTIZED.values, QUANTIZED.scale, QUANTIZED.offset),
    "serving_lookup": (served_partly_on_host, QUANTIZED.scale, BAGS, WEIGHTS),
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


def test_buffers_of_a_model_may_be_filled_anew(tmp_path):
    features, ids = tpu_embed.FeatureConfig(FILMS), row_ids(2, H)
    given = {"weights": floats(2, H), "inputs": (floats(2, D),)}
    tables = {"films": floats(V, D)}
    io.export_model(tmp_path / "exported", jnp.add, tables, features, ids, **given)
    model = io.load_model(tmp_path / "exported")
    check(lambda ids, weights, x: model(ids, x, weights=weights), BAGS, WEIGHTS, SMALL)


def test_what_a_learning_rate_returned_may_be_changed():
    buffer = at_64_bytes(RATE)
    table = tpu_embed.FeatureConfig(tpu_embed.TableConfig(V, D, name="t"))
    engine = tpu_embed.EmbeddingEngine(table, o.SGD(lambda: buffer))
    (rate,) = engine.learning_rates()
    buffer[...] = 7
    assert float(rate) == 0.5


def test_what_jax_refuses_it_still_refuses():
    engine, state, batch = engine_and_state()
    masked = np.ma.masked_array(SMALL, SMALL > 0)
    with pytest.raises(ValueError, match="masked"):
        engine.update(state, batch, {"x": masked, "y": None})
