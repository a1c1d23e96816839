"""gradients() and Optimizer: rows that no gradient reaches are never touched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from reach_cases import CUT, KEPT, PAIRS, loss_of

from tpu_embed import optimizers as o
from tpu_embed.sparse import IndexedSlices, embedding_lookup
from tpu_embed.training import AggregationMethod, Optimizer, Tag, gradients, tag

METHODS = [None, *AggregationMethod]
ONE_BY_ONE = ("tree", "accumulate_n")
V, D = 6, 3
TABLE = jnp.asarray(np.random.default_rng(2).normal(size=(V, D)).astype(np.float32))


def value_of(loss, table):
    return loss(functools.partial(embedding_lookup, table))[0]


def rows_of(gradient):
    return gradient.indices.tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.quick(2)
def test_a_lookup_that_is_cut_has_no_entries(method):
    cases = {case: loss_of(*case) for case in PAIRS}

    @jax.jit
    def run(table):
        by = functools.partial(gradients, aggregation_method=method)
        return {c: by(functools.partial(value_of, loss), [table]) for c, loss in cases.items()}

    for case, (found,) in run(TABLE).items():
        assert rows_of(found) == KEPT.tolist(), case
        assert np.array_equal(found.values, 2 * TABLE[KEPT]), case


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.quick(3)
def test_each_y_has_the_lookups_that_reach_it(method):
    """Of four lookups: one for the first y, one for both, one for none, one for the second."""

    def fn(table, w):
        first, both, neither, second = (embedding_lookup(table, np.array([i])) for i in range(4))
        floors = jnp.floor(neither), neither > 0
        return [first + both, w, 3 * both + 4 * second, *floors, lax.stop_gradient(neither)]

    found, w = gradients(fn, [TABLE, jnp.ones(2)], aggregation_method=method)
    expected = ([0, 1, 1, 3], [1, 1, 3, 4]) if method in ONE_BY_ONE else ([0, 1, 3], [1, 4, 4])
    assert (rows_of(found), found.values[:, 0].tolist()) == expected
    assert np.array_equal(w, np.ones(2))


@pytest.mark.parametrize("method", METHODS)
def test_a_cotangent_of_zeros_is_a_gradient(method):
    def fn(table):
        return embedding_lookup(table, KEPT), embedding_lookup(table, CUT)

    cotangents = (None, jnp.zeros((3, D)))
    (found,) = gradients(fn, [TABLE], grad_ys=cotangents, aggregation_method=method)
    assert rows_of(found) == [*KEPT, *CUT]
    assert np.array_equal(found.values, np.repeat([[1.0], [0.0]], 3, 0) * np.ones(D))


@pytest.mark.parametrize("method", [None, "tree"])
def test_a_dense_use_for_one_y_makes_the_whole_gradient_dense(method):
    def fn(table):
        return embedding_lookup(table, KEPT), 2 * table, jnp.float32(1)

    (found,) = gradients(fn, [TABLE], aggregation_method=method)
    expected = np.full((V, D), 2.0)
    np.add.at(expected, KEPT, 1.0)
    assert np.array_equal(found, expected)


def test_a_use_that_is_cut_does_not_make_the_gradient_dense():
    def fn(table):
        copy = embedding_lookup(lax.stop_gradient(table), CUT)
        return embedding_lookup(table, KEPT) * lax.stop_gradient((table**2).sum()) + copy[0]

    assert rows_of(gradients(fn, [TABLE])[0]) == KEPT.tolist()


def test_a_stop_below_a_lookup_takes_it_out():
    def fn(table):
        hidden = tag(jnp.sin(embedding_lookup(table, CUT)), "hidden")
        return (embedding_lookup(table, KEPT).sum() * hidden).sum()

    both, _ = gradients(fn, [TABLE, Tag("hidden")])
    found, hidden = gradients(fn, [TABLE, Tag("hidden")], stop_gradients=["hidden"])
    assert (rows_of(both), rows_of(found)) == ([*CUT, *KEPT], KEPT.tolist())
    assert np.array_equal(hidden, jnp.full((3, D), TABLE[KEPT].sum()))

    def alone(table):
        return tag(embedding_lookup(table, CUT), "hidden").sum()

    assert gradients(alone, [TABLE], stop_gradients=["hidden"]) == [None]


def test_under_vmap_and_inside_other_gradients():
    def inner(table, ids):
        def fn(t):
            stopped = lax.stop_gradient(embedding_lookup(t, ids))
            return (embedding_lookup(t, KEPT) ** 3).sum() * stopped.sum()

        return gradients(fn, [table])[0]

    each = jax.vmap(inner, (None, 0))(TABLE, jnp.asarray(CUT)[:, None])
    assert each.indices.tolist() == [KEPT.tolist()] * 3
    for part in (lambda found: found.values, lambda found: found.to_dense()):
        (second,) = gradients(lambda t, part=part: part(inner(t, np.array([0]))), [TABLE])
        assert rows_of(second) == KEPT.tolist()  # the factor is constant for both
        np.testing.assert_allclose(second.values, 6 * TABLE[KEPT] * TABLE[0].sum(), rtol=1e-5)


# -- Optimizer -------------------------------------------------------------------------------------

RULES = {"Adam": o.Adam(0.1, weight_decay_factor=0.1), "Momentum": o.Momentum(0.1, momentum=0.9)}


def first_step(rule):
    """Return an optimizer, and parameters and state after a step that touched every row."""
    optimizer, params = Optimizer(RULES[rule], "opt"), {"table": TABLE, "w": jnp.ones(())}

    def loss(params):
        return (embedding_lookup(params["table"], np.arange(V)) ** 2).sum() * params["w"]

    return optimizer, optimizer.minimize(loss, params, optimizer.init(params))[:2]


def parts(optimizer, params, state):
    """Return the table and its slots."""
    slots = [optimizer.get_slot(state, "['table']", x) for x in optimizer.get_slot_names(state)]
    return np.stack([params["table"], *slots])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.quick(1)
def test_a_step_leaves_rows_and_slots_that_no_gradient_reaches(rule):
    """Bit for bit, where momenta and decay would move them."""
    optimizer, before = first_step(rule)
    cases = [("stop_gradient", "plain"), ("argmax", "scan"), ("unused", "jit"), ("aux", "cond")]

    def step(params, state, case):
        loss = loss_of(*cases[case])
        return optimizer.minimize(lambda p: value_of(loss, p["table"]) * p["w"], params, state)

    step = jax.jit(step, static_argnums=2)
    for case in range(4 if rule == "Adam" else 1):
        params, state, _ = step(*before, case)
        changed = parts(optimizer, params, state) != parts(optimizer, *before)
        assert (changed.any(-1) == np.isin(np.arange(V), KEPT)).all(), cases[case]


def test_a_table_without_any_gradient_keeps_all_its_bits():
    optimizer, (params, state) = first_step("Adam")

    def loss(params):
        stopped = lax.stop_gradient(embedding_lookup(params["table"], KEPT)).sum()
        return stopped * params["w"]

    now, after, _ = optimizer.minimize(loss, params, state)
    assert np.array_equal(parts(optimizer, params, state), parts(optimizer, now, after))
    assert now["w"] != params["w"]
    assert int(after.step) == 2
    with pytest.raises(ValueError, match=r"minimize: .* got no gradient for any of \['table'\]"):
        optimizer.minimize(loss, params, state, var_list=["['table']"])


# -- slices, in a promised order, if a table is only looked up -------------------------------------


def sines_of(table, ids=KEPT):
    return jnp.sin(embedding_lookup(table, ids))


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)], ids=["both", "ids", "table"])
@pytest.mark.quick(2)
def test_slices_of_vmapped_gradients(axes):
    """Each example has slices of its own, as if alone; float32 sines and cosines."""
    tables, ids = jnp.stack([TABLE, TABLE[::-1]]), jnp.array([[4, 1, 4], [5, 4, 0]])
    tables, ids = tables if axes[0] == 0 else tables[:1], ids if axes[1] == 0 else ids[:1]
    given = tables if axes[0] == 0 else tables[0], ids if axes[1] == 0 else ids[0]

    def one(table, ids):
        return gradients(lambda t: sines_of(t, ids), [table])[0]

    found = jax.jit(jax.vmap(one, axes))(*given)
    assert isinstance(found, IndexedSlices)
    assert found.dense_shape == TABLE.shape
    for i in range(2):
        table, mine = np.asarray(tables, np.float64)[i % len(tables)], ids[i % len(ids)]
        assert found.indices[i].tolist() == mine.tolist()
        np.testing.assert_allclose(found.values[i], np.cos(table[mine]), rtol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [lambda t: sines_of(2 * t), lambda t: (sines_of(t), t[0] * 3), lambda t: t[KEPT] + sines_of(t)],
    ids=["computed", "dense use beside", "plain indexing beside"],
)
def test_other_uses_of_a_table_make_its_gradient_dense(fn):
    """Without a warning, which would be an error here."""
    expected = jax.grad(lambda t: sum(y.sum() for y in jax.tree.leaves(fn(t))))(TABLE)
    (found,) = gradients(fn, [TABLE])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_slices_beside_dense_gradients_and_none():
    def fn(table, other, w):
        return sines_of(table) @ w + jnp.floor(embedding_lookup(other, KEPT)).sum()

    slices, none, dense = gradients(fn, [TABLE, TABLE, jnp.array([3.0, 0.25, -2.0])])
    assert none is None
    assert rows_of(slices) == KEPT.tolist()
    np.testing.assert_allclose(dense, sines_of(TABLE).sum(0), rtol=1e-6)
