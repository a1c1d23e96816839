"""What gradients() treats as connected, for each kind of control flow, against perturbed inputs.

Each case is a function of three vectors. Brute force moves an input a little in both directions. If
an output moves, the gradient must exist and be that of `jax.grad`; if none moves, it must be None.
In a few cases connection is decided by structure; each says what is expected, and why.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tpu_embed.sparse import embedding_lookup
from tpu_embed.training.autodiff import gradients, tag

SHAPES = {}
STRUCTURE = {}
POINT = tuple(np.random.default_rng(3).uniform(0.3, 1.7, (3, 3)).astype(np.float32))
NAMES = "abc"


def shape(**structure):
    """Enter a shape; `a=True` or `a=False` where structure decides whether a is connected."""

    def enter(fn):
        SHAPES[fn.__name__] = fn
        STRUCTURE[fn.__name__] = structure
        return fn

    return enter


# -- straight lines --------------------------------------------------------------------------------


@shape()
def product(a, b, c):
    return a * b


@shape()
def identity(a, b, c):
    return {"y": b, "constant": jnp.ones(2)}


@shape()
def nothing(a, b, c):
    return jnp.arange(3.0)


@shape()
def integers_alone(a, b, c):
    return jnp.argsort(a), (b > c).sum()


@shape()
def there_and_back_by_integers(a, b, c):
    return a.astype(jnp.int32).astype(jnp.float32) * b


@shape()
def a_predicate(a, b, c):
    return jnp.where(a > 1, b, 2 * c)


@shape()
def floor_ceil_round(a, b, c):
    return jnp.floor(a) + jnp.ceil(b) + jnp.round(c)


@shape()
def rounded_towards_zero(a, b, c):
    return jnp.trunc(a) * b


@shape()
def rounded_beside(a, b, c):
    return jnp.floor(a) * a + jnp.rint(b)


@shape(a=True)  # sign is a float function, flat as it is
def sign(a, b, c):
    return jnp.sign(a) * b


@shape(a=True)  # a product with zero is a product
def times_zero(a, b, c):
    return 0 * a + b


@shape(a=False)  # stop_gradient changes no value
def stopped(a, b, c):
    return lax.stop_gradient(a) * b


@shape(a=False)
def stopped_beside(a, b, c):
    return lax.stop_gradient(a * c) * b + c


@shape()
def an_index(a, b, c):
    return a[jnp.argmax(b)] * lax.dynamic_slice(c, (jnp.argmin(a),), (1,))


@shape()
def a_place_to_write(a, b, c):
    return a.at[jnp.argmax(b)].set(0.5).at[0].add(c[0])


@shape()
def sorted_values(a, b, c):
    return jnp.sort(a)[:2] + b[jnp.argsort(c)][:2]


@shape()
def complex_numbers(a, b, c):
    z = lax.complex(a, b) ** 2
    return jnp.abs(z), jnp.real(z) * jnp.floor(c)


@shape()
def spectrum(a, b, c):
    return jnp.abs(jnp.fft.rfft(a)) ** 2, jnp.real(jnp.fft.fft(b))


@shape(b=True)  # by sign
def a_cumulative_product(a, b, c):
    return jnp.cumprod(a) + lax.cumsum(jnp.sign(b))


@shape(a=False)  # through integers nothing passes, whatever their bits say
def bits(a, b, c):
    return lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.int32), jnp.float32) + b


@shape()
def barrier(a, b, c):
    first, second = lax.optimization_barrier((a, jnp.floor(b)))
    return first * 2, second


@shape()
def tagged(a, b, c):
    pair = tag({"first": a, "second": jnp.floor(b)}, "pair")
    return pair["first"] * 2, pair["second"]


@shape()
def looked_up(a, b, c):
    table = jnp.stack([a, b])
    return embedding_lookup(table, jnp.argsort(c)[:2] // 2 + jnp.arange(2))


# -- calls -----------------------------------------------------------------------------------------


@shape()
def call_with_two_results(a, b, c):
    first, second = jax.jit(lambda a, b: (jnp.sin(a), jnp.floor(b)))(a, b)
    return first + c, second


@shape()
def call_whose_result_is_dropped(a, b, c):
    _, second = jax.jit(lambda a, b: (jnp.sin(a), jnp.sin(b)))(a, b)
    return second


@shape()
def call_in_a_call(a, b, c):
    inner = jax.jit(lambda a, b: (b, lax.stop_gradient(a) * 0))
    return jax.jit(lambda a, b: inner(a, b)[0] * 3)(a, b)


@shape()
def rematerialized(a, b, c):
    first, second = jax.checkpoint(lambda a, b: (jnp.sin(jnp.sin(a)), jnp.ceil(b)))(a, b)
    return first, second


@shape()
def rematerialized_with_a_policy(a, b, c):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda a: jnp.dot(a, a) * b, policy=policy)(a)


@shape()
def mapped(a, b, c):
    return jax.vmap(lambda x, y: lax.cond(y > 1, lambda: x, lambda: 2 * x))(a, b)


@shape()
def derivative_inside(a, b, c):
    return jax.grad(lambda x: (x**3 * b + c).sum())(a)


@shape()
def tangent_inside(a, b, c):
    return jax.jvp(jnp.sin, (a,), (b,))[1]


@shape()
def solved(a, b, c):
    matrix = jnp.diag(a) + 2 * jnp.eye(3)
    return lax.custom_linear_solve(
        lambda x: matrix @ x,
        b,
        lambda _, y: jnp.linalg.solve(matrix, y),
        transpose_solve=lambda _, y: jnp.linalg.solve(matrix.T, y),
    )


# -- conds -----------------------------------------------------------------------------------------


@shape(b=True)
def cond(a, b, c):
    return lax.cond(c[0] > 0, lambda a, b: jnp.sin(a), lambda a, b: jnp.cos(b), a, b)


@shape(a=True)  # any branch connects, taken or not
def switch_by_a_number(a, b, c):
    branches = [lambda a, b: a, lambda a, b: 2 * a, lambda a, b: b]
    return lax.switch(2 + c.sum().astype(jnp.int32) * 0, branches, a, b)


@shape(a=True)
def cond_with_two_results(a, b, c):
    first, second = lax.cond(
        c[0] > 0, lambda a, b: (b, jnp.floor(a)), lambda a, b: (a * b, jnp.round(a)), a, b
    )
    return first, second


@shape(b=True)
def cond_in_a_call_in_a_cond(a, b, c):
    @jax.jit
    def inner(a, b):
        return lax.cond(a[0] > 0, lambda: a * 2, lambda: b + jnp.floor(c))

    return lax.cond(a[1] > 0, lambda: inner(a, b), lambda: a)


@shape()
def cond_of_rounded_values(a, b, c):
    return lax.cond(c[0] > 0, lambda a: jnp.floor(a), lambda a: jnp.ceil(a), a) * b


# -- scans -----------------------------------------------------------------------------------------


@shape()
def scan_constant_carry_and_xs(a, b, c):
    carry, ys = lax.scan(lambda carry, x: (carry * a + x, carry), b, c)
    return carry, ys


@shape()
def scan_results_of_xs_alone(a, b, c):
    _, ys = lax.scan(lambda carry, x: (carry + 1, jnp.sin(x)), a, b)
    return ys


@shape()
def scan_chain_of_carries(a, b, c):
    """A value of a is three iterations on its way to the last carry."""

    def body(carry, _):
        first, second, _ = carry
        return (first, first * 2, second * b), None

    zeros = jnp.zeros(3)
    return lax.scan(body, (a, zeros, zeros), None, length=4)[0][2]


@shape(a=True, b=True)  # the trip count is ignored
def scan_too_short_for_its_chain(a, b, c):
    def body(carry, _):
        first, second, _ = carry
        return (first, first * 2, second * b), None

    zeros = jnp.zeros(3)
    return lax.scan(body, (a, zeros, zeros), None, length=1)[0][2]


@shape(a=True)  # with no iteration, the initial carry is the result
def scan_that_overwrites_its_carry(a, b, c):
    return lax.scan(lambda carry, _: (b, None), a, None, length=2)[0]


@shape(b=True)
def scan_without_iterations(a, b, c):
    return lax.scan(lambda carry, _: (carry * b, None), a, None, length=0)[0]


@shape()
def scan_backwards(a, b, c):
    return lax.scan(lambda carry, x: (carry + x, carry), 0.0, a, reverse=True)[1] * b


@shape(a=True)  # as an initial carry
def scan_that_rounds(a, b, c):
    return lax.scan(lambda carry, x: (jnp.floor(carry) + x, None), a, (b * 2)[None])[0]


@shape(b=True)
def scan_in_a_cond_in_a_scan(a, b, c):
    def outer(carry, x):
        def inner():
            return lax.scan(lambda c, y: (c * y, None), carry, a)[0]

        return lax.cond(x > 0, inner, lambda: carry + b[0]), None

    return lax.scan(outer, 1.0, jnp.floor(c) + 1)[0]


@shape()
def scan_that_counts(a, b, c):
    def body(carry, x):
        n, total = carry
        return (n + (x > 1).astype(jnp.int32), total + b[0]), n

    (n, total), ns = lax.scan(body, (0, 0.0), a)
    return total * n.astype(jnp.float32), ns


@shape()
def fori_loop_of_known_length(a, b, c):
    return lax.fori_loop(0, 3, lambda i, x: x * a + b[i], c)


@shape()
def mapped_by_a_loop(a, b, c):
    return lax.map(lambda x: jnp.sin(x) * b, a)


@shape()
def associative_scan(a, b, c):
    return lax.associative_scan(jnp.multiply, a) + jnp.floor(b)


# -- whiles ----------------------------------------------------------------------------------------


def repeated(x):
    """Double x as long as it is small."""
    return lax.while_loop(lambda x: x.sum() < 20, lambda x: x * 2, x)


@shape()
def while_of_integers(a, b, c):
    n = lax.while_loop(lambda n: n < 5, lambda n: n * 2, a.sum().astype(jnp.int32) + 1)
    return n.astype(jnp.float32) * b


@shape()
def while_and_then_rounded(a, b, c):
    return jnp.floor(repeated(a)) + a * b


@shape()
def while_and_then_dropped(a, b, c):
    repeated(a)
    return a * b


@shape(a=False)
def while_of_a_stopped_value(a, b, c):
    return repeated(lax.stop_gradient(a)) * b


@shape()
def while_condition(a, b, c):
    limit = a.sum() * 100
    return lax.while_loop(lambda n: n < limit, lambda n: n + 500, 0.0) * b


@shape()  # its own rule differentiates it
def while_in_a_custom_rule(a, b, c):
    @jax.custom_vjp
    def doubled(x):
        return repeated(x)

    doubled.defvjp(lambda x: (repeated(x), None), lambda _, g: (g * 16,))
    return doubled(a) * b


# -- custom rules ----------------------------------------------------------------------------------


@shape()
def relu(a, b, c):
    return jax.nn.relu(a - 1) * jax.nn.softplus(b)


@shape(b=True)  # opaque
def custom_jvp_that_ignores(a, b, c):
    @jax.custom_jvp
    def first(a, b):
        return a * 1

    first.defjvp(lambda primals, tangents: (first(*primals), tangents[0]))
    return first(a, b)


@shape(a=True)  # opaque: the floor inside is not looked at
def straight_through(a, b, c):
    @jax.custom_vjp
    def rounded(a):
        return jnp.floor(a)

    rounded.defvjp(lambda a: (jnp.floor(a), None), lambda _, g: (g,))
    return rounded(a) * b


@shape()
def custom_rule_with_zeros(a, b, c):
    @jax.custom_vjp
    def hidden(a, n):
        return a * n

    hidden.defvjp(lambda a, n: (a * n, a), lambda a, g: (jnp.zeros_like(a), jnp.float32(0)))
    return hidden(a, jnp.float32(2)) + b


@shape()
def custom_rule_in_a_scan(a, b, c):
    return lax.scan(lambda x, y: (jax.nn.relu(x * y), None), a, b)[0]


# -- references ------------------------------------------------------------------------------------


@shape(c=True)  # what is written into a reference counts as read from it
def written_and_read(a, b, c):
    place = jax.new_ref(c)
    place[...] = a * b
    return place[...]


@shape()
def written_in_a_call(a, b, c):
    place = jax.new_ref(jnp.zeros(3))

    @jax.jit
    def write(x):
        place[...] = x * 2

    write(a)
    return place[...] + jnp.floor(b)


# -- the judges ------------------------------------------------------------------------------------


def judged(fn):
    """Return a function of the inputs: float outputs, our gradients, and those of jax.grad."""

    def floats(*xs):
        return [y for y in jax.tree.leaves(fn(*xs)) if jnp.issubdtype(y.dtype, jnp.inexact)]

    def total(*xs):
        return sum((jnp.real(y).sum() for y in floats(*xs)), jnp.float32(0))

    return jax.jit(
        lambda *xs: (floats(*xs), gradients(fn, list(xs)), jax.grad(total, (0, 1, 2))(*xs))
    )


def moved(run):
    """Tell for each input whether some float output follows it, to and fro, by a little."""
    result = []
    for i, x in enumerate(POINT):
        direction = np.float32(1e-3) * np.array([1, -1.5, 2], np.float32)
        sides = [run(*POINT[:i], x + s * direction, *POINT[i + 1 :])[0] for s in (1, -1)]
        result.append(any(not np.array_equal(u, v) for u, v in zip(*sides, strict=True)))
    return result


@pytest.mark.parametrize("name", SHAPES)
def test_connected_as_by_brute_force_and_the_numbers_of_jax(name):
    run, structure = judged(SHAPES[name]), STRUCTURE[name]
    expected = dict(zip(NAMES, moved(run), strict=True))
    assert all(structure[x] != expected[x] for x in structure), "noted without need"
    _, found, references = run(*POINT)
    connected = {x: g is not None for x, g in zip(NAMES, found, strict=True)}
    assert connected == expected | structure
    for g, reference in zip(found, references, strict=True):
        # The same operations, but jax.grad here goes through one sum more.
        np.testing.assert_allclose(np.zeros(3) if g is None else g, reference, rtol=1e-6)


def test_there_are_shapes_enough():
    assert len(SHAPES) >= 30
