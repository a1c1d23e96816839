"""The compiled CPU kernels give the bits of the reference, and touch only their own rows."""

import functools

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import BAGS, DIMS, REFERENCE_SUMS, assert_same_bits, draw_sums, sums_of

from tpu_embed.kernels import cpu, dispatch, reference

if cpu.load().path is None:
    pytest.skip(f"compiled library: {cpu.load().why_not}", allow_module_level=True)

INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)


@pytest.fixture
def x64():
    """Let arrays have 64 bits."""
    with jax.enable_x64(True):
        yield


# -- rows ------------------------------------------------------------------------------------------

ROWS = {
    "float32": (np.float32, (64,)),
    "bfloat16": (np.uint16, (33,)),
    "int32": (np.int32, (5,)),
    "int8": (np.int8, (3,)),
    "bool": (np.bool_, (7,)),
    "float64": (np.float64, (16,)),
    "one number a row": (np.float32, ()),
    "two axes": (np.float32, (2, 5)),
}


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (5, 7), (3_000_001,), (90_001, 33)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
@pytest.mark.quick(5)
def test_zeros_in_memory_that_was_used(shape, dtype):
    """Of a few bytes, and of several large pages with parts of pages around them."""
    used = [jnp.full(shape, 1, dtype) for _ in range(3)]
    jax.block_until_ready(used)
    del used
    made = jax.jit(lambda: cpu.zeros(shape, dtype))()
    assert (made.shape, made.dtype) == (shape, dtype)
    assert not np.asarray(made).any()


def table_of(rng, rows, dtype, trailing):
    """Return a table of random bytes: NaNs of all kinds too."""
    if dtype == np.bool_:
        return rng.integers(0, 2, (rows, *trailing)).astype(bool)
    size = rows * int(np.prod(trailing)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(rows, *trailing)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("row_type", [np.int32, np.int64])
@pytest.mark.parametrize("n", [1, 4000])
@pytest.mark.quick(8)
def test_gather_rows(x64, kind, row_type, n):
    rng = np.random.default_rng(n)
    table = table_of(rng, 50, *ROWS[kind])
    rows = cases.row_numbers(rng, 50, n, row_type)
    found = np.asarray(jax.jit(cpu.gather_rows)(table, rows))
    expected = np.asarray(jax.jit(reference.gather_rows)(table, rows))
    assert found.dtype == expected.dtype == table.dtype
    assert found.tobytes() == expected.tobytes()
    present = (rows >= 0) & (rows < 50)
    assert found[present].tobytes() == table[rows[present]].tobytes()
    assert not found[~present].any()


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("row_type", [np.int32, np.int64])
@pytest.mark.quick(4)
def test_set_rows(x64, kind, row_type):
    rng = np.random.default_rng(2)
    table, values = (table_of(rng, n, *ROWS[kind]) for n in (3000, 2000))
    absent = cases.row_numbers(rng, 3000, 2000, row_type)
    rows = np.where((absent < 0) | (absent >= 3000), absent, rng.permutation(3000)[:2000])
    rows, held = rows.astype(row_type), jnp.array(table)
    place = held.unsafe_buffer_pointer()
    found = jax.jit(cpu.set_rows, donate_argnums=0)(held, rows, values)
    assert found.unsafe_buffer_pointer() == place
    expected = jax.jit(reference.set_rows)(table, rows, values)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    assert np.asarray(found).tobytes() != table.tobytes()


def test_set_rows_leaves_a_table_that_is_not_donated():
    table = jnp.zeros((8, 4))
    new = jax.jit(cpu.set_rows)(table, jnp.array([3]), jnp.ones((1, 4)))
    assert (float(table.sum()), float(new.sum())) == (0.0, 4.0)


# -- sort ------------------------------------------------------------------------------------------

NATIVE_SORT = jax.jit(cpu.sort_rows)
MANY = 20_000
"""Enough entries for chunks sorted in parallel."""


def check_sort(rows):
    ordered, order = NATIVE_SORT(rows)
    expected = np.argsort(rows, kind="stable")
    assert (ordered.dtype, order.dtype) == (rows.dtype, np.int32)
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(ordered, rows[expected])


@pytest.mark.parametrize("limits", [INT32, INT64], ids=["32 bits", "64 bits"])
@settings(max_examples=50)
@given(data=st.data())
def test_sort_few_rows(limits, data):
    numbers = st.integers(limits.min, limits.max) | st.integers(-2, 3)
    rows = data.draw(st.lists(numbers, min_size=16, max_size=16))
    with jax.enable_x64(True):
        check_sort(np.array(rows, limits.dtype))


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(0, 63), st.booleans(), st.sampled_from([INT32, INT64]))
def test_sort_many_rows(seed, bits, extreme, limits):
    """Spans from one number to all; the least and the largest number among them."""
    rng, half = np.random.default_rng(seed), 2 ** min(bits, limits.bits - 1) // 2
    rows = rng.integers(-half, half, MANY, endpoint=half == 0, dtype=np.int64)
    if extreme:
        rows[rng.integers(0, MANY, 4)] = [limits.min, limits.max, limits.min, limits.max]
    with jax.enable_x64(True):
        check_sort(rows.astype(limits.dtype))


