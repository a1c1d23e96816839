"""Rows that are merged and updated on SparseCores, as far as a CPU can run them."""

import functools
import sys

import bfloat16_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sparsecore_interpreter import CHUNK, WORKERS, compiled

from tpu_embed import optimizers as o
from tpu_embed.kernels import sparsecore_rules as rules
from tpu_embed.kernels import sparsecore_update, stochastic, storage
from tpu_embed.kernels.formats import RowFormat

ENTRIES, MERGED, ROWS, DIM, WORDS = 200, 210, 300, 40, 48
"""Partial sums, room for merged ones, and rows of 40 numbers, padded to 6 vectors of 8."""
BFLOAT16 = np.dtype(jnp.bfloat16)
EXACT = {
    "sgd": o.SGD(0.1),
    "sgd that decays and clips": o.SGD(
        0.1, weight_decay_factor=0.01, clipvalue=0.5, clip_weight_min=-1.0, clip_weight_max=0.75
    ),
    "momentum": o.Momentum(0.1),
    "nesterov": o.Momentum(0.1, use_nesterov=True),
}
RULES = EXACT | {
    "adagrad": o.Adagrad(0.1),
    "adagrad, epsilon": o.Adagrad(0.1, epsilon=0.125, weight_decay_factor=0.01),
    "adam": o.Adam(0.1),
    "adam, epsilon outside": o.Adam(0.1, sum_inside_sqrt=False, epsilon=0.125),
    "row-wise": o.RowWiseAdagrad(0.1),
    "row-wise, no epsilon": o.RowWiseAdagrad(0.1, epsilon=0.0, clipvalue=0.5),
}


def held(optimizer):
    """Return a table and slots as a SparseCore has them."""
    rng = np.random.default_rng(0)
    shapes = optimizer.slot_shapes(DIM, jnp.float32).values()
    slots = [rng.uniform(0.1, 2, (ROWS, *one.shape)).astype(np.float32) for one in shapes]
    table = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    return padded(table), [padded(x) if x.ndim == 2 else x for x in slots]


def padded(rows):
    return np.pad(rows, ((0, 0), (0, WORDS - DIM)))


def drawn_sums():
    return padded(np.random.default_rng(1).normal(size=(ENTRIES, DIM)).astype(np.float32))


