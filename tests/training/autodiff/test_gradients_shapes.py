"""What gradients() treats as connected, for each kind of control flow, against perturbed inputs.

Each case is a function of three vectors. Brute force moves an input a little in both directions. If
an output moves, the gradient must exist and be that of `jax.grad`; if none moves, it must be None.
In a few cases connection is decided by structure; each says what is expected, and why.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tpu_embed.sparse import embedding_lookup
from tpu_embed.training import gradients, tag

POINT = tuple(np.random.default_rng(3).uniform(0.3, 1.7, (3, 3)).astype(np.float32))
NAMES = "abc"


def repeated(x):
    """Double x as long as it is small."""
    return lax.while_loop(lambda x: x.sum() < 20, lambda x: x * 2, x)


def chain(a, b, length):
    """Return a value of a that is three iterations on its way to the last carry."""

    def body(carry, _):
        first, second, _ = carry
        return (first, first * 2, second * b), None

    zeros = jnp.zeros(3)
    return lax.scan(body, (a, zeros, zeros), None, length=length)[0][2]


SHAPES = {
    # -- straight lines
    "product": lambda a, b, c: a * b,
    "identity": lambda a, b, c: {"y": b, "constant": jnp.ones(2)},
    "nothing": lambda a, b, c: jnp.arange(3.0),
    "integers alone": lambda a, b, c: (jnp.argsort(a), (b > c).sum()),
    "there and back by integers": lambda a, b, c: a.astype(jnp.int32).astype(jnp.float32) * b,
    "a predicate": lambda a, b, c: jnp.where(a > 1, b, 2 * c),
    "floor, ceil, round": lambda a, b, c: jnp.floor(a) + jnp.ceil(b) + jnp.round(c),
    "rounded beside": lambda a, b, c: jnp.floor(a) * a + jnp.rint(b),
    "sign": lambda a, b, c: jnp.sign(a) * b,
    "times zero": lambda a, b, c: 0 * a + b,
    "stopped": lambda a, b, c: lax.stop_gradient(a) * b,
    "stopped beside": lambda a, b, c: lax.stop_gradient(a * c) * b + c,
    "an index": lambda a, b, c: a[jnp.argmax(b)] * lax.dynamic_slice(c, (jnp.argmin(a),), (1,)),
    "a place to write": lambda a, b, c: a.at[jnp.argmax(b)].set(0.5).at[0].add(c[0]),
    "sorted values": lambda a, b, c: jnp.sort(a)[:2] + b[jnp.argsort(c)][:2],
    "complex numbers": lambda a, b, c: (abs(z := lax.complex(a, b) ** 2), z.real * jnp.floor(c)),
    "spectrum": lambda a, b, c: (abs(jnp.fft.rfft(a)) ** 2, jnp.fft.fft(b).real),
    "a cumulative product": lambda a, b, c: jnp.cumprod(a) + lax.cumsum(jnp.sign(b)),
    "bits": lambda a, b, c: a.view(jnp.int32).view(jnp.float32) + b,
    "barrier": lambda a, b, c: lax.optimization_barrier((a, jnp.floor(b))),
    "tagged": lambda a, b, c: tag({"first": a, "second": jnp.floor(b)}, "pair"),
    "looked up": lambda a, b, c: embedding_lookup(jnp.stack([a, b]), jnp.argsort(c) // 2),
    "solved": lambda a, b, c: jnp.linalg.solve(jnp.diag(a) + 2 * jnp.eye(3), b),
    # -- calls
    "two results": lambda a, b, c: jax.jit(lambda a, b: (jnp.sin(a) + c, jnp.floor(b)))(a, b),
    "a result is dropped": lambda a, b, c: jax.jit(lambda a, b: (jnp.sin(a), jnp.sin(b)))(a, b)[1],
    "remat": lambda a, b, c: jax.checkpoint(lambda a, b: (jnp.sin(a), jnp.ceil(b)))(a, b),
    "mapped": lambda a, b, c: jax.vmap(lambda x, y: lax.cond(y > 1, abs, jnp.sin, x))(a, b),
    "derivative inside": lambda a, b, c: jax.grad(lambda x: (x**3 * b + c).sum())(a),
    "tangent inside": lambda a, b, c: jax.jvp(jnp.sin, (a,), (b,))[1],
    # -- conds: any branch connects, taken or not
    "cond": lambda a, b, c: lax.cond(c[0] > 0, lambda: jnp.sin(a), lambda: jnp.cos(b)),
    "switch by a number": lambda a, b, c: lax.switch(
        2 + c.sum().astype(jnp.int32) * 0, [lambda: a, lambda: 2 * a, lambda: b]
    ),
    "cond with two results": lambda a, b, c: lax.cond(
        c[0] > 0, lambda: (b, jnp.floor(a)), lambda: (a * b, jnp.round(a))
    ),
    "cond of rounded values": lambda a, b, c: (
        lax.cond(c[0] > 0, lambda a: jnp.floor(a), lambda a: jnp.ceil(a), a) * b
    ),
    # -- scans
    "carry and xs": lambda a, b, c: lax.scan(lambda carry, x: (carry * a + x, carry), b, c),
    "results of xs": lambda a, b, c: lax.scan(lambda carry, x: (carry + 1, jnp.sin(x)), a, b)[1],
    "overwritten": lambda a, b, c: lax.scan(lambda carry, _: (b, None), a, None, length=2)[0],
    "no iteration": lambda a, b, c: lax.scan(lambda x, _: (x * b, None), a, None, length=0)[0],
    "backwards": lambda a, b, c: (
        lax.scan(lambda carry, x: (carry + x, carry), 0.0, a, reverse=True)[1] * b
    ),
    "scan that rounds": lambda a, b, c: lax.scan(
        lambda carry, x: (jnp.floor(carry) + x, None), a, (b * 2)[None]
    )[0],
    "fori_loop of known length": lambda a, b, c: lax.fori_loop(0, 3, lambda i, x: x * a + b[i], c),
    "chain of carries": lambda a, b, c: chain(a, b, 4),
    "too short for its chain": lambda a, b, c: chain(a, b, 1),
    # -- whiles
    "while condition": lambda a, b, c: (
        lax.while_loop(lambda n: n < a.sum() * 100, lambda n: n + 500, 0.0) * b
    ),
    "while and then rounded": lambda a, b, c: jnp.floor(repeated(a)) + a * b,
    "while and then dropped": lambda a, b, c: (repeated(a), a * b)[1],
    "while of a stopped value": lambda a, b, c: repeated(lax.stop_gradient(a)) * b,
    # -- custom rules
    "relu": lambda a, b, c: jax.nn.relu(a - 1) * jax.nn.softplus(b),
    "custom rule in a scan": lambda a, b, c: lax.scan(
        lambda x, y: (jax.nn.relu(x * y), None), a, b
    )[0],
}
STRUCTURE = {name: {} for name in SHAPES} | {
    "sign": {"a": True},  # a float function, flat as it is
    "times zero": {"a": True},  # a product with zero is a product
    "stopped": {"a": False},  # stop_gradient changes no value
    "stopped beside": {"a": False},
    "a cumulative product": {"b": True},  # by sign
    "bits": {"a": False},  # through integers nothing passes, whatever their bits say
    "cond": {"b": True},
    "switch by a number": {"a": True},
    "cond with two results": {"a": True},
    "overwritten": {"a": True},  # with no iteration, the initial carry is the result
    "no iteration": {"b": True},
    "scan that rounds": {"a": True},  # as an initial carry
    "while of a stopped value": {"a": False},
    "too short for its chain": {"a": True, "b": True},  # the trip count is ignored
}


def shape(**structure):
    """Enter a shape; `a=True` or `a=False` where structure decides whether a is connected."""

    def enter(fn):
        SHAPES[fn.__name__] = fn
        STRUCTURE[fn.__name__] = structure
        return fn

    return enter


@shape()
def call_in_a_call(a, b, c):
    inner = jax.jit(lambda a, b: (b, lax.stop_gradient(a) * 0))
    return jax.jit(lambda a, b: inner(a, b)[0] * 3)(a, b)


@shape(b=True)
def cond_in_a_call_in_a_cond(a, b, c):
    inner = jax.jit(lambda: lax.cond(a[0] > 0, lambda: a * 2, lambda: b + jnp.floor(c)))
    return lax.cond(a[1] > 0, inner, lambda: a)


@shape(b=True)
def scan_in_a_cond_in_a_scan(a, b, c):
    def product(carry):
        return lax.scan(lambda carry, y: (carry * y, None), carry, a)[0]

    def outer(carry, x):
        return lax.cond(x > 0, product, lambda carry: carry + b[0], carry), None

    return lax.scan(outer, 1.0, jnp.floor(c) + 1)[0]


@shape()
def scan_that_counts(a, b, c):
    def body(carry, x):
        n, total = carry
        return (n + (x > 1).astype(jnp.int32), total + b[0]), n

    (n, total), ns = lax.scan(body, (0, 0.0), a)
    return total * n.astype(jnp.float32), ns


@shape()
def while_of_integers(a, b, c):
    n = lax.while_loop(lambda n: n < 5, lambda n: n * 2, a.sum().astype(jnp.int32) + 1)
    return n.astype(jnp.float32) * b


@shape()  # its own rule differentiates it
def while_in_a_custom_rule(a, b, c):
    doubled = jax.custom_vjp(repeated)
    doubled.defvjp(lambda x: (repeated(x), None), lambda _, g: (g * 16,))
    return doubled(a) * b


@shape(b=True)  # opaque
def custom_jvp_that_ignores(a, b, c):
    first = jax.custom_jvp(lambda a, b: a * 1)
    first.defjvp(lambda primals, tangents: (first(*primals), tangents[0]))
    return first(a, b)


@shape(a=True)  # opaque: the floor inside is not looked at
def straight_through(a, b, c):
    rounded = jax.custom_vjp(jnp.floor)
    rounded.defvjp(lambda a: (jnp.floor(a), None), lambda _, g: (g,))
    return rounded(a) * b


@shape()
def custom_rule_with_zeros(a, b, c):
    hidden = jax.custom_vjp(lambda a, n: a * n)
    hidden.defvjp(lambda a, n: (a * n, a), lambda a, g: (jnp.zeros_like(a), jnp.float32(0)))
    return hidden(a, jnp.float32(2)) + b


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
@pytest.mark.quick(8)
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