@pytest.mark.parametrize("n", [1, 2**14 - 1, 2**14, 2**14 + 1])
@pytest.mark.quick(2)
def test_sort_any_number_of_rows(n):
    rows = np.random.default_rng(n).integers(-1, 100, n).astype(np.int32)
    check_sort(rows)
    assert_same_bits(NATIVE_SORT(rows), reference.sort_rows(jnp.asarray(rows)))


# -- gather and sum -------------------------------------------------------------------------------

NATIVE_SUMS = jax.jit(functools.partial(cases.every_sum, cpu.gather_sum))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.quick(3)
def test_gather_sum(x64, dtype, dim):
    row_type = np.int64 if dim % 5 == 0 else np.int32
    operands = draw_sums(np.random.default_rng(dim), dim, dtype, index_type=row_type)
    found = NATIVE_SUMS(*operands)
    assert_same_bits(found, REFERENCE_SUMS(*operands))
    assert [part.shape for part in found[0]] == [(n, dim) for n in BAGS]
    assert len({np.asarray(sums[0]).tobytes() for sums in found}) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.quick(1)
def test_sums_of_every_dim(dtype):
    """Every number of vectors, and of numbers in the last one, in one program.

    Column d of the sums does not depend on the other columns, so the reference runs once.
    """
    source, index, segments, weights = draw_sums(np.random.default_rng(7), 150, dtype, n=600)
    rest = index, segments // 50, weights
    assert rest[1][-1] >= 60

    def summed(kernel, sources):
        return [sums_of(kernel, source, *rest, bags=(40, 20)) for source in sources]

    sources = [np.ascontiguousarray(source[:, :dim]) for dim in range(1, 151)]
    found = jax.jit(functools.partial(summed, cpu.gather_sum))(sources)
    (expected,) = jax.device_get(jax.jit(functools.partial(summed, reference.gather_sum))([source]))
    for dim, sums in enumerate(found, 1):
        assert_same_bits(sums, [part[:, :dim] for part in expected])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [70, 3])
