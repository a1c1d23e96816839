"""Layers of jagged sequences: what they return, and training with the bits of the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from nn_models import D, V, bag_of, mesh_of

import tpu_embed
from tpu_embed import Jagged, RaggedIds, nn
from tpu_embed import optimizers as o

HISTORIES = [[3, 5, 7, 3], [], [2], [5, 5], [1, 2, 3], [9], [], [22, 21, 20]]
DENSE = np.array([row + [-1] * (5 - len(row)) for row in HISTORIES], np.int32)
RAGGED = RaggedIds.from_lists(HISTORIES)


def layer_of(optimizer=None, *, devices=1, jagged=True, trainable=True, **layer):
    layer |= {"jagged": jagged}
    return bag_of(optimizer, devices=devices, trainable=trainable, layer=layer)


def engine_of(optimizer, devices, **options):
    """Return the engine of a layer's table and feature, and its state."""
    table = tpu_embed.TableConfig(V, D, name="films", optimizer=optimizer)
    feature = tpu_embed.FeatureConfig(table, jagged=True, **options)
    engine = tpu_embed.EmbeddingEngine({"x": feature}, mesh=mesh_of(devices))
    return engine, engine.init(nnx.Rngs(0).params())


@jax.jit
def padded(jagged):
    return jagged.to_padded(6)


def assert_jagged_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, padded(one), padded(other))


def loss_of(found):
    """Return Σ (a² + a): its gradient 2a + 1 has the same bits in every program."""
    found = getattr(found, "values", found)
    return (found**2 + found).sum()


def fused(layer, ids):
    return nn.fused_value_and_grad(lambda layer: loss_of(layer(ids)))(layer)[0]


step = nnx.jit(fused)


@pytest.mark.whole
@pytest.mark.parametrize(("length", "devices"), [(2, 8), (0, 1), (9, 8)])
def test_a_layer_returns_what_the_engine_does(devices, length):
    layer = layer_of(devices=devices, max_sequence_length=length)
    engine, state = engine_of(None, devices, max_sequence_length=length)
    expected = engine.lookup(state, engine.place({"x": RAGGED}))["x"]
    call, batch = nnx.jit(lambda layer, ids: layer(ids)), layer.place(RAGGED)
    for one in (layer(RAGGED), layer(DENSE), layer(batch), call(layer, batch), call(layer, DENSE)):
        assert isinstance(one, Jagged)
        assert_jagged_equal(one, expected)
        assert one.row_splits.shape == (devices, len(HISTORIES) // devices + 1)


def test_a_placed_batch_compiles_only_in_its_first_lookup(caplog):
    layer = layer_of(devices=2)
    for compiles in (True, False):
        batch = layer.place(RAGGED)
        caplog.clear()
        with jax.log_compiles():
            layer(batch)
        assert any("XLA compilation" in word for word in caplog.messages) == compiles


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("form", ["outside of a jit", "placed", "traced"])
@pytest.mark.quick(3)
def test_a_step_has_the_bits_of_the_engines(devices, form):
    layer = layer_of(o.Adam(0.1), devices=devices)
    engine, state = engine_of(o.Adam(0.1), devices)

    @jax.jit
    def theirs(state, batch):
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))
        gradients = jax.grad(lambda v: loss_of(rebuild(v)["x"]))(values)
        return engine.update(state, batch, gradients)

    for order in (slice(None), slice(None, None, -1)):
        ids = RaggedIds.from_lists(HISTORIES[order])
        given = layer.place(ids) if form == "placed" else DENSE[order]
        (fused if form == "outside of a jit" else step)(layer, given)
        state = theirs(state, engine.place({"x": ids}))
    np.testing.assert_array_equal(layer.embedding, engine.tables(state)["films"])
    for name, slot in layer.logical_slots.items():
        np.testing.assert_array_equal(slot, engine.slots(state)["films"][name])


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.whole
def test_several_lookups_train_as_those_of_padded_sequences(devices):
    """The gradient of a place is that of its value, so both have one gradient per id."""
    how = {"devices": devices, "max_sequence_length": DENSE.shape[1]}
    layers = [layer_of(o.Adagrad(0.1), jagged=jagged, **how) for jagged in (True, False)]

    def loss(layer):
        return loss_of(layer(DENSE)) + loss_of(layer(DENSE[::-1, :3]))

    for layer in layers:
        nnx.jit(lambda layer: nn.fused_value_and_grad(loss)(layer)[0])(layer)
        assert int(layer.step[...]) == 1
    np.testing.assert_array_equal(*(layer.embedding for layer in layers))
    assert (np.array(layers[0].embedding) != np.array(layer_of().embedding)).any()


