"""The SparseCore kernels as far as a CPU can run them; the indirect DMA is replaced.

`tests/tpu` compiles them unchanged.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from sparsecore_interpreter import mesh_of, over_rows

from tpu_embed.kernels import reference, sparsecore


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernels in Pallas' TPU interpreter, with plain copies for the indirect DMA."""

    def one(i):
        return pl.ds(i, 1)

    def read(table, ids, found):
        over_rows(ids, lambda row, i: pltpu.sync_copy(table.at[one(row)], found.at[one(i)]))

    def write(given, ids, table):
        over_rows(ids, lambda row, i: pltpu.sync_copy(given.at[one(i)], table.at[one(row)]))

    kernel = functools.partial(pl.kernel, interpret=pltpu.InterpretParams())
    monkeypatch.setattr(pl, "kernel", kernel)
    monkeypatch.setattr(sparsecore, "_read_present", read)
    monkeypatch.setattr(sparsecore, "_write_present", write)


def run(f, *operands):
    """Run on a CPU what was traced for SparseCores."""
    with jax.sharding.use_abstract_mesh(mesh_of("TPU v6 lite")):
        lowered = jax.jit(f).trace(*operands).lower(lowering_platforms=("cpu",))
        takes = inspect.signature(lowered.compile).parameters  # of JAX 0.11 and later
        where = {"device_assignment": tuple(jax.devices()[:1])}
        return lowered.compile(**{k: v for k, v in where.items() if k in takes})(*operands)


@pytest.mark.parametrize("row", [pytest.param((48,), marks=pytest.mark.whole), ()], ids=str)
def test_rows_are_read_and_written(interpreted, row):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(70, *row)).astype(np.float32)
    rows = np.array([69, -1, 0, 5, 70, 64, 2**31 - 1, *range(10, 20), 3], np.int32)
    values = rng.normal(size=(len(rows), *row)).astype(np.float32)  # 18: the last chunk is padded

    def both(table, rows, values):
        return sparsecore.gather_rows(table, rows), sparsecore.set_rows(table, rows, values)

    operands = jnp.asarray(table), jnp.asarray(rows), jnp.asarray(values)
    found, new = run(both, *operands)
    np.testing.assert_array_equal(found, reference.gather_rows(*operands[:2]))
    np.testing.assert_array_equal(new, reference.set_rows(*operands))


def test_no_rows_are_no_kernel():
    table = jnp.ones((4, 16))
    none = jnp.zeros(0, jnp.int32)
    assert sparsecore.gather_rows(table, none).shape == (0, 16)
    assert sparsecore.set_rows(table, none, jnp.zeros((0, 16))) is table


@given(st.integers(1, 400), st.lists(st.integers(-2, 12), min_size=9, max_size=9))
@pytest.mark.whole
def test_long_rows_are_cut_into_pieces_that_fit(vectors, rows):
    words = 16 * vectors
    table = np.broadcast_to(np.zeros((10, 1), np.float32), (10, words))
    cuts = sparsecore._cuts(table)
    assert words % cuts == 0
    assert (words // cuts) % sparsecore.WORDS == 0
    assert 16 * words // cuts <= sparsecore.MOST_WORDS
    pieces = np.arange(10 * cuts).reshape(10, cuts)
    wanted = [pieces[r] if 0 <= r < 10 else np.full(cuts, -1) for r in rows]
    numbers = sparsecore._piece_numbers(table, jnp.asarray(rows, jnp.int32))
    np.testing.assert_array_equal(numbers, np.concatenate(wanted))


@given(st.integers(1, 10_000), st.sampled_from([(), (16,), (128,), (144,), (1024,)]))
def test_a_chunk_fits_and_divides_where_it_can(n, row):
    chunk = sparsecore._rows_at_a_time(n, row)
    assert 16 <= chunk <= 128
    assert chunk % 16 == 0
    assert not row or chunk * row[0] <= sparsecore.MOST_WORDS
    if n % 16 == 0:
        assert n % chunk == 0
