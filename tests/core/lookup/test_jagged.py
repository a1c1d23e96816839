"""Sequences of different lengths, one after the other: compared with loops over the examples."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jagged_cases import FULL, LONGEST, SOME, B, C, D, N, S, make, rows_of
from jax.experimental import checkify

from tpu_embed import Jagged
from tpu_embed.kernels import dispatch

CUT = 3
LENGTHS = st.lists(st.integers(0, LONGEST), min_size=B, max_size=B)
QUOTIENT = 2e-7  # XLA may multiply by 1 / n, which rounds twice; all else is exact


def joined(rows, capacity):
    """Return the values `[S, capacity, D]` of rows that are one after the other."""
    found = np.zeros((S, capacity, D), np.float32)
    for s in range(S):
        part = np.concatenate(rows[s * N : (s + 1) * N])
        found[s, : len(part)] = part
    return found


numbers = jax.jit(lambda x: (x.lengths, x.segment_ids, x.positions, x.valid))


@jax.jit
def results(jagged, other):
    """Return what has a gradient, by name."""
    full, _ = jagged.to_padded(LONGEST)
    return {
        "sums": jagged.sums(),
        "means": jagged.means(),
        "padded": jagged.to_padded(CUT)[0],
        "joined": jagged.concatenate([other, jagged]).values,
        "back": Jagged.from_padded(full, jagged.lengths.reshape(-1), S, C).values,
    }


@given(LENGTHS)
@settings(max_examples=20)
def test_numbers_are_those_of_a_loop(lengths):
    counts, *found = jax.device_get(numbers(make(lengths)))
    np.testing.assert_array_equal(counts, np.reshape(lengths, (S, N)))
    for s in range(S):
        used = [(e, p, True) for e in range(N) for p in range(lengths[s * N + e])]
        expected = used + [(N, 0, False)] * (C - len(used))
        assert [*zip(*(one[s].tolist() for one in found), strict=True)] == expected


@given(LENGTHS, LENGTHS)
@settings(max_examples=20)
def test_results_are_those_of_a_loop(lengths, others):
    jagged, other = make(lengths), make(others, seed=1)
    rows, more, found = rows_of(jagged), rows_of(other), results(jagged, other)
    np.testing.assert_array_equal(found["sums"], [row.sum(0) for row in rows])
    means = [row.sum(0) / np.float32(max(len(row), 1)) for row in rows]
    np.testing.assert_allclose(found["means"], means, rtol=QUOTIENT)
    padded = np.zeros((B, CUT, D), np.float32)
    for e, row in enumerate(rows):
        padded[e, : len(row)] = row[:CUT]
    np.testing.assert_array_equal(found["padded"], padded)
    every = [np.concatenate(three) for three in zip(rows, more, rows, strict=True)]
    np.testing.assert_array_equal(found["joined"], joined(every, 3 * C))
    np.testing.assert_array_equal(found["back"], joined(rows, C))


@given(LENGTHS, LENGTHS)
@settings(max_examples=10)
def test_gradients_are_those_of_a_loop(lengths, others):
    """Each value's gradient is that of the places where it went; beyond the splits it is zero."""
    jagged, other, rng = make(lengths), make(others, seed=1), np.random.default_rng(2)
    shapes = {name: x.shape for name, x in jax.eval_shape(results, jagged, other).items()}
    cotangents = {n: rng.integers(1, 9, shape).astype(np.float32) for n, shape in shapes.items()}
    pull = gradients_of_each(jagged, other, cotangents)
    expected = {name: np.zeros((S, C, D), np.float32) for name in cotangents}
    for s in range(S):
        i, theirs = 0, 0  # how many values of `jagged` and of `other` came before
        for e in range(s * N, (s + 1) * N):
            own, first = lengths[e], i + theirs  # each value of `jagged` stands twice
            for p in range(own):
                expected["sums"][s, i] = cotangents["sums"][e]
                expected["means"][s, i] = cotangents["means"][e] / np.float32(own)
                expected["padded"][s, i] = cotangents["padded"][e, p] if p < CUT else 0
                both = cotangents["joined"][s, [first + i, first + i + own + others[e]]]
                expected["joined"][s, i] = both.sum(0)
                expected["back"][s, i] = cotangents["back"][s, i]
                i += 1
            theirs += others[e]
    for name, gradient in pull.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=QUOTIENT, err_msg=name)


@jax.jit
def gradients_of_each(jagged, other, cotangents):
    found, pull = jax.vjp(lambda v: results(jagged.with_values(v), other), jagged.values)
    zeros = jax.tree.map(jnp.zeros_like, found)
    return {name: pull(zeros | {name: given})[0] for name, given in cotangents.items()}


def test_forward_derivatives_are_the_results_of_the_direction():
    jagged, direction, other = make(SOME), make(SOME, seed=3), make(FULL, seed=1)
    given = (jagged.values,), (direction.values,)
    _, moved = jax.jvp(lambda v: results(jagged.with_values(v), other), *given)
    expected = results(direction, other.with_values(jnp.zeros_like(other.values)))
    jax.tree.map(np.testing.assert_array_equal, moved, expected)


