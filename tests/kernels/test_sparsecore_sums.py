"""Sums on SparseCores, as far as a CPU can run them."""

import functools

import bfloat16_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import sums_of
from sparsecore_interpreter import CHUNK, WORKERS, compiled, mesh_of

from tpu_embed.kernels import dispatch, reference, sparsecore_sums
from tpu_embed.kernels.formats import RowFormat
from tpu_embed.kernels.operands import RowsToSum, SumLayout

ENTRIES, SUMS, ROWS, COLUMNS = 200, 40, 30, 48
"""A share of 50 entries, for one of 4 workers, is 3 or 4 chunks; the last chunk is half."""


def numbers(seed):
    """Return rows and weights, negative zeros among them."""
    rng = np.random.default_rng(seed)
    source = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    source[rng.random(source.shape) < 0.1] = -0.0
    return source, rng.normal(size=ENTRIES).astype(np.float32)


def loops(source, index, segments, weights):
    """Return the sums in float64."""
    sums, kept = (
        np.zeros((SUMS, source.shape[1])),
        (segments < SUMS) & (index >= 0) & (index < ROWS),
    )
    products = weights[kept, None].astype(np.float64) * source[index[kept]]
    np.add.at(sums, segments[kept], products)
    return sums


REFERENCE = jax.jit(functools.partial(sums_of, reference.gather_sum, bags=(SUMS,)))


def in_order(source, index, segments, weights=None):
    """Return the sums of the reference."""
    return np.asarray(REFERENCE(source, index, segments, weights)[0])


