"""tag and Tag: gradients by values inside a function, and stopping at them, in closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_cases import W, X, same, square
from jax import lax

from tpu_embed.sparse import embedding_lookup
from tpu_embed.training import Tag, gradients, tag


def test_the_gradient_of_a_tag_is_total_and_cuts_no_path():
    def fn(x):
        first = tag(2 * x, "first")
        second = tag(first**2, "second")
        return second + first

    first = 2 * X
    same(gradients(fn, [X, Tag("first"), Tag("second")]), [4 * first + 2, 2 * first + 1, X * 0 + 1])
    same(gradients(lambda: fn(X), [Tag("first"), Tag("first")]), [2 * first + 1] * 2)
    same(gradients(lambda: fn(X), Tag("first")), [2 * first + 1])


def test_a_stop_is_constant_below_and_keeps_its_own_gradient():
    def fn(x):
        return tag(jnp.sin(x), "h") * x

    for stop in ("h", ["h"], [Tag("h")]):
        same(gradients(fn, [X, Tag("h")], stop_gradients=stop), [jnp.sin(X), X])
    by_x, by_h = gradients(lambda x: tag(jnp.sin(x), "h") ** 2, [X, Tag("h")], stop_gradients=["h"])
    assert by_x is None
    same([by_h], [2 * jnp.sin(X)])


def test_a_tag_above_another_that_stops():
    def fn(x):
        return tag(tag(x * 2, "above") * 3, "below") + x

    above, below = gradients(fn, [X, Tag("above"), Tag("below")], stop_gradients=["below"])[1:]
    assert above is None
    assert np.array_equal(below, np.ones(3))


def test_a_tag_may_name_a_tree_of_floats_integers_and_keys():
    def fn(x):
        tree = {"a": x * 2, "n": jnp.argsort(x), "b": [jnp.sin(x)], "key": jax.random.key(1)}
        h = tag(tree, "h")
        return h["a"] * h["b"][0] * (h["n"] > 0).astype(jnp.float32)

    seen = (jnp.argsort(X) > 0).astype(jnp.float32)
    for stops in ((), ("h",)):
        (found,) = gradients(lambda: fn(X), [Tag("h")], stop_gradients=stops)
        same([found["a"], found["b"][0]], [jnp.sin(X) * seen, 2 * X * seen])
        assert found["n"] is found["key"] is None
    with_zeros = functools.partial(gradients, unconnected_gradients="zero")
    (zeros,) = with_zeros(lambda: tag({"n": jnp.argsort(X), "x": X}, "h")["x"], [Tag("h")])
    assert (zeros["n"].tolist(), zeros["n"].dtype) == ([0, 0, 0], jnp.int32)
    same(with_zeros(fn, [X], stop_gradients=["h"]), [X * 0])


def test_a_stop_and_lookups_of_one_scan():
    table = jnp.arange(12.0).reshape(4, 3)

    def fn(table, x):
        def body(carry, i):
            h = tag(embedding_lookup(table, i) * carry, "h")
            return carry + embedding_lookup(table, i).sum() * x, h

        return lax.scan(body, x, jnp.array([1, 2, 1]))

    by_table, by_x = gradients(fn, [table, X], stop_gradients=["h"])
    assert by_table.indices.tolist() == [1, 2, 1]  # of those lookups that the stop leaves
    assert np.array_equal(by_table.values, np.full((3, 3), X.sum()))
    assert np.array_equal(by_x, np.full(3, 1 + 12 + 21 + 12))


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_tags_inside_calls(call):
    def fn(x):
        return call(lambda x: tag(jnp.sin(x), "h") * x)(x) * 2

    same(gradients(fn, [X, Tag("h")]), [2 * (jnp.cos(X) * X + jnp.sin(X)), 2 * X])
    same(gradients(fn, [X], stop_gradients=["h"]), [2 * jnp.sin(X)])


def test_a_stop_inside_loops_and_branches():
    def scanned(x, hold=lambda h: tag(h, "h")):
        return lax.scan(lambda c, y: (hold(c * x) * y, c), x, jnp.stack([x, x]))[0]

    # Each step's h is a number, not a function of x.
    expected = jax.grad(lambda x: scanned(x, lax.stop_gradient).sum())(X)
    same(gradients(scanned, [X], stop_gradients=["h"]), [expected])

    def branched(x):
        return lax.cond(x[0] > 0, lambda: tag(2 * x, "h") * x, lambda: x)

    same(gradients(branched, [X], stop_gradients=["h"]), [2 * X])


def test_a_stop_inside_a_while_cuts_a_path_that_has_no_derivative():
    def fn(x):
        doubled = lax.while_loop(lambda c: c.sum() < 30, lambda c: tag(c * x, "h") + 9, W)
        return doubled * x

    with pytest.raises(ValueError, match="while"):
        gradients(fn, [X])
    doubled = fn(X) / X
    same(gradients(fn, [X], stop_gradients=["h"]), [doubled])


def test_a_constant_may_be_tagged_and_tags_that_nobody_asks_for_are_no_errors():
    same(gradients(lambda x: x * tag(W, "w"), [X, Tag("w")]), [W, X])
    same(gradients(lambda x: tag(x, "h") * tag(x, "h"), [X]), [2 * X])


def test_a_tag_is_the_identity():
    def fn(x):
        return tag(x * 3, "h") ** 2

    assert np.array_equal(fn(X), (X * 3) ** 2)
    assert np.array_equal(jax.jit(jax.vmap(fn))(X), (X * 3) ** 2)
    assert np.array_equal(jax.vmap(jax.grad(fn))(X), 18 * X)
    assert np.array_equal(jax.jvp(jax.checkpoint(fn), (X,), (W,))[1], 18 * X * W)
    transposed = jax.linear_transpose(lambda x: tag((x, 2 * x), "pair")[1], X)
    assert np.array_equal(transposed(W)[0], 2 * W)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_batched_tag_names_the_whole_batch_its_axis_first(axis):
    def fn(x):
        return jax.vmap(lambda x, w: tag(w * x, "h") ** 2, (axis, None))(x, W)

    x = jnp.stack([X, W, X, W], axis)
    by_x, by_h = gradients(fn, [x, Tag("h")])
    rows = jnp.moveaxis(x, axis, 0)
    same([jnp.moveaxis(by_x, axis, 0), by_h], [2 * W**2 * rows, 2 * W * rows])


def tagged(x):
    return tag(x, "h")


@jax.custom_jvp
def rule(x):
    return tag(x, "h")


rule.defjvp(lambda primals, tangents: (primals[0], tangents[0]))


def scan_of(fn):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


BAD = {
    "unknown": (square, r"expected it once in the function, got only \[\]"),
    "twice": (lambda x: tagged(x) + tagged(x), "got it 2 times"),
    "in a call made twice": (lambda x: jax.jit(tagged)(jax.jit(tagged)(x)), "2 times"),
    "custom rule": (rule, "got it inside custom_jvp_call"),
    "custom rule in a scan": (scan_of(rule), "got it inside custom_jvp_call"),
}
NOT_ONE = {  # a stop may stand there, see above
    "scan": scan_of(tagged),
    "cond": lambda x: lax.cond(x[0] > 0, tagged, square, x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: tagged(c + 9), x),
}


@pytest.mark.parametrize("case", BAD)
def test_tags_that_are_errors_name_the_tag(case):
    fn, words = BAD[case]
    for xs, stops in (([X, Tag("h")], []), ([X], ["h"])):
        with pytest.raises(ValueError, match=f"tag 'h': .*{words}"):
            gradients(fn, xs, stop_gradients=stops)


@pytest.mark.parametrize("place", NOT_ONE)
def test_a_tag_with_a_gradient_has_one_value(place):
    with pytest.raises(ValueError, match=f"tag 'h': .*got it inside {place}"):
        gradients(NOT_ONE[place], [X, Tag("h")])


def test_names_are_checked():
    for make in (lambda: tag(X, ""), lambda: Tag(3)):
        with pytest.raises(ValueError, match=r"Tag.name: expected a non-empty string"):
            make()
    with pytest.raises(TypeError, match="stop_gradients: expected names of tags or Tags"):
        gradients(square, [X], stop_gradients=[X])
