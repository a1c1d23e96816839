"""More of `gradient_shapes`: scans, whiles, custom rules and references."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from gradient_shapes import shape
from jax import lax

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
