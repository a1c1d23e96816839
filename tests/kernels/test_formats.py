"""How rows are stored in an array: shapes, and unpacking returns what was packed."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import parametrize_pairs

from tpu_embed.kernels.formats import LINE, RowFormat, packing_of
from tpu_embed.kernels.storage import narrowed, stored_dtype


@pytest.mark.parametrize(
    ("packing", "kinds"),
    [
        ("none", [None, "cpu", "NVIDIA H100"]),
        ("lanes", ["TPU v4", "TPU v5 lite"]),
        ("words", ["TPU v5", "TPU v6 lite", "TPU7x"]),
    ],
)
def test_the_chip_decides(packing, kinds):
    for kind in kinds:
        assert packing_of(kind and SimpleNamespace(device_kind=kind)) == packing


@pytest.mark.parametrize(
    ("packing", "dim", "dtype", "words"),
    [
        ("words", 1, "float32", 16),
        ("words", 20, "float32", 32),
        ("words", 33, "bfloat16", 32),
        ("words", 200, "float32", 208),
        ("words", 1025, "float32", 1152),
        ("lanes", 1, "float32", 32),
        ("lanes", 20, "float32", 32),
        ("lanes", 128, "bfloat16", 64),
    ],
)
def test_rows_lie_in_lines(packing, dim, dtype, words):
    form = RowFormat((dim,), jnp.dtype(dtype), packing)
    assert form.words == words
    assert form.array(128).shape == (words, LINE)
    assert form.array(128).dtype.itemsize == 4
    # A row of whole lines is below the other.
    assert RowFormat((200,), np.dtype(np.float32), "lanes").array(6).shape == (6, 256)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), "float32"), ((4,), "float64"), ((4,), "bool"), ((0,), "float32")]
)
@pytest.mark.parametrize("packing", ["words", "lanes"])
def test_what_is_no_row_of_words_stays(packing, shape, dtype):
    form = RowFormat(shape, jnp.dtype(dtype), packing)
    assert not form.packed
    assert form.array(7).shape == (7, *shape)


@pytest.mark.parametrize(
    ("shape", "dtype", "packing", "moved"),
    [
        ((5,), "float32", "words", True),
        ((), "float32", "words", True),
        ((), "bfloat16", "words", False),
        ((5,), "float64", "words", False),
        ((5,), "float32", "lanes", False),
    ],
)
def test_sparse_cores_move_rows_of_words_and_numbers(shape, dtype, packing, moved):
    assert RowFormat(shape, jnp.dtype(dtype), packing).moved_by_sparse_cores == moved


@parametrize_pairs(
    packing=["words", "lanes", "none"],
    dtype=["float32", "bfloat16", "int32"],
    shape=[(1,), (7,), (16,), (128,), (200,), (2, 3)],
)
@pytest.mark.quick(3)
def test_packed_rows_come_back(packing, dtype, shape):
    form = RowFormat(shape, jnp.dtype(dtype), packing)
    rows = np.random.default_rng(0).integers(0, 2**16, (5, *shape)).astype(stored_dtype(dtype))
    packed = form.pack(jnp.asarray(rows))
    assert packed.shape[1:] == ((form.words,) if form.packed else shape)
    np.testing.assert_array_equal(form.unpack(packed), rows)
    np.testing.assert_array_equal(form.unpack(np.asarray(packed)), rows)


def test_an_exchange_sends_lines_where_they_divide():
    form = RowFormat((16,), np.dtype(np.float32), "words")
    rows = jnp.arange(64 * 16.0).reshape(64, 16)
    assert form.for_exchange(rows, 4).shape == (4, 2, LINE)
    assert form.for_exchange(rows[:12], 4).shape == (4, 3, 16)
    assert RowFormat((16,), np.dtype(np.float32)).for_exchange(rows, 4).shape == (4, 16, 16)


@pytest.mark.parametrize("packing", ["none", "lanes", "words"])
@pytest.mark.parametrize("dim", [1, 32, 33, 200])
@pytest.mark.quick(2)
def test_rows_rounded_while_they_are_packed_are_those_packed_after(packing, dim):
    form = RowFormat((dim,), jnp.dtype("bfloat16"), packing)
    rows = np.random.default_rng(dim).normal(size=(7, dim)).astype(np.float32)
    rows[2, :1] = np.nan
    narrow = narrowed(jnp.asarray(rows))
    rounded = jax.jit(form.pack_rounded)(rows)
    np.testing.assert_array_equal(rounded, jax.jit(form.pack)(narrow))
    np.testing.assert_array_equal(form.unpack(np.asarray(rounded)), narrow)
