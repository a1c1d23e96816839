"""Ids of n-grams: the formula, loop by loop, in NumPy and traced; where there is none; columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, ngram_ids


def mix(x):
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def expected_ids(tokens, orders, heads, size, seed, segments):
    """Return the ids by the definition, in integers of Python."""
    columns = [order for order in orders for _ in range(heads)]
    primes, candidate = [], size // len(columns)
    while len(primes) < len(columns):
        primes += [candidate] * all(candidate % divisor for divisor in range(2, candidate))
        candidate -= 1
    begin = mix((seed + 0x9E3779B9) % 2**32)
    ids = np.full((*np.shape(tokens), len(columns)), -1)
    for row, i, c in np.ndindex(ids.shape):
        places = range(i - columns[c] + 1, i + 1)
        if places[0] < 0 or min(tokens[row][at] for at in places) < 0:
            continue
        if segments is not None and len({segments[row][at] for at in places}) > 1:
            continue
        hashed = mix((begin + c + 1) % 2**32)
        for at in places:
            hashed = mix(hashed ^ int(tokens[row][at]))
        ids[row, i, c] = sum(primes[:c]) + hashed % primes[c]
    return ids


CASES = [((2, 3), 4, 1000, 0), ((1,), 1, 2, 2**32 - 1), ((5, 2, 1), 3, 10**4, 7), ((9,), 2, 100, 1)]


@pytest.mark.parametrize("in_segments", [False, True])
@pytest.mark.parametrize(("orders", "heads", "size", "seed"), CASES)
def test_ids_are_those_of_the_formula(orders, heads, size, seed, in_segments):
    rng = np.random.default_rng(0)
    tokens = rng.integers(-1, 50, (3, 7)).astype(np.int32)
    tokens[0, :3] = 0, 2**31 - 1, 1
    segments = np.sort(rng.integers(0, 3, (3, 7))) if in_segments else None
    wanted = expected_ids(tokens, orders, heads, size, seed, segments)
    options = {"orders": orders, "heads": heads, "vocabulary_size": size, "seed": seed}
    ids, given = functools.partial(ngram_ids, **options), {"segments": segments}
    for found in (ids(tokens, **given), jax.jit(ids)(tokens, **given)):
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, wanted)


def test_tokens_of_all_integer_types_are_the_same():
    options = {"heads": 2, "vocabulary_size": 200}
    tokens = np.arange(6).reshape(2, 3)
    wanted = ngram_ids(tokens.tolist(), **options)
    for dtype in ("uint8", "int16", "uint32", "int64", "uint64"):
        np.testing.assert_array_equal(ngram_ids(tokens.astype(dtype), **options), wanted)
    large = np.array([[2**32 - 1, 2**32 - 2]])
    traced = ngram_ids(jnp.asarray(large.astype(np.uint32)), (2,), **options)
    np.testing.assert_array_equal(ngram_ids(large, (2,), **options), traced)


def test_a_masked_token_is_padding_and_no_place_gives_no_ids():
    options = {"heads": 2, "vocabulary_size": 100}
    masked = np.ma.masked_array(np.uint32([[5, 6, 7, 8]]), mask=[[0, 1, 0, 0]])
    expected = ngram_ids([[5, -1, 7, 8]], **options)
    np.testing.assert_array_equal(ngram_ids(masked, **options), expected)
    huge = np.ma.masked_array(np.uint64([[2**63, 6]]), mask=[[0, 1]])
    with pytest.raises(ValueError, match=r"integers below 2\*\*32"):
        ngram_ids(huge, **options)
    for tokens in ([[], []], np.zeros((2, 0), int)):
        assert ngram_ids(tokens, **options).shape == (2, 0, 4)
    assert ngram_ids([7], **options).tolist() == [[-1] * 4]


def test_a_feature_takes_a_column_as_a_bag_of_its_own():
    table = TableConfig(100, 2, name="memory", combiner="sum")
    engine = EmbeddingEngine({"memory": FeatureConfig(table)})
    state = engine.init(jax.random.key(0))
    ids = ngram_ids(np.arange(24).reshape(8, 3), heads=2, vocabulary_size=100)
    found = engine.lookup(state, engine.place({"memory": ids[..., None]}))["memory"]
    rows = np.asarray(engine.tables(state)["memory"])
    np.testing.assert_array_equal(found, np.where(ids[..., None] < 0, 0, rows[ids]))


REFUSED = [
    ({"tokens": [[0.5]]}, TypeError, "ngram_ids: tokens: expected integers, got float64"),
    ({"tokens": [[2**32]]}, ValueError, "tokens: expected integers below 2"),
    ({"orders": (2, 2)}, ValueError, "orders: expected at least one length, each once"),
    ({"orders": 2}, ValueError, "orders: expected lengths of n-grams"),
    ({"heads": 0}, ValueError, "heads"),
    ({"vocabulary_size": 2**31}, ValueError, "vocabulary_size: expected at most"),
    ({"vocabulary_size": 11}, ValueError, "room for 6 columns .* got 11"),
    ({"seed": -1}, ValueError, "seed"),
    ({"segments": [[0]]}, ValueError, "segments: expected the shape of the tokens"),
]


@pytest.mark.parametrize(("given", "error", "text"), REFUSED)
def test_a_bad_argument_is_named(given, error, text):
    right = {"tokens": [[1, 2]], "heads": 3, "vocabulary_size": 1000}
    with pytest.raises(error, match=text):
        ngram_ids(**right | given)
