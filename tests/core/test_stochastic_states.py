"""States whose rows are rounded at random: keys, rows on the host, checkpoints, other engines."""

import dataclasses
import functools

import jax
import numpy as np
import oracle_rounding as oracle
import pytest
from facade_cases import mesh
from rounding_cases import LR, STEPS, assert_same, bits_of, engine, expected, seed_of, trained

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig, io
from tpu_embed import optimizers as o

KEYS = np.array([3, 2**40 + 5, 2**64 - 9, 77, 2**33, 2**33 + 1], np.uint64)


def keyed(devices=1, capacity=8, rounding="stochastic", storage=None, **options):
    """Return an engine of one table whose ids are keys."""
    options = {"vocabulary": tpu_embed.DynamicVocabulary(**options), "storage": storage}
    if rounding == "stochastic":
        options["rounding"] = rounding
    table = TableConfig(capacity, 4, name="items", dtype="bfloat16", combiner="sum", **options)
    return EmbeddingEngine(FeatureConfig(table), o.SGD(LR), mesh=mesh(devices))


def gradients_of(keys, step):
    """Return a gradient for each key, which depends on key and step alone."""
    numbers = [np.random.default_rng([int(k) % 2**32, step]).integers(-9, 10, 4) for k in keys]
    return np.array(numbers, np.float32)


def admitted(made, state, keys=KEYS):
    """Return a state and an admitted batch of six keys, padded to eight bags."""
    return made.admit(state, made.place(np.append(keys, keys[:2])[:, None]))


def train(made, state, steps, keys=KEYS):
    """Train on all keys in each step."""
    for step in steps:
        state, batch = admitted(made, state, keys)
        gradients = np.pad(gradients_of(keys, step), ((0, 2), (0, 0)))
        state = made.update_in_place(state, batch, gradients)
    return state


def assert_expected(made, state):
    rows = np.asarray(made.rows(state, "items", keys=KEYS)).view(np.uint16)
    np.testing.assert_array_equal(rows, expected_rows())


@functools.cache
def expected_rows():
    """Return the bits of the rows of the keys after three steps, by NumPy."""
    made = keyed()
    state = made.init(jax.random.key(1))
    seed = seed_of(made, state)
    state, _ = admitted(made, state)
    table = np.asarray(made.rows(state, "items", keys=KEYS)).astype(np.float32)
    for step in range(3):
        bits = oracle.random_bits(seed, "items", step + 1, KEYS[:, None], np.arange(4))
        table = oracle.round_up_or_down(table - np.float32(LR) * gradients_of(KEYS, step), bits)
    return (table.view(np.uint32) >> 16).astype(np.uint16)


HOMES = {
    "one device": {},
    "eight devices": {"devices": 8, "capacity": 16},
    "on the host": {"devices": 2, "storage": HostStorage(device_rows=12), "capacity": 40},
}


@pytest.mark.whole
@pytest.mark.parametrize("home", HOMES)
def test_a_key_is_rounded_alike_in_whatever_row_it_stands(home, monkeypatch):
    if home == "eight devices":
        monkeypatch.setenv("TPU_EMBED_KERNELS", "reference")
    made = keyed(**HOMES[home])
    state = made.init(jax.random.key(1))
    # The same keys in another order get other rows.
    keys = KEYS if home == "one device" else KEYS[[4, 2, 5, 0, 1, 3]]
    state = train(made, state, range(3), keys)
    assert_expected(made, state)


def test_a_new_key_in_an_old_row_has_its_own_bits():
    made = keyed(capacity=6, evict="lru")
    state = made.init(jax.random.key(1))
    other = np.arange(50, 56, dtype=np.uint64)
    state = train(made, state, range(2), other)
    state = dataclasses.replace(state, step=state.step - 2)
    state = train(made, state, range(3))
    assert_expected(made, state)


@pytest.mark.whole
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path):
    made = engine(2, "mod")
    state = made.init(jax.random.key(9))
    wanted = expected(made, state, STEPS)
    io.save(tmp_path / "saved", made, trained(made, state, 1))
    for devices, placement in ((8, "div"), (1, "replicated")):
        other = engine(devices, placement)
        state = io.restore(tmp_path / "saved", other).state
        assert_same(bits_of(other, trained(other, state, STEPS - 1, first=1)), wanted)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.quick(1)
