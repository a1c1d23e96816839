"""What gradients() treats as connected, for each kind of control flow, against perturbed inputs.

Each case is a function of three vectors. Brute force moves an input a little in both directions. If
an output moves, the gradient must exist and be that of `jax.grad`; if none moves, it must be None.
In a few cases connection is decided by structure; each says what is expected, and why.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_shapes import NAMES, POINT, SHAPES, STRUCTURE

from tpu_embed.training import gradients

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
