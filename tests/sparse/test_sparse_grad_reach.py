"""sparse_grad returns the rows that a gradient reaches, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from reach_cases import CONNECTED, CUT, FORMS, KEPT, PLACES, loss_of

from tpu_embed import optimizers as o
from tpu_embed import sparse
from tpu_embed.sparse import embedding_lookup, sparse_grad, sparse_value_and_grad
from tpu_embed.training import Optimizer

V, D = 6, 3
TABLE = jnp.asarray(np.random.default_rng(2).normal(size=(V, D)).astype(np.float32))


def by_table(loss):
    """Return a loss of a look-up function as one of a table."""
    return lambda table: loss(functools.partial(embedding_lookup, table))


ZEROS = [("times zero", place) for place in PLACES]
ZEROS += [(form, "plain") for form in CONNECTED if form != "times zero"]


@functools.cache
def results_of_cut(form):
    """Return ours and JAX's results of a form at every place."""
    return results({place: loss_of(form, place) for place in PLACES})


@functools.cache
def results_of_zeros():
    """Return ours and JAX's results of all lookups whose gradients are zeros."""
    return results({(form, place): loss_of(CONNECTED[form], place) for form, place in ZEROS})


def results(losses):
    """Return ours and JAX's results of some cases: one program."""

    @jax.jit
    def run(table):
        ways = sparse_value_and_grad, jax.value_and_grad
        return {c: [f(by_table(x), has_aux=True)(table) for f in ways] for c, x in losses.items()}

    return run(TABLE)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(1)
def test_a_lookup_that_is_cut_has_no_entries(form, place):
    ((value, aux), found), ((expected, rows), dense) = results_of_cut(form)[place]
    assert found.indices.tolist() == KEPT.tolist()
    assert np.array_equal(found.values, 2 * TABLE[KEPT])
    np.testing.assert_allclose(found.to_dense(), dense, rtol=1e-6)  # summed in another order
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux, rows)


@pytest.mark.parametrize(("form", "place"), ZEROS)
def test_a_lookup_whose_gradient_is_zero_stays(form, place):
    (_, found), (_, dense) = results_of_zeros()[form, place]
    assert sorted(found.indices.tolist()) == sorted([*KEPT, *CUT])
    assert (np.asarray(found.values).any(-1)).sum() == len(KEPT)
    np.testing.assert_allclose(found.to_dense(), dense, rtol=1e-6)  # summed in another order


def _read_by_what_is_cut(table):
    """A use that no gradient passes is none: of the table itself, and of a copy of it."""
    copied = embedding_lookup(lax.stop_gradient(table), CUT).sum()
    read = lax.stop_gradient((table**2).sum()) + jnp.floor(table).sum()
    return (embedding_lookup(table, KEPT) ** 2).sum() + copied + read


def _factor_of_a_loop(table):
    def doubled(x):
        return x * 2 + embedding_lookup(table, 0).sum() ** 2

    steps = lax.while_loop(lambda x: x < 9, doubled, jnp.float32(1))
    return (embedding_lookup(table, KEPT) * lax.stop_gradient(steps)).sum()


@pytest.mark.parametrize("loss", [_read_by_what_is_cut, _factor_of_a_loop])
def test_what_is_cut_makes_no_gradient_dense(loss):
    """Nor is there a warning, which would be an error here."""
    assert sparse_grad(loss)(TABLE).indices.tolist() == KEPT.tolist()


@pytest.mark.parametrize("index", [0, 1])
def test_results_of_one_cond_are_told_apart(index):
    def loss(table):
        pair = lax.cond(
            table[0, 0].astype(jnp.int32) < 99,
            lambda: (embedding_lookup(table, KEPT).sum(), embedding_lookup(table, CUT).sum()),
            lambda: (jnp.float32(0), embedding_lookup(table, KEPT + 1).sum()),
        )
        return pair[index]

    expected = [KEPT.tolist(), [V, V, V, *CUT]][index]  # the branch for False is the first
    assert sparse_grad(loss)(TABLE).indices.tolist() == expected


