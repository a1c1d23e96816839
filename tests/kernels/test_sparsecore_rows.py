"""Rows that are read and rounded on SparseCores, as far as a CPU can run them."""

import functools

import bfloat16_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sparsecore_interpreter import CHUNK, WORKERS, compiled, mesh_of

from tpu_embed.kernels import sparsecore_rows, sparsecore_subcore, storage
from tpu_embed.kernels.formats import RowFormat

READ, ROWS = 200, 90
"""12 chunks and a half: two of four workers have four, and two have three."""


def special(seed, shape):
    """Return float32 numbers of all kinds: any bits, and ties between two neighbours."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, shape, np.uint32)
    ends = rng.choice([0, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFF800001, 0x7F7FFFFF], shape)
    ties = (bits & 0xFFFF0000) | 0x8000
    kind = rng.integers(0, 3, shape)
    return np.choose(kind, [bits, ties, ends]).astype(np.uint32).view(np.float32)


def test_every_upper_half_is_rounded_as_xla_rounds():
    """With lower halves on both sides of a tie, and each beside a number of another kind."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (upper[None] | lower[:, None]).view(np.float32)
    words = np.asarray(jax.jit(sparsecore_subcore.pack_words)(x, x[:, ::-1]))
    expected = bfloat16_cases.rounded(x)
    np.testing.assert_array_equal(words & 0xFFFF, expected)
    np.testing.assert_array_equal(words >> 16, expected[:, ::-1])
    alone = np.asarray(jax.jit(sparsecore_subcore.pack_words, static_argnums=1)(x, None))
    np.testing.assert_array_equal(alone, expected)

    @jax.jit
    def stored(x):
        """Round there and back, which XLA must not drop."""
        narrow, encoded = storage.narrowed(x), storage.encode(x, "bfloat16")
        return (narrow, encoded), (storage.widened(narrow), storage.decode(encoded, "bfloat16"))

    (narrow, encoded), wide = stored(x)
    assert narrow.dtype == encoded.dtype == storage.stored_dtype("bfloat16") == np.uint16
    np.testing.assert_array_equal(narrow, expected)
    kept = ~np.isnan(x)
    np.testing.assert_array_equal(np.asarray(encoded)[kept], expected[kept])
    assert [one.dtype for one in wide] == [jnp.float32, jnp.bfloat16]
    for one in wide:
        wanted = (expected.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(np.asarray(one).astype(np.float32), wanted)


@st.composite
def row_ids(draw):
    """Return row numbers, some chunks with absent rows among them, and some without."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    absent = draw(st.sampled_from([0, 0.02, 0.9, 1]))
    outside = rng.choice([-1, -9, ROWS, 2**31 - 1], READ)
    rows = rng.integers(0, ROWS, READ)
    return np.where(rng.random(READ) < absent, outside, rows).astype(np.int32)


@pytest.mark.parametrize(("dim", "late"), [(40, False), (40, True), (16, True), (40, "rows")])
@pytest.mark.quick(1)
def test_rows_are_rounded_and_packed(dim, late):
    """40 numbers are 48 words, or 32 rounded; 16 are 16, of which the upper halves are zeros."""
    form, sent = (RowFormat((dim,), np.dtype(x), "words") for x in (np.float32, jnp.bfloat16))
    rows = special(0, (ROWS, dim))
    table = np.pad(rows, ((0, 0), (0, form.words - dim)))
    read = functools.partial(sparsecore_rows.gather_rounded_rows, words=sent.words)
    done = compiled(read, table, np.zeros(READ, np.int32), late=late)

    @example(np.arange(READ, dtype=np.int32) % ROWS)
    @given(row_ids())
    def test(ids):
        present = (ids >= 0) & (ids < ROWS)
        expected = bfloat16_cases.packed(rows, sent.words)[np.where(present, ids, 0)]
        np.testing.assert_array_equal(done(table, ids), np.where(present[:, None], expected, 0))

    test()


@pytest.mark.parametrize("chunks", [1, 2, WORKERS, 2 * WORKERS + 1])
@pytest.mark.whole
def test_workers_with_no_one_or_more_chunks(chunks):
    rows, ids = special(1, (ROWS, 16)), np.arange(chunks * CHUNK, dtype=np.int32)[::-1] % ROWS
    read = functools.partial(sparsecore_rows.gather_rounded_rows, words=16)
    found = compiled(read, rows, ids, late=True)(rows, ids)
    np.testing.assert_array_equal(found, bfloat16_cases.packed(rows, 16)[ids])


def test_no_rows_are_no_kernel():
    with jax.sharding.use_abstract_mesh(mesh_of("TPU v6 lite")):
        none, one = jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32)
        read = sparsecore_rows.gather_rounded_rows
        assert read(jnp.ones((4, 32)), none, 16).shape == (0, 16)
        np.testing.assert_array_equal(read(jnp.ones((0, 32)), one, 16), np.zeros((1, 16)))
