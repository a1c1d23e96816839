"""The layers: what they return for every kind of ids, what they hold, and their errors."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import assert_same
from flax import nnx
from nn_models import B, D, V, bag_of, ids_of, mesh_of

from tpu_embed import RaggedIds, SparseIds, nn
from tpu_embed import optimizers as o

_jitted = nnx.jit(lambda bag, *given: bag(*given))


@pytest.mark.parametrize(
    ("shape", "devices"), [((), 1), ((5,), 1), ((2, 0, 3), 1), ((2, 3), 1), ((2, 3), 8)]
)
@pytest.mark.quick(1)
def test_embed_returns_a_row_an_id(shape, devices):
    embed = nn.Embed(V, D, mesh=mesh_of(devices), rngs=nnx.Rngs(0))
    ids, rows = ids_of(0, shape, lowest=0), np.array(embed.embedding)
    for call in (lambda embed, ids: embed(ids), _jitted):
        np.testing.assert_array_equal(call(embed, ids), rows[ids])


def test_embed_takes_the_arguments_of_nnx_embed():
    how = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    embed = nn.Embed(num_embeddings=V, features=D, embedding_init=nnx.initializers.ones, **how)
    assert (embed.num_embeddings, embed.features) == (V, D)
    assert embed.embedding.dtype == embed(np.array([1])).dtype == jnp.bfloat16
    assert not embed(np.array([-1])).any()  # padding
    np.testing.assert_array_equal(embed.embedding, np.ones((V, D)))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.quick(1)
def test_bags_of_every_form(combiner, jitted):
    bag = bag_of(None, devices=2, combiner=combiner)
    rows, ids = np.array(bag.embedding), np.array([[3, 5], [7, -1], [-1, -1], [2, 2]])
    weights = np.array([[1.0, 2.0], [3.0, 9.0], [9.0, 9.0], [0.5, 0.5]], np.float32)
    expected = np.stack([rows[3] + 2 * rows[5], 3 * rows[7], 0 * rows[0], rows[2]])
    if combiner == "mean":
        expected /= np.array([[3.0], [3.0], [1.0], [1.0]])
    call = _jitted if jitted else lambda bag, *args: bag(*args)
    values, scales = ids[ids >= 0], weights[ids >= 0]
    splits = np.array([0, 2, 3, 3, 5])
    for form in (
        (ids, weights),
        (bag.place(ids, weights),),
        (bag.place(RaggedIds(values, splits, scales)),),
        (bag.place(SparseIds(np.argwhere(ids >= 0), values, (4, 2)), scales),),
        *([] if jitted else [(RaggedIds(values, splits), scales)]),
    ):
        np.testing.assert_allclose(call(bag, *form), expected, rtol=1e-6)
    grouped = call(bag, ids.reshape(2, 2, 2), weights.reshape(2, 2, 2))
    np.testing.assert_allclose(grouped, expected.reshape(2, 2, D), rtol=1e-6)


def test_sequences():
    bag = bag_of(None, layer={"max_sequence_length": 2})
    rows, ids = np.array(bag.embedding), np.array([[3, -1, 5], [7, 2, 1]])
    np.testing.assert_array_equal(bag(ids), [[rows[3], 0 * rows[0]], [rows[7], rows[2]]])


@pytest.mark.parametrize("copied", [nnx.clone, copy.deepcopy])
def test_copies(copied):
    bag = bag_of(o.SGD(0.5))
    other = copied(bag)
    nn.fused_value_and_grad(lambda m: m(ids_of(0)).sum())(other)
    assert (int(bag.step[...]), int(other.step[...])) == (0, 1)


def test_split_parts_parameters_tables_and_slots():
    model = nnx.Dict(bag=bag_of(o.Adam(0.1)), linear=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))
    _, *parts = nnx.split(model, nnx.Param, nn.Table, nn.Slot, ...)
    params, tables, slots, rest = ({path[:2] for path, _ in nnx.to_flat_state(x)} for x in parts)
    assert params == {("linear", "bias"), ("linear", "kernel")}
    assert (tables, slots) == ({("bag", "tables")}, {("bag", "slots")})
    assert rest == {("bag", name) for name in ("step", "bad_ids", "overflows")}


def test_nnx_alone_leaves_tables_as_they_are():
    model = nnx.Dict(bag=bag_of(o.SGD(0.1)), linear=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before, kernel = np.array(model.bag.embedding), np.array(model.linear.kernel[...])
    with pytest.warns(UserWarning, match="under differentiation, which does not train it"):
        gradients = nnx.grad(lambda m: m.linear(m.bag(IDS)).sum())(model)
    optimizer.update(model, gradients)
    np.testing.assert_array_equal(model.bag.embedding, before)
    assert (np.array(model.linear.kernel[...]) != kernel).all()
    wrt_tables = nnx.DiffState(0, nn.Table)
    with pytest.raises(TypeError, match=r"EmbeddingEngine\.update"):  # nor densely
        nnx.grad(lambda bag: bag(IDS).sum(), argnums=wrt_tables)(model.bag)


def test_rows_are_loaded_and_read_in_their_order():
    bag = bag_of(o.Adagrad(0.1), devices=8)
    rows = np.arange(V * D, dtype=np.float32).reshape(V, D)
    bag.load(rows, {"accumulators": 2 * rows})
    for given, words in (((rows[1:],), r"23, 4.*22, 4"), ((rows, {"momenta": rows}), "momenta")):
        with pytest.raises(ValueError, match=words):
            bag.load(*given)
    np.testing.assert_array_equal(bag.embedding, rows)
    np.testing.assert_array_equal(bag.logical_slots["accumulators"], 2 * rows)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint32])
@pytest.mark.quick(1)
def test_bad_ids(dtype):
    bad = np.array([1, np.iinfo(dtype).max], dtype)
    bag = bag_of(o.SGD(0.1))
    with pytest.raises(ValueError, match=r"feature 'ids'.*table 'films', got id .* at example 1"):
        bag(bad)
    if dtype == np.int64:
        return  # jit itself wraps it to int32
    run = nnx.jit(lambda bag, ids: nn.fused_value_and_grad(lambda bag: bag(ids).sum())(bag)[0])
    np.testing.assert_allclose(run(bag, bad), np.array(bag_of(None)(bad[:1])).sum(), rtol=1e-6)
    assert int(bag.bad_ids[0]) == 1
    clipped = bag_of(None, layer={"on_bad_id": "clip"})
    np.testing.assert_array_equal(clipped(bad)[1], clipped.embedding[V - 1])


@pytest.mark.parametrize("make", [lambda f: f, nnx.jit])
@pytest.mark.quick(1)
def test_weights_may_be_integers(make):
    halves, weights = np.full((B, 3), 0.5, np.float32), np.arange(3 * B).reshape(B, 3)

    def loss(bag, *weights):
        return sum((bag(ids_of(0), one) ** 2).sum() for one in weights)

    def trained(dtype):
        bag = bag_of(o.SGD(0.01), combiner="mean")
        step = make(lambda bag, *given: nn.fused_value_and_grad(loss)(bag, *given)[0])
        return step(bag, weights.astype(dtype), halves), np.array(bag.embedding)

    assert_same(trained(np.int32), trained(np.float32))


IDS, ONES = ids_of(0), np.ones((B, 3), np.float32)


def embed_of(init=None, **options):
    return nn.Embed(V, D, embedding_init=init, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (TypeError, lambda bag: bag(np.ones((2, 2))), "ids of an integer dtype, got float64"),
        (ValueError, lambda bag: bag(IDS, ONES[:, :2]), r"ids' shape \(16, 3\)"),
        (ValueError, lambda bag: bag(IDS, ONES.astype(bool)), "weights: expected real numbers"),
        (ValueError, lambda bag: _jitted(bag, IDS[:, 0], ONES[:, 0]), "expected None for one id"),
        (ValueError, lambda bag: bag(bag.place(IDS), ONES), "expected None with a Batch"),
        (ValueError, lambda bag: bag(np.int32(3)), "'ids': expected ids of rank 1 or more, got ra"),
        (ValueError, lambda _: bag_of(o.SGD(lambda: 0.1)), "'films': learning_rate: expected a"),
        (ValueError, lambda _: embed_of(init=nnx.initializers.lecun_normal()), "variance_scaling"),
        (ValueError, lambda _: embed_of()(np.array([[V]])), r'on_bad_id="drop" or "clip" of the f'),
        (ValueError, lambda _: embed_of(on_bad_id="keep"), "^on_bad_id: expected 'error'"),
        (ValueError, lambda _: bag_of(None, layer={"on_bad_id": "keep"}), "^on_bad_id: expected"),
    ],
)
def test_errors(kind, call, words):
    with pytest.raises(kind, match=words):
        call(bag_of(o.SGD(0.1)))


def test_weights_of_the_model_are_trained_beside_the_table():
    model, ids = nnx.Dict(bag=bag_of(o.SGD(0.5), combiner="sum")), ids_of(0, lowest=0)
    model.weights, rows = nnx.Param(jnp.ones(3)), np.array(model.bag.embedding)

    def loss(model):
        return model.bag(ids, jnp.broadcast_to(model.weights[...], ids.shape)).sum()

    _, gradients = nn.fused_value_and_grad(loss)(model)
    # Sums of 16 rows, in another order.
    np.testing.assert_allclose(gradients.weights[...], rows[ids].sum((0, 2)), rtol=1e-5)
    assert (np.array(model.bag.embedding)[ids] != rows[ids]).all()


def test_a_schedule_follows_the_layers_own_step():
    bag = bag_of(o.SGD(lambda step: 1.0 - 0.5 * step))
    before = np.array(bag.embedding)
    for _ in range(2):
        nn.fused_value_and_grad(lambda bag: bag(np.array([3])).sum())(bag)
    np.testing.assert_allclose(bag.embedding[3], before[3] - 1.5, rtol=1e-6)  # two roundings


def test_a_layer_is_made_inside_a_jit_and_abstractly():
    made = nnx.jit(lambda: bag_of(o.SGD(0.1)))()
    np.testing.assert_array_equal(made.embedding, bag_of(o.SGD(0.1)).embedding)
    (table,) = nnx.eval_shape(lambda: bag_of(o.SGD(0.1))).tables.values()
    assert table.shape == (V, D)


def test_the_mesh_shards_the_table():
    bag = bag_of(o.Adagrad(0.1), devices=8)
    ((stack, table),) = bag.tables.items()
    (size,) = {shard.data.shape[0] for shard in table[...].addressable_shards}
    assert size == -(-V // 8)
    assert bag.slots[stack]["accumulators"][...].sharding == table[...].sharding
    assert embed_of().rows.engine.layout.axes.replicas == len(jax.devices())


class Summed(nnx.Module):
    def __init__(self):
        self.embed, self.bag = embed_of(optimizer=o.Adagrad(0.5)), bag_of(o.SGD(0.5), devices=8)

    def __call__(self, ids):
        return self.embed(ids).sum(-2) + self.bag(ids)


def test_a_model_with_layers_can_be_tabulated():
    model, ids = Summed(), ids_of(0, (8, 3), lowest=0)
    expected = np.asarray(model(ids))
    table = nnx.tabulate(model, ids, console_kwargs={"width": 200, "force_terminal": False})
    for name in ("embed/rows", "bag", "Table", "Slot", "Counter", f"float32[8,{D}]"):
        assert name in table
    np.testing.assert_array_equal(model(ids), expected)