# -- a table that no gradient reaches at all -------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(2)
def test_without_any_lookup_that_counts_there_are_no_entries(form):
    def loss(params):
        rows = embedding_lookup(params["table"], CUT)
        return FORMS[form](rows) + (params["w"] ** 2).sum(), rows

    step = jax.jit(sparse_grad(loss, has_aux=True))
    found, _ = step({"table": TABLE, "w": jnp.ones(2)})
    assert np.array_equal(found["w"], 2 * np.ones(2))
    slices = found["table"]
    assert isinstance(slices, sparse.IndexedSlices)
    assert (slices.values.shape, slices.indices.shape) == ((0, D), (0,))
    assert (slices.dense_shape, slices.dtype) == ((V, D), TABLE.dtype)


def test_slices_without_entries_go_through_everything():
    params = {"table": TABLE, "w": jnp.ones(2)}
    found = sparse_grad(lambda p: _stopped(p["table"]) + p["w"].sum())(params)
    slices = found["table"]
    for same in (slices.deduplicate(), slices.compact(), slices * 2, slices + slices):
        assert same.indices.shape == (0,)
    assert not np.asarray(slices.to_dense()).any()
    assert np.array_equal(slices + TABLE, TABLE)
    assert float(sparse.global_norm(found)) == np.float32(np.sqrt(2))
    clipped = sparse.clip_by_global_norm(found, 1.0)
    optimizer = Optimizer(o.Adam(0.1, weight_decay_factor=0.1), "adam")
    pairs = [(clipped["table"], "['table']"), (clipped["w"], "['w']")]
    step = jax.jit(functools.partial(optimizer.apply_gradients, pairs))
    now, after = step(params, optimizer.init(params))
    assert np.array_equal(now["table"], TABLE)
    assert not np.array_equal(now["w"], params["w"])
    for name in optimizer.get_slot_names(after):
        assert not np.asarray(optimizer.get_slot(after, "['table']", name)).any()


def _stopped(table):
    return lax.stop_gradient(embedding_lookup(table, CUT)).sum()


def test_slices_without_entries_under_vmap_and_shard_map():
    each = jax.vmap(sparse_grad(_stopped))(jnp.stack([TABLE, TABLE]))
    assert each.indices.shape == (2, 0)
    specs = {"in_specs": P(), "out_specs": P("d")}
    local = jax.shard_map(sparse_grad(_stopped), mesh=mesh(8), **specs)
    assert jax.jit(local)(TABLE).values.shape == (0, D)


def test_a_table_looked_up_only_where_lookups_are_not_found_is_zeros_with_a_warning():
    def loss(table):
        def grown(x):
            return x + embedding_lookup(table, 0)[0] ** 2 + 1

        return lax.stop_gradient(lax.while_loop(lambda x: x < 9, grown, 0.0))

    with pytest.warns(UserWarning, match="dense"):
        found = sparse_grad(loss)(TABLE)
    assert np.array_equal(found, np.zeros((V, D)))


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda rows, others: (rows.sum(), others.mean()),
        lambda rows, others: (rows.sum() + lax.stop_gradient(others).sum(), None),
    ],
    ids=["aux", "stopped"],
)
def test_an_update_comes_after_lookups_that_it_does_not_name(loss):
    """Of 64 MB, as an abstract value: otherwise XLA keeps a copy of the table for them."""
    size, optimizer = 1_000_000, Optimizer(o.Adagrad(0.1))
    table = jax.ShapeDtypeStruct((size, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def step(table, state, ids):
        def fun(table):
            return loss(*(embedding_lookup(table, some) for some in ids))

        value, found = sparse_value_and_grad(fun, has_aux=True)(table)
        return value, optimizer.apply_gradients([(found, "")], table, state)

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
        table, jax.eval_shape(optimizer.init, table), ids
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * size * 16 * 4
    assert memory.temp_size_in_bytes < size
