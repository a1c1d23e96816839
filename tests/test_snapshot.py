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
from tpu_embed import FeatureConfig, TableConfig, io, nn, optimizers, training
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
    table = TableConfig(V, D, name="t", optimizer=optimizers.SGD(lambda: RATE))
    other = TableConfig(8, D, name="other", optimizer=optax.adam(0.1))
    features = {"x": FeatureConfig(table), "y": FeatureConfig(other)}
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(1))
    state = engine.init(jax.random.key(0))
    ids = {"x": row_ids(B, H), "y": np.zeros(B, np.int32)}
    return engine, state, engine.place(ids)


def of_engine(call):
    """Return a call of an engine, its state and a batch as one of buffers alone."""

    def called(*buffers):
        engine, state, batch = engine_and_state()
        found = call(engine, state, batch, *buffers)
        is_state = isinstance(found, tpu_embed.TableState)
        return (engine.tables(found), engine.slots(found)) if is_state else found

    return called


def load_arrays(engine, state, _, table, count):
    return engine.load_arrays(state, {"t": table}, {"other": {"count": count}})


def update(engine, state, batch, gradient):
    return engine.update(state, batch, {"x": gradient, "y": jnp.ones((B, D))})


def update_in_place(engine, state, batch, gradient, rate):
    gradients, copied = {"x": gradient, "y": jnp.ones((B, D))}, jax.tree.map(jnp.copy, state)
    return engine.update_in_place(copied, batch, gradients, learning_rates=(rate,))


def place(engine, state, _, ids, weights):
    features = {"x": ids, "y": np.zeros(B, np.int32)}
    return engine.lookup(state, engine.place(features, {"x": weights, "y": None}))


def gradients(x, cotangent):
    return training.gradients(jnp.sin, [x], grad_ys=cotangent)


def hook(activation):
    return training.hook({"x": activation}, {"x": {"x": np.zeros_like(activation)}})


OPTIMIZER = training.Optimizer(optimizers.Adagrad(0.5), "adagrad")


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
    return OPTIMIZER.minimize(lambda params: (params["w"] ** 2).sum(), params, state)[::2]


def as_optax(param, gradient, rate):
    transform = optimizers.Momentum(0.5).as_optax()
    return transform.update(gradient, transform.init(param), param, learning_rate=rate)


def of_slices(values, indices):
    slices = IndexedSlices(values, indices, (V, D))
    return slices.deduplicate(), slices.to_dense(), slices + slices, slices * np.float32(2)


def of_gradients(dense, factor):
    clipped = clip_by_global_norm({"w": dense}, factor)
    return scale({"w": dense}, factor), global_norm({"w": dense}), clipped


def layer_lookup(ids, weights):
    table = TableConfig(V, D, combiner="sum", trainable=False)
    return nn.EmbeddingBag(table, mesh=mesh(1), rngs=nnx.Rngs(0))(ids, weights)


QUANTIZED = io.quantize_rows(floats(V, D))


def dequantized(values, scale, offset):
    return io.QuantizedTable(values, scale, offset).dequantized()


FILMS = TableConfig(V, D, name="films", combiner="sum")


def served_partly_on_host(scale, ids, weights):
    mixed = io.QuantizedTable(jnp.asarray(QUANTIZED.values), scale, QUANTIZED.offset)
    return io.serving_lookup({"films": mixed}, ids, FeatureConfig(FILMS), weights)


ANY = np.random.default_rng(2).permutation(V).astype(np.int32)
KEEPS = optax.GradientTransformation(lambda params: params, optax.identity().update)
KEEPS = training.Optimizer(KEEPS, "keeps")
MEANS = functools.partial(tpu_embed.embedding_lookup, combiner="mean")
BAGS, WEIGHTS = row_ids(B, H), floats(B, H)
TABLE, SMALL, SLICES = floats(V, D), floats(B, D), (floats(B * H, D), row_ids(B * H))
CASES = {
    "set_rows": (of_engine(lambda e, s, _, rows, ids: e.set_rows(s, "t", ids, rows)), TABLE, ANY),
    "load": (of_engine(lambda e, state, _, t: e.load(state, "t", iter([t[:7], t[7:]]))), TABLE),
    "load_arrays": (of_engine(load_arrays), TABLE, np.array(7, np.int32)),
    "update": (of_engine(update), SMALL),
    "update_in_place": (of_engine(update_in_place), SMALL, RATE),
    "place": (of_engine(place), BAGS, WEIGHTS),
    "embedding_lookup": (tpu_embed.embedding_lookup, TABLE, BAGS, WEIGHTS),
    "embedding_lookup of bags": (MEANS, TABLE, BAGS, WEIGHTS),
    "sparse_value_and_grad": (tpu_embed.sparse_value_and_grad(jnp.sum), TABLE),
    "gradients": (gradients, TABLE, TABLE),
    "tag": (functools.partial(training.tag, name="t"), TABLE),
    "hook": (hook, TABLE),
    "apply_gradients": (apply_gradients, TABLE, TABLE, np.square(TABLE) + 1, RATE),
    "apply_gradients of slices": (apply_slices, TABLE, *SLICES),
    "minimize": (minimize, TABLE),
    "init": (lambda param: KEEPS.init({"w": param}).inner, TABLE),
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
    features, ids = FeatureConfig(FILMS), row_ids(2, H)
    given = {"weights": floats(2, H), "inputs": (floats(2, D),)}
    tables = {"films": floats(V, D)}
    io.export_model(tmp_path / "exported", jnp.add, tables, features, ids, **given)
    model = io.load_model(tmp_path / "exported")
    check(lambda ids, weights, x: model(ids, x, weights=weights), BAGS, WEIGHTS, SMALL)


def test_what_a_learning_rate_returned_may_be_changed():
    buffer = at_64_bytes(RATE)
    table = FeatureConfig(TableConfig(V, D, name="t"))
    engine = tpu_embed.EmbeddingEngine(table, optimizers.SGD(lambda: buffer))
    (rate,) = engine.learning_rates()
    buffer[...] = 7
    assert float(rate) == 0.5


def test_what_jax_refuses_it_still_refuses():
    engine, state, batch = engine_and_state()
    masked = np.ma.masked_array(SMALL, SMALL > 0)
    with pytest.raises(ValueError, match="masked"):
        engine.update(state, batch, {"x": masked, "y": None})