@pytest.mark.parametrize("widths", [(1, 1), (7, 7), (60, 60), (3, 0, 5), (0, 2, 2)], ids=str)
@pytest.mark.quick(5)
def test_bags_of_known_widths(widths, count, dtype):
    """Where all bags of a feature are alike, the widths say what the segments say.

    Where all are as wide, it is not listed where they begin; with weights and rows of any length.
    """
    rng, dims = np.random.default_rng(sum(widths) * count), (3, 4, 16, 20, 33, 64, 130)
    bags = (3 * count, count, 2 * count)[: len(widths)]
    lengths = np.repeat(widths, bags)
    source, index, _, weights = draw_sums(rng, 130, dtype, n=lengths.sum())
    segments = np.repeat(np.arange(sum(bags), dtype=np.int32), lengths)

    @functools.partial(jax.jit, static_argnames=("kernel", "dims", "widths"))
    def summed(source, weights, kernel, dims, widths):
        rest, options = (index, segments), {"bags": bags, "widths": widths}
        return [
            [sums_of(kernel, source[:, :dim], *rest, factors, **options) for dim in dims]
            for factors in (None, weights)
        ]

    given = source, weights, cpu.gather_sum, dims, widths
    assert "tensor<0xi32>" in summed.lower(*given).as_text()  # in place of the segments
    for found, (expected,) in zip(
        summed(*given), summed(source, weights, reference.gather_sum, (130,), ()), strict=True
    ):
        for dim, sums in zip(dims, found, strict=True):
            assert_same_bits(sums, [part[:, :dim] for part in expected])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [5, 64])
@pytest.mark.quick(1)
def test_sums_of_rows_that_are_not_finite(dim, dtype):
    source, index, segments, weights = draw_sums(np.random.default_rng(4), dim, dtype)
    weights[segments % 6 == 0] = 0
    numbers = cases.widened(source).copy()
    numbers[::9, 0], numbers[1::9, 1], numbers[2::9] = np.nan, np.inf, -np.inf
    operands = (cases.stored(numbers, dtype), index, segments, weights)
    found = NATIVE_SUMS(*operands)
    assert_same_bits(found, REFERENCE_SUMS(*operands))
    assert np.isnan(found[0][0]).any()
    assert np.isinf(found[0][0]).any()
    assert not np.asarray(found[0][0])[::6].any()


def in_both_ways(monkeypatch, f, *operands):
    """Return what a function makes with compiled kernels and with the reference, and its texts."""
    results, texts = [], []
    for kernels in ("native", "reference"):
        monkeypatch.setenv(dispatch.VARIABLE, kernels)
        lowered = jax.jit(lambda *given: f(*given)).lower(*operands)  # not found in JAX's cache
        texts.append(lowered.as_text())
        results.append(lowered.compile()(*operands))
    return results, texts


def test_segment_sum(monkeypatch):
    rng = np.random.default_rng(5)
    values, segments = cases.magnitudes(rng, (4000, 20)), np.sort(rng.integers(0, 900, 4000))

    def summed(segments):
        return [dispatch.segment_sum(x, segments, 800) for x in (values, values[:, 0])]

    found, texts = in_both_ways(monkeypatch, summed, segments.astype(np.int32))
    assert_same_bits(*found)
    assert ["@tpu_embed_gather_sum" in text for text in texts] == [True, False]


@pytest.mark.parametrize("moved", [["weights"], ["source", "weights"]], ids=str)
@pytest.mark.quick(1)
def test_derivatives_are_the_references(monkeypatch, moved):
    rng = np.random.default_rng(6)
    source, index, segments, weights = draw_sums(rng, 5, "float32", n=200, tiny=False)
    operands = {"source": source, "weights": weights}
    seeds = [cases.magnitudes(rng, (n, 5)) for n in BAGS]

    def loss(moving):
        now = operands | moving
        given = now["source"], index, segments, now["weights"]
        sums = sums_of(dispatch.gather_sum, *given, bags=BAGS)
        return sum(jnp.vdot(part, seed) for part, seed in zip(sums, seeds, strict=True))

    moving = {name: operands[name] for name in moved}
    (native, expected), _ = in_both_ways(monkeypatch, jax.grad(loss), moving)
    assert_same_bits(native, expected)
    assert all(np.any(gradient) for gradient in native.values())


def test_under_vmap():
    table, rows = np.arange(12, dtype=np.float32).reshape(2, 3, 2), np.array([[2, -1], [0, 9]])
    found = jax.vmap(cpu.gather_rows)(table, rows.astype(np.int32))
    assert found.tolist() == [[[4.0, 5.0], [0.0, 0.0]], [[6.0, 7.0], [0.0, 0.0]]]