@st.composite
def routes(draw):
    """Return index, segments and rows: long and short segments, entries that are left out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = draw(st.sampled_from([ENTRIES, ENTRIES - 1, 3 * CHUNK, 17, 1, 0]))
    most = draw(st.sampled_from([1, 2, 9, 60]))
    segments = []
    while len(segments) < kept:
        segments += [len(set(segments))] * int(rng.integers(1, most + 1))
    return route_of(rng, segments[:kept])


def route_of(rng, segments):
    segments = np.array([*segments, *[MERGED] * (ENTRIES - len(segments))], np.int32)
    merged = len({*segments.tolist()} - {MERGED})
    rows = np.full(MERGED, -1, np.int32)
    rows[:merged] = np.sort(rng.choice(ROWS, merged, replace=False))
    if merged > 3:
        rows[merged // 2] = -1  # a row that is not to be changed
    return rng.permutation(ENTRIES).astype(np.int32), segments, rows


NUMBERS = np.arange(ENTRIES)
CASES = {
    "one row has everything": 0 * NUMBERS,
    "one by one": NUMBERS,
    "rows end with chunks": NUMBERS // CHUNK,
    "rows end with shares": NUMBERS // (ENTRIES // WORKERS),
    "a row over three workers": np.digitize(NUMBERS, [20, 170]),
    "rows of seven": NUMBERS // 7,
}
CASES = [
    route_of(np.random.default_rng(0), segments.tolist())
    for segments in (
        0 * NUMBERS,  # one row has everything
        NUMBERS,  # one by one
        NUMBERS // CHUNK,  # rows end with chunks
        NUMBERS // (ENTRIES // WORKERS),  # rows end with shares
        np.digitize(NUMBERS, [20, 170]),  # a row over three workers
        NUMBERS // 7,
    )
]


def with_cases(test):
    """Run a property test with every named case too."""
    for route in CASES:
        test = example(route)(test)
    return test


def kernel(optimizer, index, segments, rows, sums, table, slots, rate, keys=None):
    rule = optimizer.compiled_rule(jnp.int32(1), rate)
    held = table, slots, rule, DIM, keys
    return sparsecore_update.merge_update(sums, index, segments, rows, *held)


@functools.cache
def on_cpu(optimizer):
    return jax.jit(optimizer.update_rows)


def expected(optimizer, route, sums, table, slots, rate):
    """Return what the CPU's rule makes of sums that are added up in order, in float32."""
    index, segments, rows = route
    if sums.dtype == np.uint32:
        halves = np.concatenate([sums << 16, sums & 0xFFFF0000], axis=1)
        sums = halves.astype(np.uint32).view(np.float32)
    merged, kept = np.zeros((MERGED, DIM), np.float32), segments < MERGED
    np.add.at(merged, segments[kept], sums[index[kept], :DIM])
    names = optimizer.slot_shapes(DIM, jnp.float32)
    # A row is its numbers without the padding; a slot of one number per row has none.
    table, slots = table.copy(), [x.copy() for x in slots]
    at = rows[rows >= 0]
    views = [x[:, :DIM] if x.ndim == 2 else x for x in slots]
    given = {name: x[at] for name, x in zip(names, views, strict=True)}
    new, changed = on_cpu(optimizer)(table[at, :DIM], given, merged[rows >= 0], jnp.int32(1), rate)
    table[at, :DIM] = new
    for name, x in zip(names, views, strict=True):
        x[at] = changed[name]
    return table, slots