def beside(of_examples, lengths, capacity=C):
    """Return the number of each value's example, `[S, capacity, …]`; zeros where there is none."""
    found = np.zeros((S, capacity, *of_examples.shape[1:]), of_examples.dtype)
    for s in range(S):
        part = slice(s * N, (s + 1) * N)
        own = np.repeat(of_examples[part], lengths[part], axis=0)
        found[s, : len(own)] = own
    return found


def spread_and_pull(jagged, of_examples, slopes):
    found, pull = jax.vjp(jagged.spread, of_examples)
    return found, pull(slopes)[0]


SPREAD = jax.jit(spread_and_pull)


@given(LENGTHS)
@settings(max_examples=20)
def test_numbers_of_examples_come_beside_their_values(lengths):
    rng = np.random.default_rng(4)
    given, slopes = ((rng.integers(-9, 9, n) / 4).astype("f") for n in ((B, D), (S, C, D)))
    found, gradient = SPREAD(make(lengths), given, slopes)
    np.testing.assert_array_equal(found, beside(given, lengths))
    sums = [row.sum(0) for row in rows_of(make(lengths).with_values(slopes))]
    np.testing.assert_array_equal(gradient, sums)


def test_few_bits_are_rounded_once():
    """512 + 1 is 512 in bfloat16, so sums in bfloat16 would stay at 512."""
    jagged = Jagged(jnp.array([[512, 1, 1, 1, 1, 9]], jnp.bfloat16), jnp.array([[0, 5]]))
    pull = jax.vjp(jagged.spread, jnp.ones(1, jnp.bfloat16))[1]
    sums = jagged.sums(), jagged.means(), pull(jagged.values)[0]
    assert [one.tolist() for one in sums] == [[516], [103], [516]]  # 103.2
    assert {one.dtype for one in sums} == {jnp.dtype(jnp.bfloat16)}
    for dtype in (jnp.bfloat16, jnp.int8):
        given = np.arange(B).astype(dtype)
        np.testing.assert_array_equal(make(SOME).spread(given), beside(given, SOME), strict=True)


def test_what_a_gpu_spreads_is_the_same(monkeypatch):
    """By a scan, whose gradient adds in the same order in every run."""
    operands = make(SOME), np.arange(B * D, dtype="f").reshape(B, D), np.ones((S, C, D), "f")
    wanted, taken = SPREAD(*operands), []

    def choose(*given, gpu, otherwise):
        taken.append(gpu)
        return gpu(*given)

    monkeypatch.setattr(dispatch, "choose", choose)
    found = jax.jit(lambda *given: spread_and_pull(*given))(*operands)
    assert taken
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_replica_under_vmap_gives_its_part():
    def of_all(jagged, other):
        joined = jagged.concatenate([other])
        each = joined.values, joined.positions, joined.segment_ids, joined.valid, joined.lengths
        sums, means = jagged.sums(), jagged.means()
        return *each, jagged.spread(other.sums()), sums, means, *jagged.to_padded(CUT)

    both = make(SOME), make(FULL, seed=1)
    mapped, expected = jax.jit(jax.vmap(of_all))(*both), jax.jit(of_all)(*both)
    for one, together in zip(mapped, expected, strict=True):
        np.testing.assert_array_equal(one.reshape(together.shape), together)


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float16])
@pytest.mark.parametrize("inner", [(), (2, 3)])
@pytest.mark.quick(1)
def test_values_of_any_dtype_and_shape(dtype, inner):
    rows = np.random.default_rng(0).integers(0, 2, (B, LONGEST, *inner)).astype(dtype)
    jagged = Jagged.from_padded(rows, SOME, S)
    assert jagged.values.shape == (S, N * LONGEST, *inner)
    again, mask = jagged.to_padded(LONGEST)
    there = np.arange(LONGEST) < np.array(SOME)[:, None]
    np.testing.assert_array_equal(mask, there)
    expected = np.where(there.reshape(*there.shape, *[1] * len(inner)), rows, dtype(0))
    np.testing.assert_array_equal(again, expected, strict=True)
    if dtype == np.int32:
        np.testing.assert_array_equal(jagged.sums(), expected.sum(1))
        counts = np.maximum(SOME, 1).reshape(-1, *[1] * len(inner))
        means = (expected.sum(1) / counts).astype(np.float32)
        np.testing.assert_array_equal(jagged.means(), means)


@pytest.mark.parametrize("lengths", [[0] * B, FULL])
@pytest.mark.quick(1)
def test_no_room_and_no_length(lengths):
    """Arrays with an axis of 0, which JAX cannot index, give empty results."""
    nothing = Jagged(np.zeros((S, 0, D), np.float32), np.zeros((S, N + 1), np.int32))
    assert nothing.to_padded(2)[0].tolist() == np.zeros((B, 2, D)).tolist()
    assert nothing.sums().tolist() == np.zeros((B, D)).tolist()
    assert nothing.spread(np.ones((B, D))).shape == (S, 0, D)
    no_one = Jagged(np.zeros((1, 2, D), np.float32), np.zeros((1, 1), np.int32))
    assert no_one.spread(np.zeros(0)).tolist() == [[0, 0]]
    assert nothing.positions.shape == (S, 0)
    jagged = make(lengths)
    assert jagged.to_padded(0)[0].shape == (B, 0, D)
    both = nothing.concatenate([jagged])
    np.testing.assert_array_equal(both.values, joined(rows_of(jagged), C))
    assert Jagged.from_padded(np.zeros((B, 0, D)), [0] * B, S).values.shape == (S, 0, D)


