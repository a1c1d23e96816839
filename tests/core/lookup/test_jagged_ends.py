"""First and last values, masks and lists of a `Jagged`; it is no array, and says so."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import Jagged

VALUES = np.arange(1, 21, dtype=np.float32).reshape(2, 5, 2)
SPLITS = np.array([[0, 2, 2, 3], [0, 0, 0, 5]], np.int32)
PLACES = [(s, *ends) for s in range(2) for ends in itertools.pairwise(SPLITS[s])]
"""The part, the first and the end of each sequence."""
SEQUENCES = [VALUES[s, first:end] for s, first, end in PLACES]


def jagged():
    return Jagged(jnp.asarray(VALUES), jnp.asarray(SPLITS))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_an_empty_sequence_has_no_neighbours_value(wrap):
    first, last = wrap(lambda x: (x.first(), x.last()))(jagged())
    zeros = np.zeros(2, np.float32)
    expected = [(rows[0], rows[-1]) if len(rows) else (zeros, zeros) for rows in SEQUENCES]
    np.testing.assert_array_equal(first, [one for one, _ in expected])
    np.testing.assert_array_equal(last, [one for _, one in expected])


def test_replicas_are_mapped():
    firsts = jax.vmap(lambda part: part.first() + part.last())(jagged())
    assert firsts.shape == (2, 3, 2)
    np.testing.assert_array_equal(firsts.reshape(-1, 2), jagged().first() + jagged().last())


def test_derivatives_are_those_of_the_values():
    given = np.arange(12, dtype=np.float32).reshape(6, 2)
    gradient = jax.grad(lambda v: (jagged().with_values(v).last() * given).sum())(jagged().values)
    expected = np.zeros_like(VALUES)
    for (s, first, end), number in zip(PLACES, given, strict=True):
        expected[s, first:end][-1:] = number
    np.testing.assert_array_equal(gradient, expected)


def test_values_attend_to_those_before_them_in_their_sequence():
    expected = np.zeros((2, 5, 5), bool)
    for s, first, end in PLACES:
        for i in range(first, end):
            expected[s, i, first : i + 1] = True
    np.testing.assert_array_equal(jagged().attention_mask(), expected)


def test_lists_have_the_values_of_each_example(refused):
    for rows, expected in zip(jagged().to_list(), SEQUENCES, strict=True):
        np.testing.assert_array_equal(rows, expected)
    in_jit = jax.jit(lambda x: x.to_list())
    refused(r"to_list: .*got a tracer; .*to_padded", in_jit, jagged(), error=TypeError)


COMPUTES = {
    "times": lambda x: x * 2,
    "reversed": lambda x: 2 + x,
    "minus": lambda x: -x,
    "NumPy": lambda x: np.ones(2) + x,
    "JAX": lambda x: jnp.ones(2) * x,
    "tanh": jnp.tanh,
    "exp": np.exp,
    "asarray": np.asarray,
    "jnp.asarray": jnp.asarray,
}


@pytest.mark.parametrize("compute", COMPUTES)
def test_it_is_not_taken_for_an_array(compute):
    with pytest.raises(TypeError, match=None if compute == "exp" else "with_values"):
        COMPUTES[compute](jagged())  # NumPy says it in its words