def test_a_table_of_keys_resumes_elsewhere(tmp_path, rounding):
    """A checkpoint of a table that was rounded to nearest has no numbers of its rows."""
    made = keyed(2, rounding=rounding)
    state, key, first = made.init(jax.random.key(1)), jax.random.key(1), 0
    if rounding == "stochastic":
        state, key, first = train(made, state, range(2)), None, 2
    else:
        state, _ = admitted(made, state)
    io.save(tmp_path / "saved", made, state)
    for home in HOMES if rounding == "nearest" else ["on the host"]:
        other = keyed(**HOMES[home])
        state = io.restore(tmp_path / "saved", other, key=key).state
        state = train(other, state, range(first, 3))
        assert_expected(other, state)


def test_what_is_rounded_to_nearest_may_be_rounded_at_random_from_then_on(tmp_path, refused):
    table = TableConfig(23, 4, dtype="bfloat16", name="films", rounding="stochastic")
    made, plain = (
        EmbeddingEngine(FeatureConfig(one), o.Adagrad(0.25), mesh=mesh(1))
        for one in (table, dataclasses.replace(table, rounding="nearest"))
    )
    ids = np.arange(23)
    gradients = np.random.default_rng(0).random((23, 4), np.float32)
    state = plain.update(plain.init(jax.random.key(3)), plain.place(ids), gradients)
    io.save(tmp_path / "nearest", plain, state)
    refused(r"rounding_seed.*give key= to make it anew", io.restore, tmp_path / "nearest", made)
    found = io.restore(tmp_path / "nearest", made, key=jax.random.key(3)).state
    for name, slot in plain.slots(state)["films"].items():
        np.testing.assert_array_equal(made.slots(found)["films"][name], slot)
    assert seed_of(made, made.init(jax.random.key(3))) == seed_of(made, found)
    io.save(tmp_path / "stochastic", made, found)
    back = io.restore(tmp_path / "stochastic", plain).state
    assert_same(plain.tables(back), plain.tables(state))
    assert_same(plain.slots(back)["films"], plain.slots(state)["films"])
    refused(r"adopt: table 'films': rounding: expected stochastic", made.adopt, state, plain)


@pytest.mark.whole
def test_another_engine_goes_on_with_the_same_bits():
    """From the devices to the host and back, and to other devices; static ids and keys."""
    made = keyed(2)
    state = train(made, made.init(jax.random.key(1)), range(2))
    for home in ("on the host", "eight devices", "on the host"):
        other = keyed(**HOMES[home])
        state, made = other.adopt(state, made), other
    state = train(made, state, range(2, 3))
    assert_expected(made, state)


@pytest.mark.parametrize("way", ["adopt", pytest.param("restore", marks=pytest.mark.whole)])
def test_row_numbers_go_home_with_static_rows(way, tmp_path):
    """A table on the devices keeps no numbers of its rows; on the host it needs them."""
    ids, rule = np.arange(16), o.SGD(LR)
    table = TableConfig(40, 4, name="films", dtype="bfloat16", rounding="stochastic")
    there = dataclasses.replace(table, storage=HostStorage(device_rows=24))
    made, hosted = (EmbeddingEngine(FeatureConfig(t), rule, mesh=mesh(2)) for t in (table, there))
    state = made.init(jax.random.key(1))
    state = made.update(state, made.place(ids), gradients_of(ids, 0))
    if way == "adopt":
        away = hosted.adopt(state, made)
    else:
        io.save(tmp_path / "saved", made, state)
        away = io.restore(tmp_path / "saved", hosted, key=jax.random.key(1)).state
    state = made.update(state, made.place(ids), gradients_of(ids, 1))
    away, batch = hosted.admit(away, hosted.place(ids))
    away = hosted.update(away, batch, gradients_of(ids, 1))
    found = hosted.rows(away, "films", ids), made.rows(state, "films", ids)
    np.testing.assert_array_equal(*(np.asarray(rows).view(np.uint16) for rows in found))
