"""gradients(): its contract, and rows that it never touches, against jax.grad and brute force."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from gradient_cases import W, X, same, square
from jax import lax
from jax.sharding import PartitionSpec as P
from reach_cases import CUT, KEPT, PAIRS, loss_of

from tpu_embed import optimizers as o
from tpu_embed import training
from tpu_embed.sparse import embedding_lookup
from tpu_embed.training import AggregationMethod, Optimizer, Tag, gradients, tag

METHODS = [None, *AggregationMethod]


# -- xs --------------------------------------------------------------------------------------------


def test_one_gradient_an_x_in_order():
    for xs in ([X, W], (X, W)):
        same(gradients(lambda x, w: (x * w, w**2), xs), [W, X + 2 * W])
    same(gradients(square, X), [2 * X])
    same(gradients(square, 3.0), [6.0])
    assert gradients(square, []) == [] == gradients(square, ())


def test_an_x_may_be_a_tree():
    tree = {"w": X, "more": (W, jnp.arange(3)), "none": None}
    found, other = gradients(lambda tree, x: {"y": [tree["w"] * x]}, [tree, np.asarray(W)])
    assert np.array_equal(found["w"], W)
    assert np.array_equal(other, X)
    assert found["more"] == (None, None)
    assert found["none"] is None


@pytest.mark.parametrize(
    ("kind", "xs", "words"),
    [
        (TypeError, {"x": X}, r"xs: expected a list or tuple .* got dict; .*\[tree\]"),
        (TypeError, [X, {"w": "no"}], r"xs\[1\]\['w'\]: expected an array, got str"),
        (TypeError, [[Tag("h")], X], r"xs\[0\]\[0\]: expected an array, got Tag"),
        (ValueError, [Tag("h"), X], "expected Tags after the arguments"),
    ],
)
def test_xs_of_another_kind_are_errors(kind, xs, words):
    with pytest.raises(kind, match=words):
        gradients(lambda x, w: x, xs)


# -- grad_ys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_ys", "of_a", "of_b"),
    [
        (None, 1, 1),
        ({"a": W, "b": (None, None)}, W, 1),
        ({"a": None, "b": (np.asarray(W, np.float64), W)}, 1, W),
        ({"a": W, "b": (2 * W, jnp.arange(3))}, W, 2 * W),
    ],
)
def test_cotangents_weigh_the_ys(grad_ys, of_a, of_b):
    def fn(x):
        return {"a": x**2, "b": (jnp.sin(x), jnp.argsort(x))}

    same(gradients(fn, [X], grad_ys=grad_ys), [2 * X * of_a + jnp.cos(X) * of_b])


@pytest.mark.parametrize(
    ("grad_ys", "words"),
    [
        ({"a": None, "b": None}, ": expected the structure of ys"),
        (X, ": expected the structure of ys"),
        ((X, {"z": X[:2]}), r"\[1\]\['z'\]: expected y's shape \(3,\), got"),
    ],
)
def test_cotangents_that_do_not_fit(grad_ys, words):
    with pytest.raises(ValueError, match=f"grad_ys{words}"):
        gradients(lambda x: (x, {"z": x}), [X], grad_ys=grad_ys)


KINDS = {
    "float": (X, lambda x: x * 1),
    "complex": (lax.complex(X, W), lambda x: lax.complex(x, x)),
    "integer": (jnp.arange(3), lambda x: x.astype(jnp.int32)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", KINDS)
def test_a_cotangent_is_of_its_ys_kind(kind, given):
    fn, grad_ys = KINDS[kind][1], KINDS[given][0]
    if given == kind or (kind, given) == ("integer", "float"):
        (found,) = gradients(fn, [X], grad_ys=grad_ys)
        assert (found is None) == (kind == "integer")
    else:
        with pytest.raises(TypeError, match=r"grad_ys: expected .*numbers for a y of"):
            gradients(fn, [X], grad_ys=grad_ys)


@pytest.mark.parametrize("grad_ys", [None, (None, None)])
def test_a_complex_y_needs_a_cotangent(grad_ys):
    with pytest.raises(TypeError, match=r"grad_ys\[1\]: expected complex numbers, got None"):
        gradients(lambda x: (x, lax.complex(x, x)), [X], grad_ys=grad_ys)


def test_complex_values_follow_the_convention_of_jax():
    z, c = lax.complex(X, W), lax.complex(W, X)

    def fn(z, x):
        return jnp.exp(z) * lax.complex(x, x)

    same(gradients(fn, [z, X], grad_ys=c), jax.vjp(fn, z, X)[1](c))
    same(
        gradients(lambda z: jnp.abs(z) ** 2, [z]), [jax.grad(lambda z: (jnp.abs(z) ** 2).sum())(z)]
    )


# -- not connected ---------------------------------------------------------------------------------


def test_unconnected_is_none_or_zeros_like_x():
    xs = [X, jnp.arange(4), jnp.ones((2, 2), jnp.bfloat16)]

    def fn(x, n, half):
        return (n * 2, x**2)

    assert gradients(fn, xs)[1:] == [None, None]
    for word in ("zero", training.UnconnectedGradients.ZERO):
        found = gradients(fn, xs, unconnected_gradients=word)
        same(found, [2 * X, jnp.zeros(4), jnp.zeros((2, 2))])
        assert [g.dtype for g in found] == [x.dtype for x in xs]
    (zeros,) = gradients(lambda x: x.astype(jnp.int32), [X], unconnected_gradients="zero")
    assert (zeros.tolist(), zeros.dtype) == ([0, 0, 0], X.dtype)


def test_a_while_of_unknown_length_names_the_x():
    def fn(first, tree, second):
        y = lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2 + tree["w"], jnp.abs(second))
        return y, first * 2

    def in_map(x):
        return lax.map(lambda y: doubled(y, jnp.argmax(X)), x)

    for words, of, xs in (
        (r"xs\[1\]\['w'\], xs\[2\]: .* while loop", fn, [X, {"w": W}, X]),
        (r"gradients: xs\[0\]: .* while loop.*jax.lax.scan", doubled, [X, 3]),
        (r"Tag\('h'\): .* while", lambda x: doubled(tag(x, "h"), jnp.argmax(x)), [X, Tag("h")]),
        (r"xs\[0\]: .* while", jax.jit(in_map), [X]),
    ):
        with pytest.raises(ValueError, match=words):
            gradients(of, xs)


def doubled(x, n):
    """Double x n times, as often as n says when it runs."""
    return lax.fori_loop(0, n, lambda i, c: c * 2, x)


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["unconnected_gradients", "aggregation_method", "gate_gradients"])
@pytest.mark.parametrize("xs", [[X], []])
def test_another_word_is_always_an_error(word, xs):
    with pytest.raises(ValueError, match=f"gradients: {word}: expected .* got 'other'"):
        gradients(square, xs, **{word: "other"})


@pytest.mark.parametrize("method", METHODS)
def test_aggregation_does_not_change_the_sum(method):
    def fn(x, w):
        return [x**2, jnp.floor(x), jnp.sin(x) * w, jnp.argsort(x)]

    expected = [2 * X + jnp.cos(X) * W, jnp.sin(X)]
    same(gradients(fn, [X, W], aggregation_method=method), expected)
    same(gradients(fn, [X, W], aggregation_method=method and str(method)), expected)


@pytest.mark.parametrize("method", ["tree", "accumulate_n"])
@pytest.mark.parametrize("factors", list(itertools.permutations(np.float32([1e8, -1e8, 1]))))
def test_one_pull_back_a_y_is_summed_left_to_right(method, factors):
    """In float32 1e8 - 1e8 + 1 is 1, and 1 + 1e8 - 1e8 is 0."""
    one = jnp.float32(1)
    (found,) = gradients(lambda x: [x * k for k in factors], [one], aggregation_method=method)
    assert found == (factors[0] + factors[1]) + factors[2]


def test_one_pull_back_a_y_meets_no_other_y():
    """0 · ∞ would be NaN."""
    (found,) = gradients(lambda x: (jnp.log(x), 2 * x), [jnp.float32(0)], aggregation_method="tree")
    assert np.isposinf(found)


# -- together --------------------------------------------------------------------------------------


def test_inside_jit_and_vmap():
    def fn(x):
        found = gradients(lambda x: tag(x**2, "h") * x, [x, Tag("h")], stop_gradients=["h"])
        return [*found, *gradients(jnp.floor, [x])]

    expected = [X**2, X, None]
    for found in (jax.jit(fn)(X), jax.vmap(fn)(X), jax.jit(jax.vmap(fn))(X)):
        same(found[:2], expected[:2])
        assert found[2] is None


def test_derivatives_of_gradients():
    def first(x):
        return gradients(lambda x: x**3, [x])[0]

    same(gradients(first, [X]), [6 * X])
    same(gradients(lambda x: gradients(first, [x])[0], [X]), [6 * jnp.ones(3)])
    same([jax.grad(lambda x: first(x).sum())(X), jax.jvp(first, (X,), (W,))[1]], [6 * X, 6 * X * W])
    same(gradients(lambda c: gradients(square, [X], grad_ys=c)[0], [W]), [2 * X])


def test_a_stop_holds_for_its_own_differentiation_alone():
    """d/dx of h(x) x with h = x² w held is h; the derivatives of that h are whole."""

    def held(x, w):
        return gradients(lambda x: tag(x**2 * w, "h") * x, [x], stop_gradients=["h"])[0]

    same([held(X, W)], [X**2 * W])
    same(jax.grad(lambda x, w: held(x, w).sum(), (0, 1))(X, W), [2 * X * W, X**2])
    same(gradients(held, [X, W]), [2 * X * W, X**2])

    def not_of_x(w):
        return gradients(lambda x: tag(w**2, "h") * x, [X], stop_gradients=["h"])[0]

    same([jax.grad(lambda w: not_of_x(w).sum())(W)], [2 * W])


def test_an_outer_call_sees_the_tags_of_an_inner_one():
    def fn(x):
        return gradients(lambda x: tag(x**2, "h") ** 2, [x])[0]

    same(gradients(fn, [X, Tag("h")]), [12 * X**2, 4 * X])  # fn is 2 h · 2 x


@pytest.mark.parametrize("check_vma", [False, True])
def test_inside_shard_map_gradients_are_those_of_jax_grad(check_vma):
    def fn(w, x):
        return tag(w * x, "h") * 2.0

    def both(w, x):
        by_w, h = gradients(lambda w: fn(w, x), [w, Tag("h")])
        options = {"unconnected_gradients": "zero", "grad_ys": jnp.ones(2)}
        (by_x,) = gradients(lambda x: fn(w, x), [x], **options)
        wanted_w, wanted_x = jax.grad(lambda w, x: fn(w, x).sum(), (0, 1))(w, x)
        return (by_w[None], h, by_x), (wanted_w[None], jnp.full_like(x, 2), wanted_x)

    specs = {"in_specs": (P(), P("d")), "out_specs": P("d"), "check_vma": check_vma}
    run = jax.jit(jax.shard_map(both, mesh=mesh(8), **specs))
    same(*run(jnp.float32(3), jnp.arange(16.0)))


# -- rows that no gradient reaches are never touched, here and by an Optimizer ---------------------

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

    tables, factors = jnp.stack([TABLE, TABLE[::-1]]), (TABLE[5].sum(), TABLE[1].sum())
    each = jax.vmap(inner)(tables, jnp.array([[5], [4]]))
    assert each.indices.tolist() == [KEPT.tolist()] * 2
    for slices, table, factor in zip(each.values, tables, factors, strict=True):
        np.testing.assert_allclose(slices, 3 * table[KEPT] ** 2 * factor, rtol=1e-5)
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

    step = jax.jit(functools.partial(optimizer.minimize, loss))
    return optimizer, step(params, optimizer.init(params))[:2]


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

    now, after, _ = jax.jit(functools.partial(optimizer.minimize, loss))(params, state)
    assert np.array_equal(parts(optimizer, params, state), parts(optimizer, now, after))
    assert now["w"] != params["w"]
    assert int(after.step) == 2
    with pytest.raises(ValueError, match=r"minimize: .* got no gradient for any of \['table'\]"):
        optimizer.minimize(loss, params, state, var_list=["['table']"])


# -- slices, in a promised order, if a table is only looked up -------------------------------------


def sines_of(table, ids=KEPT):
    return jnp.sin(embedding_lookup(table, ids))


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
