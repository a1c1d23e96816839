"""sparse_value_and_grad gives the numbers of jax.value_and_grad, sparse where possible."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import PartitionSpec as P

from tpu_embed import training
from tpu_embed.sparse import IndexedSlices, embedding_lookup, sparse_grad, sparse_value_and_grad

V, D = 11, 3
IDS = np.array([[1, 2, -1], [1, 1, 9]])
PAIRS = jnp.array([[1, 2], [3, 4], [1, 1]])


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    shapes = {"table": (V, D), "kernel": (D,)}
    return {n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()}


def score(params, ids, combiner=None):
    return embedding_lookup(params["table"], ids, combiner=combiner) @ params["kernel"]


def in_scan(params):
    def body(carry, ids):
        return carry + (score(params, ids) ** 2).sum(), score(params, ids[0])

    total, last = jax.lax.scan(body, jnp.float32(0), PAIRS)
    return total + last.sum()


def in_cond(params, sign):
    return jax.lax.cond(
        sign * params["kernel"][0] > 0,
        lambda: (score(params, jnp.array([3])) ** 2).sum(),
        lambda: score(params, jnp.array([5, 6])).sum(),
    )


def in_nested_jits(params):
    inner = jax.jit(lambda table, ids: jax.jit(embedding_lookup)(table, ids) * 2)
    return (inner(params["table"], jnp.array([4, 4])) @ params["kernel"]).sum()


def in_scan_of_cond_of_remat(params):
    @jax.checkpoint
    def squared(ids):
        return jnp.sin(embedding_lookup(params["table"], ids)).sum() ** 2

    def body(carry, ids):
        added = jax.lax.cond(ids[0] > 1, squared, lambda ids: jnp.float32(1), ids)
        return carry * 0.5 + added, None

    return jax.lax.scan(body, jnp.float32(1), PAIRS, reverse=True, unroll=2)[0]


def in_loop(params):
    return jax.lax.fori_loop(0, 3, lambda i, c: c + score(params, i) * c, jnp.float32(1))


def in_vmap_of_scan(params):
    def scanned(ids):
        return jax.lax.scan(lambda c, i: (c * score(params, i), None), jnp.float32(1), ids)[0]

    return jax.vmap(scanned)(PAIRS).sum()


LOSSES = {
    "sum of rows": (lambda p: score(p, IDS).sum(), 6),
    "mean": (lambda p: (score(p, IDS, "mean") ** 2).sum(), 6),
    "sqrtn": (lambda p: (score(p, IDS, "sqrtn") ** 2).sum(), 6),
    "one id": (lambda p: score(p, np.int32(3)), 1),
    "scan": (in_scan, 9),
    "fori_loop of known length": (in_loop, 3),
    "cond, first": (lambda p: in_cond(p, 1.0), 3),
    "cond, second": (lambda p: in_cond(p, -1.0), 3),
    "nested jits": (in_nested_jits, 2),
    "scan of cond of remat": (in_scan_of_cond_of_remat, 6),
    "vmap": (lambda p: (jax.vmap(lambda i: score(p, i, "sum"))(PAIRS) ** 2).sum(), 6),
    "vmap of scan": (in_vmap_of_scan, 6),
    "custom_jvp beside": (lambda p: jax.nn.relu(score(p, IDS)).sum(), 6),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.quick(2)
def test_equals_the_dense_gradient(name, params):
    loss, count = LOSSES[name]
    expected, dense = jax.jit(jax.value_and_grad(loss))(params)
    value, got = jax.jit(sparse_value_and_grad(loss))(params)
    assert isinstance(got["table"], IndexedSlices)
    assert got["table"].indices.shape == (count,)
    assert got["table"].dense_shape == (V, D)
    # The same products, summed in another order.
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(got["table"].to_dense(), dense["table"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["kernel"], dense["kernel"], rtol=1e-4, atol=1e-5)


def test_entries_stand_in_program_order_with_duplicates(params):
    def loss(params):
        return score(params, jnp.array([5, 2])).sum() + score(params, jnp.array([2, -1])).sum()

    slices = sparse_grad(loss)(params)["table"]
    assert slices.indices.tolist() == [5, 2, 2, V]
    rows = np.tile(np.asarray(params["kernel"]), (3, 1))
    assert np.array_equal(slices.values, [*rows, np.zeros(D)])


def test_a_branch_not_taken_gives_padding(params):
    """Branches stand in the order of their numbers: false, then true."""
    took = {tuple(sparse_grad(in_cond)(params, s)["table"].indices.tolist()) for s in (1.0, -1.0)}
    assert took == {(V, V, 3), (5, 6, V)}


def test_several_tables_arguments_and_aux(params):
    def loss(user, item, ids, *, power):
        rows = embedding_lookup(user, ids) * embedding_lookup(item, ids + 1)
        return (rows**power).sum(), {"rows": rows}

    given = params["table"], params["table"][::-1], jnp.array([0, 5, 5])
    (value, aux), found = sparse_value_and_grad(loss, (1, 0), has_aux=True)(*given, power=2)
    expected, dense = jax.value_and_grad(loss, (1, 0), has_aux=True)(*given, power=2)
    jax.tree.map(np.testing.assert_array_equal, (value, aux), expected)
    assert [slices.indices.tolist() for slices in found] == [[1, 6, 6], [0, 5, 5]]
    for slices, array in zip(found, dense, strict=True):
        np.testing.assert_allclose(slices.to_dense(), array, rtol=1e-6)
    gradient, aux = sparse_grad(loss, -2 + 3, has_aux=True)(*given, power=2)
    assert gradient.indices.tolist() == [1, 6, 6]
    assert "rows" in aux


DENSE = {
    "a dense use beside": lambda p: score(p, IDS).sum() + (p["table"] ** 2).sum(),
    "a table computed from it": lambda p: (
        embedding_lookup(p["table"], IDS).sum() + embedding_lookup(p["table"] * 2, IDS).sum()
    ),
    "computed from it, alone": lambda p: embedding_lookup(p["table"] * 2, IDS).sum(),
    "in a custom_vjp": lambda p: score(p, IDS).sum() + _opaque(p["table"]),
    "in a custom_vjp, alone": lambda p: _opaque(p["table"]),
    "computed from it, in a scan": lambda p: jax.lax.scan(
        lambda c, i: (c + embedding_lookup(p["table"] * c, i).sum(), None), jnp.float32(1), PAIRS
    )[0],
    "carried by a scan": lambda p: (
        jax.lax.scan(lambda t, i: (t * 2, embedding_lookup(t, i).sum()), p["table"], PAIRS)[1].sum()
        + score(p, IDS).sum()
    ),
}


@jax.custom_vjp
def _opaque(table):
    return embedding_lookup(table, jnp.array([2])).sum()


_opaque.defvjp(lambda table: (_opaque(table), table), lambda table, g: (jnp.ones_like(table) * g,))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.quick(2)
def test_a_dense_use_makes_it_dense_and_says_so(name, params):
    words = re.escape("the gradient of table ['table'] is dense")
    for make in (lambda f: f, jax.jit):
        with pytest.warns(UserWarning, match=words) as warned:
            got = make(sparse_grad(DENSE[name]))(params)
        assert [warning.filename for warning in warned] == [__file__]
    expected = jax.jit(jax.grad(DENSE[name]))(params)
    for leaf, gradient in expected.items():
        np.testing.assert_allclose(got[leaf], gradient, rtol=1e-5, atol=1e-6)


def test_a_table_that_is_not_looked_up_is_as_ever(params):
    """Without a warning, which would be an error here."""
    got = sparse_grad(lambda p: (p["kernel"] ** 2).sum())(params)
    assert np.array_equal(got["table"], np.zeros((V, D)))


def test_a_lookup_in_a_while_loop_is_jax_s_error(params):
    def loss(params):
        grown = jax.lax.while_loop(lambda c: c < 9, lambda c: c + score(params, 1) ** 2 + 1, 0.0)
        return grown * 2

    with pytest.warns(UserWarning, match="dense"), pytest.raises(ValueError, match="while_loop"):
        sparse_grad(loss)(params)


def test_under_vmap_grad_and_itself(params):
    ids = jnp.array([[1, 2], [2, 2]])
    each = jax.vmap(sparse_grad(lambda p, i: (score(p, i) ** 2).sum()), (None, 0))(params, ids)
    assert each["table"].indices.tolist() == ids.tolist()

    def norm(grad_of, params):
        gradient = grad_of(lambda p: (score(p, ids) ** 3).sum())(params)
        return (gradient["kernel"] ** 2).sum()

    @jax.jit
    def all_ways(params):
        ways = (jax.grad, jax.grad), (jax.grad, sparse_grad), (sparse_grad, sparse_grad)
        return [f(functools.partial(norm, g))(params)["table"] for f, g in ways]

    expected, once, twice = all_ways(params)
    dense = twice.to_dense() if isinstance(twice, IndexedSlices) else twice
    for got in (once, dense):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_tables(params):
    low = params["table"].astype(jnp.bfloat16)

    def loss(table):
        return (embedding_lookup(table, IDS, combiner="sum") @ params["kernel"]).sum()

    got, expected = (f(loss)(low) for f in (sparse_grad, jax.grad))
    assert got.dtype == jnp.bfloat16
    # Sums of a few bfloat16 numbers, rounded after each.
    got, expected = (x.astype(np.float32) for x in (got.to_dense(), expected))
    np.testing.assert_allclose(got, expected, rtol=2e-2)


def test_a_second_call_compiles_nothing(params):
    step = jax.jit(sparse_value_and_grad(LOSSES["scan"][0]))
    step(params)
    step(jax.tree.map(lambda x: x * 2, params))
    assert step._cache_size() == 1


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.quick(1)
def test_inside_shard_map_slices_are_the_device_s_own(check_vma, params):
    ids = jnp.arange(16) % V

    def gradient(params, ids):
        return sparse_grad(lambda p: (score(p, ids) ** 2).sum())(params)["table"]

    def local(params, ids):
        mine = jax.tree.map(lambda x: jax.lax.pcast(x, "d", to="varying"), params)
        return gradient(mine, ids), gradient(mine, ids).deduplicate()

    specs = {"in_specs": (P(), P("d")), "out_specs": P("d"), "check_vma": check_vma}
    found = jax.jit(jax.shard_map(local, mesh=mesh(8), **specs))(params, ids)
    whole = gradient(params, ids)
    for slices in found:  # of two ids a device, none twice
        assert np.array_equal(slices.indices, whole.indices)
        np.testing.assert_allclose(slices.values, whole.values, rtol=1e-6)


@pytest.mark.parametrize(
    ("fun", "options", "words"),
    [
        (lambda a, b: score(a, IDS), {}, "scalar"),
        (lambda a, b: a["table"].sum(), {"argnums": 1}, "int32"),
        (lambda a, b: a["kernel"].sum(), {"has_aux": True}, "a pair of the value and"),
    ],
)
def test_errors(fun, options, words, params):
    with pytest.raises(TypeError, match=words):
        sparse_grad(fun, **options)(params, jnp.int32(3))


@pytest.mark.parametrize("argnums", [(0, 0), (0, -2), 2, "a", 0.5])
def test_places_that_are_none(argnums, params):
    with pytest.raises(ValueError, match="different places among 2"):
        sparse_grad(lambda a, b: a["kernel"].sum(), argnums)(params, jnp.int32(3))


def test_rows_of_no_numbers():
    got = sparse_grad(lambda t: embedding_lookup(t, PAIRS).sum())(jnp.zeros((V, 0)))
    assert got.values.shape == (6, 0)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
def test_a_dense_use_comes_first_and_slices_in_their_order(order):
    """In float32 (1e8 + 1) - 1e8 + 1 is 1, and other orders give 0 or 2."""
    factors = np.float32([1, -1e8, 1])[order]

    def loss(table):
        lookups = [factor * embedding_lookup(table, np.array([3])) for factor in factors]
        return sum(x.sum() for x in lookups) + 1e8 * table[3].sum()

    with pytest.warns(UserWarning, match="dense"):
        found = sparse_grad(loss)(jnp.ones((5, 1)))
    (also,) = training.gradients(loss, [jnp.ones((5, 1))])
    assert found[3, 0] == also[3, 0] == sum(factors, np.float32(1e8))


@pytest.mark.parametrize("value", [1.5, np.float32(1.5)])
def test_a_constant_value_is_an_array(value):
    found, gradient = sparse_value_and_grad(lambda _: value)(jnp.ones(2))
    assert (found.shape, found.item()) == ((), 1.5)
    np.testing.assert_array_equal(gradient, np.zeros(2))
    (found, aux), _ = sparse_value_and_grad(lambda _: (value, 2), has_aux=True)(jnp.ones(2))
    assert (found.item(), aux.item()) == (1.5, 2)