@st.composite
def entries(draw):
    """Return row numbers, absent ones among them, and segments: gaps, long runs, left out ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    absent = draw(st.sampled_from([0, 0.1, 0.9, 1]))
    index = rng.integers(0, ROWS, ENTRIES)
    outside = rng.choice([-1, -7, ROWS, 2**31 - 1], ENTRIES)
    index = np.where(rng.random(ENTRIES) < absent, outside, index).astype(np.int32)
    low, high = draw(st.sampled_from([(0, SUMS), (0, 2 * SUMS), (3, 6), (7, 8), (SUMS, SUMS + 2)]))
    return index, np.sort(rng.integers(low, high, ENTRIES)).astype(np.int32)


FILL = np.arange(ENTRIES, dtype=np.int32)
CASES = [
    (FILL % ROWS, 0 * FILL + 5),  # one segment has everything
    (FILL % ROWS, FILL // CHUNK),  # segments end with chunks
    (FILL % ROWS, FILL // (ENTRIES // WORKERS)),  # segments end with shares
    (FILL % ROWS, FILL),
    (FILL % ROWS, np.digitize(FILL, [20, 170]).astype(np.int32)),  # a segment over three workers
    (0 * FILL - 1, FILL // 7),  # all absent
    (FILL % ROWS, 0 * FILL + SUMS),  # all left out
]


def with_cases(test):
    """Run a property test with every named case too."""
    for case in CASES:
        test = example(case)(test)
    return test


@pytest.mark.parametrize(
    ("late", "filled"), [(True, True), (False, False)], ids=["late, all sums", "early, of entries"]
)
@pytest.mark.quick(1)
def test_unweighted_sums_have_the_bits_of_the_reference(late, filled):
    source, _ = numbers(0)
    run = functools.partial(sparsecore_sums.gather_sum, num_segments=SUMS, filled=filled)
    sums = compiled(run, source, FILL, FILL, late=late)

    @with_cases
    @given(entries())
    def test(case):
        found, expected = np.asarray(sums(source, *case)), in_order(source, *case)
        read = np.full(SUMS, True) if filled else np.isin(np.arange(SUMS), case[1])
        assert np.isnan(found[~read]).all(), "nobody writes the others"
        np.testing.assert_array_equal(found[read].view(np.uint32), expected[read].view(np.uint32))

    test()


@pytest.mark.parametrize(
    ("dim", "late", "filled", "weighted"),
    [(5, False, True, False), (COLUMNS, True, True, True), (40, True, False, False)],
)
@pytest.mark.quick(1)
def test_rounded_sums_are_those_of_the_reference_rounded_once(dim, late, filled, weighted):
    """Whatever stands behind the columns that count: 40 of 48 here, packed in 32 words.

    Weights are powers of two: their products round nowhere.
    """
    sent = RowFormat((dim,), np.dtype(jnp.bfloat16), "words")
    source, _ = numbers(3)
    source = source[:, : RowFormat((dim,), np.dtype(np.float32), "words").words]
    source[:, dim:] = np.nan
    source[:2, :dim] = [[np.inf], [np.nan]]
    weights = (2.0 ** np.random.default_rng(5).integers(-2, 3, ENTRIES)).astype(np.float32)
    weights = {"weights": weights} if weighted else {}
    options = {"row_format": sent, "num_segments": SUMS, "filled": filled}

    def run(source, index, segments, weights):
        return sparsecore_sums.rounded_gather_sum(source, index, segments, **options, **weights)

    sums = compiled(run, source, FILL, FILL, weights, late=late)

    @with_cases
    @given(entries())
    def test(case):
        found = np.asarray(sums(source, *case, weights))
        expected = bfloat16_cases.packed(in_order(source[:, :dim], *case, **weights), sent.words)
        read = np.full(SUMS, True) if filled else np.isin(np.arange(SUMS), case[1])
        np.testing.assert_array_equal(found[read], expected[read])

    test()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.whole
def test_weighted_sums(dtype):
    """Of both kinds of rows; rows of float32 also have weights where they are padded, below."""
    source, weights = numbers(1)
    stored = source.astype(jnp.dtype(dtype))
    form = RowFormat((COLUMNS,), np.dtype(jnp.dtype(dtype)), "words")
    bits = stored if dtype == "float32" else stored.view(np.uint16)
    packed = np.asarray(form.pack(jnp.asarray(bits)))

    def weighted(packed, index, segments, weights):
        return sparsecore_sums.gather_sum(packed, index, segments, SUMS, weights=weights)

    sums = compiled(weighted, packed, FILL, FILL, weights, late=True)

    @with_cases
    @given(entries())
    def test(case):
        index, segments = case
        # An absent row's weight must not matter.
        given = np.where((index >= 0) & (index < ROWS), weights, np.float32(np.nan))
        found = np.asarray(sums(packed, index, segments, given))
        expected = loops(stored.astype(np.float32), index, segments, weights)
        # XLA's CPU compiler may join a multiplication and an addition, which then round once; up
        # to 200 products of about 1 are added in float32.
        np.testing.assert_allclose(found[:, :COLUMNS], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[:, COLUMNS:], 0)

    test()


@pytest.mark.whole
def test_long_rows_are_cut_and_joined(monkeypatch):
    """Each piece is summed by itself, here by the reference."""

    def sum_pieces(source, bounds, entries, result, filled):
        (index, segments), num_segments = entries, result.shape[0]
        upper = source >> 16 if source.dtype == jnp.uint32 else source[:, :0]
        lower = source & 0xFFFF if source.dtype == jnp.uint32 else source
        rows = jnp.concatenate([lower, upper], axis=1).astype(jnp.float32)
        options = {"bags": (num_segments,)}
        return sums_of(reference.gather_sum, rows, index, segments, None, **options)[0]

    monkeypatch.setattr(sparsecore_sums, "_sum_pieces", sum_pieces)
    monkeypatch.setattr(sparsecore_sums, "_workers_here", lambda: WORKERS)
    monkeypatch.setattr(sparsecore_sums, "MOST_WORDS", 32 * 16)
    index, segments = (jnp.asarray(x) for x in CASES[1])
    index = index.at[::5].set(-1).at[1::5].set(ROWS)
    for halves in (1, 2):
        source = np.arange(ROWS * COLUMNS * halves).reshape(ROWS, -1)
        packed = source[:, :COLUMNS] | source[:, COLUMNS:] << 16 if halves == 2 else source
        rows = jnp.asarray(packed, jnp.uint32 if halves == 2 else jnp.float32)
        found = sparsecore_sums.gather_sum(rows, index, segments, SUMS)
        np.testing.assert_array_equal(found, in_order(source.astype(np.float32), index, segments))


def test_nothing_to_sum_is_no_kernel():
    rows, none, one = jnp.ones((4, 16)), jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32)
    form = RowFormat((16,), np.dtype(jnp.bfloat16), "words")
    with jax.sharding.use_abstract_mesh(mesh_of("TPU v6 lite")):
        for found, shape in (
            (sparsecore_sums.gather_sum(rows, none, none, 3), (3, 16)),
            (sparsecore_sums.gather_sum(rows, one, one, 0), (0, 16)),
            (sparsecore_sums.rounded_gather_sum(rows, none, none, form, 0), (0, 16)),
            (sparsecore_sums.rounded_gather_sum(rows, none, none, form, 3), (3, 16)),
            (sparsecore_sums.gather_sum(jnp.zeros((0, 16), jnp.uint32), one, one, 2), (2, 32)),
        ):
            np.testing.assert_array_equal(found, np.zeros(shape))


@pytest.mark.whole
def test_rows_of_any_width_sum_and_differentiate_through_the_dispatch():
    """20 columns are padded, stored bfloat16 is packed, and features come after."""
    rng, bags = np.random.default_rng(2), (SUMS // 4, SUMS // 4 * 3)
    source, weights = numbers(2)
    source = source[:, :20]
    bits = source.astype(jnp.bfloat16).view(np.uint16)
    index = rng.integers(-3, ROWS + 3, ENTRIES)  # int64
    segments = np.sort(rng.integers(0, SUMS + 3, ENTRIES)).astype(np.int32)
    gains = [rng.normal(size=(b, 20)).astype(np.float32) for b in bags]

    def outcome(kernel, source, bits, index, segments, weights):
        def loss(source, weights):
            sums = sums_of(kernel, source, index, segments, weights, bags=bags)
            return sum(jnp.vdot(x, gain) for x, gain in zip(sums, gains, strict=True)), sums

        gradients, sums = jax.grad(loss, (0, 1), has_aux=True)(source, weights)
        plain = sums_of(kernel, bits, index, segments, bags=bags)
        # Packed already, as an exchange in bfloat16 brings them: what is packed is summed.
        words = RowFormat((20,), jnp.dtype(jnp.bfloat16), "words").pack(bits)
        other = bits if kernel is reference.gather_sum else jnp.zeros_like(bits)
        given = RowsToSum(other, index, segments, packed=words)
        return sums, gradients, (*plain, *kernel(given, SumLayout(bags=bags)))

    with jax.enable_x64(True):
        operands = source, bits, index, segments, weights
        sparse = functools.partial(outcome, dispatch.gather_sum)
        found = compiled(sparse, *operands, late=False)(*operands)
        expected = jax.jit(functools.partial(outcome, reference.gather_sum))(*operands)
    # The products may be joined with additions, as in `test_weighted_sums`.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, found, expected)
    assert [x.shape for x in found[0]] == [(b, 20) for b in bags]
    jax.tree.map(np.testing.assert_array_equal, found[2], expected[2])
