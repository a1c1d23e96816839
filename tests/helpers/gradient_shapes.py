"""Functions of every shape, and what is connected in them: straight lines, calls, conds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_embed.sparse import embedding_lookup
from tpu_embed.training import tag

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