def test_no_array_is_larger_than_the_values():
    """One long sequence among many empty ones: padded, it would be 32 times the values."""
    n, capacity = 64, 128
    jagged = Jagged(jnp.zeros((1, capacity, D)), jnp.array([[0] + [capacity] * n]))

    def of_jagged(jagged):
        found = jagged.concatenate([jagged])
        return found.sums(), found.means(), found.values, found.positions, found.valid

    def with_gradients(values):
        found, pull = jax.vjp(lambda v: of_jagged(jagged.with_values(v))[:3], values)
        return pull(found)

    jaxprs = [jax.make_jaxpr(of_jagged)(jagged), jax.make_jaxpr(with_gradients)(jagged.values)]
    found = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", " ".join(map(str, jaxprs)))
    sizes = {np.prod([int(size) for size in shape.split(",")]) for shape in found}
    assert max(sizes) == 2 * capacity * D


def test_from_padded_cuts_what_does_not_fit_inside_a_jit():
    rows = np.arange(1, 1 + B * LONGEST, dtype=np.float32).reshape(B, LONGEST)
    pack = functools.partial(Jagged.from_padded, shards=S, capacity=6)
    lengths = np.array([2, 9, 3, -1, 4, 1])  # counted as 2, 4, 3, 0, 4, 1
    found = jax.jit(pack)(rows, lengths)
    assert found.values.tolist() == [[1, 2, 5, 6, 7, 8], [17, 18, 19, 20, 21, 0]]
    assert found.row_splits.tolist() == [[0, 2, 6, 6], [0, 0, 4, 5]]
    checked = jax.jit(checkify.checkify(pack))
    for lengths, fits in {(2, 0, 3, 0, 4, 1): True, (2, 2, 3, 0, 0, 1): False}.items():
        error, _ = checked(rows, np.array(lengths))
        assert (error.get() is None) == fits
    assert "Jagged.from_padded" in error.get()


ROWS = np.zeros((4, 3, D), np.float32)
FAULTS = [
    (lambda: Jagged(np.zeros((2, 3)), np.zeros((2, 3))), r"Jagged\.row_splits: expected integers"),
    (lambda: Jagged(np.zeros((3, 4, 2)), np.zeros((2, 3), int)), r"Jagged: expected values \[S"),
    (lambda: Jagged(np.zeros(2), np.zeros((2, 3), int)), r"Jagged: expected"),
    (lambda: make(SOME).with_values(np.zeros((S, C + 1, D))), "with_values: expected first axes"),
    (lambda: make(SOME).with_values(make(FULL)), r"Jagged\.with_values: expected an array"),
    (lambda: make(SOME).concatenate([make(SOME), make([1] * 3)]), r"concatenate: others\[1\]:"),
    (lambda: make(SOME).concatenate(make(FULL)), r"Jagged\.concatenate:"),
    (lambda: make(SOME).concatenate([make(FULL).values]), r"others\[0\]: expected a Jagged"),
    (lambda: make(SOME).concatenate([make(SOME, shape=(3,))]), r"others\[0\]: expected float32"),
    (lambda: make(SOME).spread(np.zeros((S, N))), r"spread: of_examples: expected shape \[6, …\]"),
    (lambda: make(SOME).to_padded(-1), r"length: expected an integer >= 0"),
    (lambda: Jagged.from_padded(np.zeros(4), [1] * 4, 2), r"padded: expected \[B, L"),
    (lambda: Jagged.from_padded(ROWS, [1] * 4, 3), "padded: expected rows that 3 shards divide"),
    (lambda: Jagged.from_padded(ROWS, [1] * 4, 0), r"shards: expected an integer"),
    (lambda: Jagged.from_padded(ROWS, [1.0] * 4, 2), r"lengths: expected integers, got float64"),
    (lambda: Jagged.from_padded(ROWS, [1] * 3, 2), "lengths: expected one per"),
    (lambda: Jagged.from_padded(ROWS, [1, 2, 4, 1], 2), "from_padded: expected lengths from 0"),
    (lambda: Jagged.from_padded(ROWS, np.array([1, 2, 2**32, 1]), 2), "0 to 3, got 1 to 4294967"),
    (lambda: Jagged.from_padded(ROWS, [1, 2, 2, 3], 2, capacity=4), "expected room for 5 values"),
]


@pytest.mark.parametrize(("call", "says"), FAULTS)
def test_faults_are_named(call, says, refused):
    refused(says, call, error=(TypeError, ValueError))
