"""A history and its candidates, placed together by name: one lookup of one table."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, mesh
from flax import nnx

import tpu_embed
from tpu_embed import FeatureConfig, HostStorage, Jagged, RaggedIds, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.nn import EmbeddingBag, fused_value_and_grad

V, D, B, N = 60, 4, 8, 16


def draw(step):
    rng = np.random.default_rng(step)
    rows = [rng.integers(0, V, n).tolist() for n in rng.permutation(B)]
    return {"history": RaggedIds.from_lists(rows), "item": rng.integers(0, V, N)}


def loss_of(found):
    """A loss in which the gradient of each number depends on its place and value."""
    history, item = found["history"], found["item"]
    users = jnp.repeat(history.sums(), N // B, axis=0)  # [B, D] -> [N, D]
    return ((users - item) ** 3 * jnp.arange(N, dtype=jnp.float32)[:, None]).mean()


def shown(found):
    """Return activations, sequences padded, whatever room there was for them."""
    return found["history"].to_padded(B), found["item"]


def layer_of(devices, hosted=False, **options):
    """Return a layer, on the host if asked for, and a table on the devices with the same rows."""
    drawn = {"initializer": jax.nn.initializers.normal(0.3), "optimizer": o.Adagrad(0.3)}
    table = TableConfig(V, D, name="t", combiner="sum", **drawn)
    own = replace(table, storage=HostStorage(device_rows=44)) if hosted else table
    where = {"mesh": mesh(devices), "rngs": nnx.Rngs(0)}
    return EmbeddingBag(own, **{"jagged": True} | options, **where), table


@pytest.mark.parametrize(("devices", "hosted"), [(1, False), (8, False), (1, True), (2, True)])
@pytest.mark.quick(1)
def test_the_bits_are_the_engines(devices, hosted):
    layer, table = layer_of(devices, hosted)
    features = {"history": FeatureConfig(table, jagged=True), "item": FeatureConfig(table)}
    engine = tpu_embed.EmbeddingEngine(features, mesh=mesh(devices))
    state = engine.init(nnx.Rngs(0).params())
    fit = nnx.jit(lambda m, batch: fused_value_and_grad(lambda m: loss_of(m(batch)))(m)[0])
    look_up = nnx.jit(lambda layer, batch: layer(batch))

    @jax.jit
    def step(state, batch):
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))
        loss, gradients = jax.value_and_grad(lambda values: loss_of(rebuild(values)))(values)
        return engine.update(state, batch, gradients), loss

    for number in range(3):
        looked, own = layer.place(draw(number), training=False), engine.place(draw(number))
        found = look_up(layer, looked)
        assert isinstance(found["history"], Jagged)
        assert_same(*map(shown, (found, engine.lookup(state, own))))
        loss = fit(layer, layer.place(draw(number)))
        state, reference = step(state, own)
        np.testing.assert_allclose(loss, reference, rtol=1e-5)
        for slot in (None, "accumulators"):
            held = (layer.engine, layer.state), (engine, state)
            assert_same(*(e.rows(s, "t", np.arange(V), slot=slot) for e, s in held))
    assert int(layer.step[...]) == 3
    assert layer.bad_ids[...].shape == (1,)


def test_inputs_of_the_layers_own_kind_are_taken_as_ever():
    """Names may be others, also outside of a jit."""
    layer, _ = layer_of(1)
    assert isinstance(layer(RaggedIds.from_lists([[1], [2, 3]] * 4)), Jagged)
    assert set(layer({"a": np.arange(8), "b": np.arange(16)})) == {"a", "b"}


def test_padded_sequences_and_bags_have_names_too():
    layer, _ = layer_of(2, jagged=False, max_sequence_length=3)
    ids = {"seen": np.arange(8).reshape(4, 2), "one": np.arange(4)}
    found, doubled = layer(ids), layer(ids, {"seen": np.full((4, 2), 2.0)})
    assert {name: one.shape for name, one in found.items()} == {"seen": (4, 3, D), "one": (4, D)}
    np.testing.assert_array_equal(found["one"], np.asarray(layer.embedding)[:4])
    np.testing.assert_array_equal(doubled["seen"], 2 * found["seen"])


def test_what_is_refused():
    layer, _ = layer_of(1)
    for ids in ({}, {1: np.arange(4)}):
        with pytest.raises(ValueError, match="ids: expected ids by name, a string"):
            layer.place(ids)
    some = [layer.place({"item": np.arange(n)}) for n in (4, 8)]
    with pytest.raises(ValueError, match=r"place them together, layer\.place"):
        fused_value_and_grad(lambda layer: sum(layer(one)["item"].sum() for one in some))(layer)
