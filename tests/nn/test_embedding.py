"""The layers: what they return for every kind of ids, what they hold, and their errors."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nn_models import B, D, V, bag_of, ids_of, mesh_of

import tpu_embed
from tpu_embed import RaggedIds, SparseIds, nn
from tpu_embed import optimizers as o


@pytest.mark.parametrize(
    ("shape", "devices"), [((), 1), ((5,), 1), ((2, 0, 3), 1), ((2, 3), 1), ((2, 3), 8)]
)
@pytest.mark.quick(1)
def test_embed_returns_a_row_an_id(shape, devices):
    embed = nn.Embed(V, D, mesh=mesh_of(devices), rngs=nnx.Rngs(0))
    ids, rows = ids_of(0, shape, lowest=0), np.array(embed.embedding)
    np.testing.assert_array_equal(embed(ids), rows[ids])
    np.testing.assert_array_equal(nnx.jit(lambda embed, ids: embed(ids))(embed, ids), rows[ids])


def test_embed_takes_the_arguments_of_nnx_embed():
    embed = nn.Embed(
        num_embeddings=V,
        features=D,
        dtype=jnp.bfloat16,
        param_dtype=jnp.bfloat16,
        embedding_init=nnx.initializers.ones,
        rngs=nnx.Rngs(0),
    )
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
    call = nnx.jit(lambda bag, *args: bag(*args)) if jitted else lambda bag, *args: bag(*args)
    values, splits = np.array([3, 5, 7, 2, 2]), np.array([0, 2, 3, 3, 5])
    scales = np.array([1.0, 2.0, 3.0, 0.5, 0.5], np.float32)
    indices = np.array([[0, 0], [0, 1], [1, 0], [3, 0], [3, 1]])
    forms = [
        (ids, weights),
        (bag.place(ids, weights),),
        (bag.place(RaggedIds(values, splits, scales)),),
        (bag.place(SparseIds(indices, values, (4, 2)), scales),),
    ]
    forms += [] if jitted else [(RaggedIds(values, splits), scales)]
    for form in forms:
        np.testing.assert_allclose(call(bag, *form), expected, rtol=1e-6)
    grouped = call(bag, ids.reshape(2, 2, 2), weights.reshape(2, 2, 2))
    np.testing.assert_allclose(grouped, expected.reshape(2, 2, D), rtol=1e-6)


def test_sequences():
    bag = bag_of(None, layer={"max_sequence_length": 2})
    rows, ids = np.array(bag.embedding), np.array([[3, -1, 5], [7, 2, 1]])
    np.testing.assert_array_equal(bag(ids), [[rows[3], 0 * rows[0]], [rows[7], rows[2]]])


def test_placed_batches_are_trained_too():
    ragged, dense = bag_of(o.Adagrad(0.1), devices=2), bag_of(o.Adagrad(0.1), devices=2)
    batch = ragged.place(RaggedIds(np.array([3, 5, 7]), np.array([0, 2, 3])))
    nnx.jit(lambda m, x: nn.fused_value_and_grad(lambda m: (m(x) ** 2).sum())(m)[0])(ragged, batch)
    ids = np.array([[3, 5], [7, -1]])
    nn.fused_value_and_grad(lambda m: (m(ids) ** 2).sum())(dense)
    np.testing.assert_array_equal(ragged.embedding, dense.embedding)


def test_copies():
    bag = bag_of(o.SGD(0.5))
    for copied in (nnx.clone(bag), copy.deepcopy(bag)):
        nn.fused_value_and_grad(lambda m: m(ids_of(0)).sum())(copied)
        assert (int(bag.step[...]), int(copied.step[...])) == (0, 1)


def test_split_parts_parameters_tables_and_slots():
    model = nnx.Dict(bag=bag_of(o.Adam(0.1)), linear=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))
    _, params, tables, slots, rest = nnx.split(model, nnx.Param, nn.Table, nn.Slot, ...)
    assert sorted(path for path, _ in nnx.to_flat_state(params)) == [
        ("linear", "bias"),
        ("linear", "kernel"),
    ]
    (stack,) = model["bag"].tables
    assert [path for path, _ in nnx.to_flat_state(tables)] == [("bag", "tables", stack)]
    assert [path[:2] for path, _ in nnx.to_flat_state(slots)] == [("bag", "slots")] * 2
    assert {path[1] for path, _ in nnx.to_flat_state(rest)} == {"step", "bad_ids", "overflows"}


def test_nnx_alone_leaves_tables_as_they_are():
    model = nnx.Dict(bag=bag_of(o.SGD(0.1)), linear=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before, kernel = np.array(model.bag.embedding), np.array(model.linear.kernel[...])
    with pytest.warns(UserWarning, match="under differentiation, which does not train it"):
        gradients = nnx.grad(lambda m: m.linear(m.bag(ids_of(0))).sum())(model)
    optimizer.update(model, gradients)
    np.testing.assert_array_equal(model.bag.embedding, before)
    assert (np.array(model.linear.kernel[...]) != kernel).all()


@pytest.mark.filterwarnings("ignore:table 'films'")
def test_tables_are_not_differentiated_densely():
    bag = bag_of(o.SGD(0.1))
    with pytest.raises(TypeError, match=r"EmbeddingEngine\.update"):
        nnx.grad(lambda bag: bag(ids_of(0)).sum(), argnums=nnx.DiffState(0, nn.Table))(bag)


def test_rows_are_loaded_and_read_in_their_order():
    bag = bag_of(o.Adagrad(0.1), devices=8)
    rows = np.arange(V * D, dtype=np.float32).reshape(V, D)
    bag.load(rows, {"accumulators": 2 * rows})
    np.testing.assert_array_equal(bag.embedding, rows)
    np.testing.assert_array_equal(bag.logical_slots["accumulators"], 2 * rows)
    with pytest.raises(ValueError, match=r"23, 4.*22, 4"):
        bag.load(rows[1:])
    with pytest.raises(ValueError, match="momenta"):
        bag.load(rows, {"momenta": rows})
    np.testing.assert_array_equal(bag.embedding, rows)


@pytest.mark.parametrize(
    "dtype", [np.int64, pytest.param(np.uint8, marks=pytest.mark.whole), np.uint32]
)
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


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.quick(1)
def test_weights_may_be_integers(jitted):
    ids, weights = ids_of(0), np.arange(3 * B, dtype=np.int32).reshape(B, 3)

    def loss(bag, ids, weights):
        return sum((bag(ids, one) ** 2).sum() for one in weights)

    def step(bag, ids, weights):
        return nn.fused_value_and_grad(loss)(bag, ids, weights)[0]

    def trained(*weights):
        bag = bag_of(o.SGD(0.01), combiner="mean")
        value = (nnx.jit(step) if jitted else step)(bag, ids, weights)
        return value, np.array(bag.embedding)

    halves = np.full((B, 3), 0.5, np.float32)
    found, expected = trained(weights, halves), trained(weights.astype(np.float32), halves)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_errors():
    bag = bag_of(o.SGD(0.1))
    with pytest.raises(TypeError, match="expected ids of an integer dtype, got float64"):
        bag(np.ones((2, 2)))
    for weights in (np.ones((B, 2), np.float32), np.ones((B, 3), bool)):
        with pytest.raises(
            ValueError, match=r"weights: expected real numbers of the ids' shape \(16, 3\)"
        ):
            bag(ids_of(0), weights)
    with pytest.raises(ValueError, match="weights of feature 'ids': expected None for one id"):
        nnx.jit(lambda bag, ids: bag(ids, jnp.ones(B)))(bag, ids_of(0, (B,)))
    with pytest.raises(ValueError, match="weights and spec: expected None with a Batch"):
        bag(bag.place(ids_of(0)), np.ones((B, 3), np.float32))
    with pytest.raises(ValueError, match="'ids': expected ids of rank 1 or more, got rank 0"):
        bag(np.int32(3))
    with pytest.raises(ValueError, match="table 'films': learning_rate: expected a number"):
        bag_of(o.SGD(lambda: 0.1))
    with pytest.raises(ValueError, match="variance_scaling"):
        nn.Embed(V, D, embedding_init=nnx.initializers.lecun_normal(), rngs=nnx.Rngs(0))


def test_a_frozen_table_stays_as_it_is():
    embed = nn.Embed(V, D, trainable=False, rngs=nnx.Rngs(0))
    before = np.array(embed.embedding)
    nn.fused_value_and_grad(lambda embed: embed(ids_of(0, lowest=0)).sum())(embed)
    np.testing.assert_array_equal(embed.embedding, before)
    assert int(embed.rows.step[...]) == 0


def test_weights_of_the_model_are_trained_beside_the_table():
    class Weighted(nnx.Module):
        def __init__(self):
            self.bag = bag_of(o.SGD(0.5), combiner="sum")
            self.weights = nnx.Param(jnp.ones(3))

        def __call__(self, ids):
            return self.bag(ids, jnp.broadcast_to(self.weights[...], ids.shape))

    model, ids = Weighted(), ids_of(0, lowest=0)
    rows = np.array(model.bag.embedding)
    _, gradients = nn.fused_value_and_grad(lambda m: m(ids).sum())(model)
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
    shapes = nnx.eval_shape(lambda: bag_of(o.SGD(0.1)))
    (table,) = shapes.tables.values()
    assert table.shape == (V, D)


def test_the_mesh_shards_the_table():
    bag = bag_of(o.Adagrad(0.1), devices=8)
    ((stack, table),) = bag.tables.items()
    (size,) = {shard.data.shape[0] for shard in table[...].addressable_shards}
    assert size == -(-V // 8)
    assert bag.slots[stack]["accumulators"][...].sharding == table[...].sharding
    assert tpu_embed.nn.Embed(V, D, rngs=nnx.Rngs(0)).rows.engine.layout.axes.replicas == len(
        jax.devices()
    )


class Summed(nnx.Module):
    def __init__(self):
        self.embed = nn.Embed(V, D, optimizer=o.Adagrad(0.5), rngs=nnx.Rngs(0))
        self.bag = bag_of(o.SGD(0.5), devices=8)

    def __call__(self, ids):
        return self.embed(ids).sum(-2) + self.bag(ids)


@pytest.mark.whole
def test_a_model_with_layers_can_be_tabulated():
    model, ids = Summed(), ids_of(0, (8, 3), lowest=0)
    expected = np.asarray(model(ids))
    table = nnx.tabulate(model, ids, console_kwargs={"width": 200, "force_terminal": False})
    for name in ("embed/rows", "bag", "Table", "Slot", "Counter", f"float32[8,{D}]"):
        assert name in table
    np.testing.assert_array_equal(model(ids), expected)


@pytest.mark.parametrize("make", [Summed, lambda: nn.Embed(V, D, rngs=nnx.Rngs(0))])
def test_bad_ids_of_a_layer_without_a_name_name_its_policy(make):
    ids = np.array([[V]])
    with pytest.raises(ValueError, match=r'on_bad_id="drop" or "clip" of the feature or layer'):
        make()(ids)


def test_an_unknown_policy_is_that_of_the_layer():
    table = tpu_embed.TableConfig(V, D)
    for make in (
        lambda **options: nn.Embed(V, D, **options),
        lambda **options: nn.EmbeddingBag(table, **options),
    ):
        with pytest.raises(
            ValueError, match=r"^on_bad_id: expected 'error' \| 'drop' \| 'clip', got"
        ):
            make(on_bad_id="keep", rngs=nnx.Rngs(0))
