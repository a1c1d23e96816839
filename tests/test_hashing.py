"""Hashing of open vocabularies: the formula, its stability, and that keys spread evenly."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_embed.hashing import hash_ids

MASK = 2**64 - 1
V = 1_000_003


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def _formula(key: int | str | bytes, vocabulary_size: int, seed: int = 0) -> int:
    s = _mix((seed + 0x9E3779B97F4A7C15) & MASK)
    if isinstance(key, int):
        return _mix((key & MASK) ^ s) % vocabulary_size
    data = key.encode() if isinstance(key, str) else key
    h = _mix(len(data) ^ s)
    for start in range(0, len(data), 8):
        h = _mix(h ^ int.from_bytes(data[start : start + 8], "little"))
    return h % vocabulary_size


def test_golden_values_never_change():
    strings = ["", "a", "a\0", "é", "日本語テキスト", "x" * 17]
    assert hash_ids(strings, 10**9).tolist() == GOLDEN_STRINGS
    assert hash_ids([0, -1, 2**63], 10**12, seed=7).tolist() == GOLDEN_INTEGERS


GOLDEN_STRINGS = [964807871, 285699961, 445989397, 592153821, 614717690, 346042372]
GOLDEN_INTEGERS = [773569330625, 759174143445, 730658713157]


def test_another_process_agrees():
    keys = ["user", "item", ""]
    code = f"from tpu_embed.hashing import hash_ids; print(hash_ids({keys}, 1 << 30).tolist())"
    environment = {
        "PYTHONHASHSEED": "123",
        "PYTHONPATH": ":".join(sys.path),
        "JAX_PLATFORMS": "cpu",
    }
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == str(hash_ids(keys, 1 << 30).tolist())


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(st.lists(text, max_size=8), st.integers(0, MASK), st.integers(1, 2**63 - 1))
def test_strings_follow_the_formula(keys, seed, size):
    expected = [_formula(key, size, seed) for key in keys]
    assert hash_ids(keys, size, seed=seed).tolist() == expected
    assert hash_ids([key.encode() for key in keys], size, seed=seed).tolist() == expected
    assert hash_ids(np.array(keys, object), size, seed=seed).tolist() == expected


@given(st.lists(text.map(lambda key: key.rstrip("\0")), max_size=8))
def test_fixed_width_strings_agree_with_lists(keys):
    expected = hash_ids(keys, V).tolist()
    assert hash_ids(np.array(keys, "U"), V).tolist() == expected
    encoded = [key.encode() for key in keys]
    assert hash_ids(np.array(encoded, "S"), V).tolist() == expected


@given(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=8), st.integers(0, MASK))
def test_integers_follow_the_formula(keys, seed):
    assert hash_ids(keys, V, seed=seed).tolist() == [_formula(key, V, seed) for key in keys]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_of_any_width_agree(dtype):
    assert hash_ids(np.arange(100, dtype=dtype), V).tolist() == hash_ids(range(100), V).tolist()
    assert hash_ids(np.arange(100, dtype=dtype).astype(">" + np.dtype(dtype).str[1:]), V)[99] == (
        _formula(99, V)
    )


def test_negative_integers_are_sign_extended():
    narrow = np.array([-1, -2], np.int8)
    assert hash_ids(narrow, V).tolist() == [_formula(-1, V), _formula(-2, V)]


def test_shape_and_dtype():
    keys = np.array([["a", "b", "c"], ["d", "", "f"]])
    ids = hash_ids(keys, 2**31 - 1)
    assert ids.shape == (2, 3)
    assert ids.dtype == np.int32
    assert hash_ids(keys, 2**31).dtype == np.int64
    assert hash_ids("abc", V).shape == ()
    assert hash_ids("abc", V) == hash_ids(["abc"], V)[0]
    assert hash_ids(np.zeros((0, 3), "U4"), V).shape == (0, 3)
    assert hash_ids([], V).shape == (0,)
    assert hash_ids(jnp.arange(3), V).tolist() == hash_ids([0, 1, 2], V).tolist()


def test_non_contiguous_and_variable_width_strings():
    keys = np.array([["alpha", "b"], ["c", "delta"]])
    assert hash_ids(keys.T, V).tolist() == hash_ids(keys, V).T.tolist()
    assert hash_ids(keys[:, 1], V).tolist() == hash_ids(["b", "delta"], V).tolist()
    assert hash_ids(keys.astype(np.dtypes.StringDType()), V).tolist() == hash_ids(keys, V).tolist()


def test_lone_surrogates_have_an_id():
    assert hash_ids(["\ud800"], V) == hash_ids(np.array(["\ud800"]), V)


@pytest.mark.parametrize("kind", ["strings", "integers"])
@pytest.mark.parametrize("size", [64, 100])
def test_ids_are_uniform(kind, size):
    n = 64_000
    keys = np.arange(n) * 1000
    ids = hash_ids(keys.astype("U") if kind == "strings" else keys, size)
    counts = np.bincount(ids, minlength=size)
    chi2 = ((counts - n / size) ** 2 / (n / size)).sum()
    # χ² with size - 1 degrees of freedom: mean size - 1, standard deviation √(2(size - 1)).
    assert abs(chi2 - (size - 1)) < 5 * np.sqrt(2 * (size - 1))


def test_seeds_are_independent():
    keys = np.arange(50_000)
    same = (hash_ids(keys, 100) == hash_ids(keys, 100, seed=1)).mean()
    assert abs(same - 0.01) < 5 * np.sqrt(0.01 * 0.99 / keys.size)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([1.5], "expected strings or integers, not both, got objects of float"),
        (np.ones(3), "expected strings or integers, got float64"),
        (np.ones(3, bool), "expected strings or integers, got bool"),
        (["a", 1], "not both, got objects of int, str"),
        (["a", None], "not both, got objects of NoneType, str"),
        ([True], "got objects of bool"),
    ],
)
def test_other_keys_are_refused(keys, says):
    with pytest.raises(TypeError, match=says):
        hash_ids(keys, V)


@pytest.mark.parametrize(
    ("keys", "size", "seed", "says"),
    [
        (["a"], 0, 0, "vocabulary_size: expected an integer >= 1, got 0"),
        (["a"], 2**63, 0, r"expected vocabulary_size < 2\*\*63"),
        (["a"], 10, -1, "seed: expected an integer >= 0, got -1"),
        (["a"], 10, 2**64, r"seed < 2\*\*64"),
        ([2**64], 10, 0, "expected integers of 64 bits, got a larger one"),
    ],
)
def test_sizes_outside_their_range_are_refused(keys, size, seed, says):
    with pytest.raises(ValueError, match=says):
        hash_ids(keys, size, seed=seed)