@pytest.mark.whole
@pytest.mark.parametrize("placed", [True, False])
def test_the_rest_of_a_model_has_the_gradients_of_nnx(placed):
    """A layer that is not trained may stand under `nnx.value_and_grad`, placed and dense."""
    linear = nnx.Linear(D, 1, rngs=nnx.Rngs(1))

    def gradients_of(layer, value_and_grad):
        @nnx.jit
        def gradients(model, ids):
            loss = value_and_grad(lambda model: (model.linear(model.layer(ids).sums()) ** 2).sum())
            return loss(model)[1]["linear"]

        ids = layer.place(RAGGED) if placed else DENSE
        return gradients(nnx.Dict(layer=layer, linear=linear), ids)

    expected = gradients_of(layer_of(devices=2, trainable=False), nnx.value_and_grad)
    found = gradients_of(layer_of(o.SGD(0.1), devices=2), nn.fused_value_and_grad)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-5)  # sums in another order


def test_weights_are_differentiated_and_scale_rows():
    layer = layer_of(devices=2, trainable=False)
    weights = np.random.default_rng(0).normal(size=DENSE.shape).astype(np.float32)
    rows = np.array(layer.embedding)

    @jax.jit
    def differentiated(weights):
        found = layer(DENSE, weights)
        sums, pull = jax.vjp(lambda w: layer(DENSE, w).sums(), weights)
        return found, sums, pull(jnp.ones_like(sums))[0]

    # [8, 5, D]: Σ weight * row over the rows, whose gradient by a weight is the sum of its row.
    found, sums, gradient = differentiated(weights)
    dense = np.where((DENSE >= 0)[..., None], rows[DENSE], 0)
    np.testing.assert_allclose(sums, (dense * weights[..., None]).sum(1), atol=1e-6)
    np.testing.assert_allclose(gradient, dense.sum(2), atol=1e-6)
    ragged = RaggedIds(RAGGED.values, RAGGED.row_splits, weights[DENSE >= 0])
    assert_jagged_equal(layer(ragged), found)


@pytest.mark.parametrize(
    ("kind", "axes", "ids", "jagged"),
    [
        (AxisType.Explicit, None, RAGGED, True),
        (AxisType.Auto, "x", RAGGED, True),
        (AxisType.Auto, "x", RaggedIds.from_lists([[3, 5], [7]]), False),
    ],
    ids=["explicit axes", "fewer replicas than devices", "bags, fewer than devices"],
)
@pytest.mark.quick(1)
def test_placed_batches_are_trained_on_a_mesh_of_two_axes(kind, axes, ids, jagged):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    table = tpu_embed.TableConfig(V, D, name="films", optimizer=o.SGD(0.5))
    layer = nn.EmbeddingBag(table, jagged=jagged, mesh=mesh, batch_axes=axes, rngs=nnx.Rngs(0))
    plain = layer_of(o.SGD(0.5), jagged=jagged)
    step(plain, plain.place(ids))
    with jax.set_mesh(mesh):
        step(layer, layer.place(ids))
    np.testing.assert_array_equal(layer.embedding, plain.embedding)


def test_errors():
    layer = layer_of(devices=8)
    for call in (layer, functools.partial(nnx.jit(lambda layer, ids: layer(ids)), layer)):
        for ids in (DENSE[:3], DENSE[0], DENSE[None]):
            with pytest.raises(ValueError, match=r"feature 'ids': .*(pad_batch|as \[B, H\])"):
                call(ids)
    with pytest.raises(ValueError, match="jagged: expected a bool, got 1"):
        layer_of(jagged=1)