@pytest.mark.whole
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("name", [*RULES, "momentum, sums in bfloat16"])
def test_rows_and_slots_are_those_of_the_cpus_rule(name, late):
    """Two numbers of sums in bfloat16 are one word: 40 need 20 words, 32 with padding."""
    name, _, halved = name.partition(", sums")
    optimizer, sums = RULES[name], drawn_sums()
    if halved:
        bits = sums[:, :DIM].astype(jnp.bfloat16).view(np.uint16)
        sums = np.asarray(RowFormat((DIM,), BFLOAT16, "words").pack(jnp.asarray(bits)))
    table, slots = held(optimizer)
    operands = sums, table, slots, jnp.float32(0.1)
    done = compiled(functools.partial(kernel, optimizer), *CASES[1], *operands, late=late)

    @with_cases
    @given(routes())
    def test(route):
        found, new = done(*route, *operands)
        wanted, others = expected(optimizer, route, *operands)
        jax.tree.map(np.testing.assert_array_equal, new, others)
        if name in EXACT:
            np.testing.assert_array_equal(found, wanted)
            return
        # The step's own error, and two roundings of the row.
        error = np.abs(np.asarray(found, np.float64) - wanted)
        most = rules.STEP_ERROR * np.abs(wanted - table) + 2.0**-23 * np.abs(wanted)
        assert (error <= most).all()

    test()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "at_random", "dim"),
    [
        ("momentum", True, 40),
        ("sgd that decays and clips", False, 40),
        ("momentum", True, 60),
        ("adagrad, epsilon", False, 60),
        ("row-wise", True, 40),
    ],
)
def test_tables_may_be_bfloat16(name, at_random, dim, monkeypatch):
    """Two numbers to a word: 40 are 5 vectors, of which one has upper halves; 60 are 4 of each."""
    monkeypatch.setattr(sys.modules[__name__], "DIM", dim)
    monkeypatch.setattr(sys.modules[__name__], "WORDS", -(-dim // 16) * 16)
    optimizer, rate, form = RULES[name], jnp.float32(0.1), RowFormat((dim,), BFLOAT16, "words")
    table, slots = held(optimizer)
    packed = bfloat16_cases.packed(table[:, :dim], form.words)
    before = storage.widened(form.unpack(packed))
    draws = np.random.default_rng(7).integers(0, 2**32, MERGED, np.uint32)
    operands = drawn_sums(), packed, slots, rate, *((draws,) if at_random else ())
    done = compiled(functools.partial(kernel, optimizer), *CASES[1], *operands, late=True)

    @with_cases
    @given(routes())
    def test(route):
        found, new = done(*route, *operands)
        rows, others = expected(optimizer, route, operands[0], padded(before), slots, rate)
        jax.tree.map(np.testing.assert_array_equal, new, others)
        wanted, changed = np.asarray(form.unpack(packed)).copy(), route[2][route[2] >= 0]
        if at_random:
            rounded = stochastic.round_rows(rows[changed, :dim], draws[route[2] >= 0])
        else:
            rounded = bfloat16_cases.rounded(rows[changed, :dim])
        wanted[changed] = rounded
        got = np.asarray(form.unpack(np.asarray(found)))
        if name in EXACT:
            np.testing.assert_array_equal(got, wanted)
            return
        # A step's own error may turn the rounding of a number to the other neighbour. Where the
        # step takes a number almost to zero, the neighbours are nearer than the error.
        near, far = (np.asarray(storage.widened(x), np.float64) for x in (got, wanted))
        most = np.zeros(far.shape)
        most[changed] = rules.STEP_ERROR * np.abs(rows[changed, :dim] - before[changed])
        assert (np.abs(near - far) <= most + 2.0**-7 * np.maximum(abs(near), abs(far))).all()
        assert np.mean(got != wanted) < 0.01

    test()


@pytest.mark.parametrize("epsilon", [None, 1e-8, 0.125])
def test_reciprocal_roots_of_all_magnitudes(epsilon):
    """Of every 64th mantissa of two exponents, and some of all others."""
    mantissas = np.arange(0, 2**24, 64, dtype=np.int32) + np.int32(0x3F800000)
    rng = np.random.default_rng(0)
    others = [rng.uniform(1, 2, 500) * 2.0**e for e in range(-125, 128)]
    a = np.concatenate([mantissas.view(np.float32), *others]).astype(np.float32)
    found = np.asarray(jax.jit(functools.partial(rules.over_root, epsilon=epsilon))(a), np.float64)
    exact = 1 / (np.sqrt(a.astype(np.float64)) + (epsilon or 0.0))
    # A step has two more roundings.
    assert np.abs(found / exact - 1).max() <= rules.STEP_ERROR - 2.0**-23
    ends = np.array([0, np.inf, np.nan], np.float32)
    at_zero, at_infinity, at_nan = np.asarray(rules.over_root(ends, epsilon))
    assert np.isfinite(at_zero)
    assert at_zero > 0
    assert np.isfinite(at_infinity)
    assert np.isnan(at_nan)


def test_which_rules_and_rows_are_taken():
    def taken(optimizer, width):
        return rules.takes(optimizer.compiled_rule(jnp.int32(1), jnp.float32(0.1)), width)

    assert all(taken(rule, 128) for rule in RULES.values())
    assert not taken(o.FTRL(0.1), 128)
    for rule, most in ((o.SGD(0.1), 768), (o.Adagrad(0.1), 512), (o.Adam(0.1), 384)):
        assert [taken(rule, width) for width in (most, most + 16)] == [True, False]


def test_nothing_to_update_is_no_kernel():
    optimizer, none = RULES["adagrad"], np.zeros(0, np.int32)
    table, slots = held(optimizer)
    for rows in (np.zeros(3, np.int32), none):
        given = none, none, rows, drawn_sums(), table, slots, jnp.float32(0.1)
        found, new = kernel(optimizer, *given)
        assert found is table
        assert new == slots
