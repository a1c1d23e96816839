"""`micro_batches`: the bits that its definition gives, on any number of devices, in less memory."""

import functools

import fit_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loop_cases import mesh, plain_engine

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, fit, optimizers
from tpu_embed.data import EventValues
from tpu_embed.loop.step import Parts, make_train_step, split_model

ROWS, BATCH, RATE = 12, 32, 1 / 8
ITEMS = TableConfig(ROWS, 2, combiner="sum", name="items")
FEATURES = {
    "history": FeatureConfig(ITEMS, jagged=True),
    "item": FeatureConfig(ITEMS),
    "shared": FeatureConfig(ITEMS),
}
RNG = np.random.default_rng(6)
LENGTHS = RNG.integers(0, 9, BATCH) * RNG.integers(0, 2, BATCH)
SPLITS = np.concatenate([[0], np.cumsum(LENGTHS)])
OF_EXAMPLE = np.repeat(np.eye(BATCH, dtype=np.float32), LENGTHS, axis=1)  # [B, events]
HISTORY = RNG.integers(0, ROWS, SPLITS[-1])
TIMES = RNG.integers(-1, 2, SPLITS[-1]).astype(np.float32)
ITEM, SHARED = RNG.integers(0, ROWS, BATCH), RNG.integers(0, ROWS, 8)
WANTED = RNG.integers(-2, 3, BATCH).astype(np.float32)
START = RNG.integers(-2, 3, (ROWS, 2)).astype(np.float32)


def compare(seen, item, shared, wanted, scale):
    """Return a loss that is not a mean over the examples, so that it matters how they are parted.

    Args:
      seen: [n, D], the sum of the times and rows of each history.
      item: [n, D].
      shared: [8, D].
      wanted: [n].
      scale: [].
    """
    each = (seen * item).sum(-1) - wanted
    return scale * each.mean() ** 2 + (item.mean(0) * shared.mean(0)).sum()


def loss_of(activations, wanted, known):
    times = jax.vmap(lambda history, times: history.with_values(history.values * times[:, None]))
    seen = times(activations["history"], known["times"].values).sums()
    assert known["days"].shape == (3,)
    loss = compare(seen, activations["item"], activations["shared"], wanted, known["scale"])
    return loss, {"wanted": wanted.mean()}


def mean_of(activations, wanted, known):
    """Return the mean of the squared errors, with numbers that float32 rounds."""
    history = activations["history"]
    seen = history.with_values(history.values * known["times"].values[..., None])
    return (((seen.sums() / 3 + activations["item"]).sum(-1) - wanted) ** 2).mean()


def source(steps=1):
    features = {"history": RaggedIds(HISTORY, SPLITS), "item": ITEM, "shared": SHARED}
    known = {"times": EventValues("history", TIMES), "days": np.arange(3), "scale": 0.5}
    return [(features, WANTED, known)] * steps


@functools.cache
def engine_of(devices):
    return EmbeddingEngine(FEATURES, optimizers.SGD(RATE), mesh=mesh(devices))


def trained(devices, parts, loss=loss_of, steps=1):
    engine = engine_of(devices)
    state = engine.load_arrays(engine.init(jax.random.key(0)), {"items": START})
    options = {"micro_batches": parts, "whole_features": ["shared"], "progress": False}
    report = fit(engine, loss, source(steps), state=state, **options)
    return np.asarray(engine.tables(report.state)["items"]), report


@functools.cache
def by_hand(devices, parts):
    """Return the table after a step of the definition, and the mean loss.

    All numbers are multiples of a power of two, and few, so every order of a sum gives its bits.
    """

    def loss(table, of_example, item, wanted):
        seen = of_example * TIMES @ table[HISTORY]
        return compare(seen, table[item], table[SHARED], wanted, 0.5)

    of_part = jax.jit(jax.value_and_grad(loss))
    numbers = np.arange(BATCH).reshape(devices, parts, -1)
    each = [numbers[:, part].reshape(-1) for part in range(parts)]
    found = [of_part(START, OF_EXAMPLE[part], ITEM[part], WANTED[part]) for part in each]
    losses, gradients = zip(*found, strict=True)
    return START - RATE * sum(one / parts for one in gradients), sum(losses) / parts


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.quick(2)
def test_the_bits_are_those_of_the_definition(devices, parts):
    """Of jagged and dense features, of one that every part gets whole, and of values of events."""
    table, report = trained(devices, parts)
    expected, loss = by_hand(devices, parts)
    np.testing.assert_array_equal(table, expected)
    assert report.loss == loss
    assert report.metrics == {"wanted": WANTED.mean()}
    assert np.array_equal(table, by_hand(devices, 1)[0]) == (parts == 1)


def test_of_a_mean_over_the_examples_parts_change_no_bit_of_a_table():
    """Of a network the bits may differ: XLA orders the sums of a matrix product by its size."""
    whole, in_parts = (trained(8, parts, mean_of, steps=3)[0] for parts in (1, 4))
    np.testing.assert_array_equal(in_parts, whole)


def test_a_network_is_passed_k_times_and_changed_once():
    report = fit_cases.trained(steps=3, micro_batches=2, **fit_cases.with_network())
    assert (report.step, report.model.dropout.rngs.count[...]) == (3, 3 * 2)


def test_parameters_get_the_mean_of_the_gradients_of_the_parts():
    def loss(model, activations, wanted):
        return (model["w"] * wanted).mean() ** 2 + 0 * activations["item"].sum()

    wanted = np.float32([1, 3, 5, 7, 2, 2, 4, 4])
    items = [({"item": np.zeros((8, 1), int)}, wanted)]
    given = {"model": {"w": np.float32(1)}, "optimizer": optax.sgd(1 / 16), "progress": False}
    for devices in (1, 2):
        report = fit(plain_engine(devices), loss, items, micro_batches=4, **given)
        parts = wanted.reshape(devices, 4, -1).mean(axis=(0, 2))
        assert report.model["w"] == 1 - (2 * parts**2).mean() / 16
        assert report.loss == (parts**2).mean()


def test_memory_falls_and_tables_are_updated_in_place():
    def loss(model, activations, wanted):
        deep = activations["item"]
        for kernel in (model["in"], model["between"], model["out"]):
            deep = jax.nn.gelu(deep @ kernel)
        return ((deep[:, 0] - wanted) ** 2).mean()

    sizes, needed = {"in": (2, 256), "between": (256, 256), "out": (256, 1)}, []
    objective, network = split_model(loss, {n: jnp.ones(size) for n, size in sizes.items()})
    engine = plain_engine(1)
    batch = engine.place({"item": np.zeros((1024, 1), int)})
    for count in (1, 4):
        prepare = make_train_step(objective, optax.identity(), Parts(engine, count, ()), 0)
        step = prepare(batch, (np.zeros(1024, np.float32),), 0)
        carry = engine.init(jax.random.key(0)), network, optax.identity().init(network.trained)
        engine.check_in_place(step.func, carry, batch, rates=(), **step.keywords)
        program = step.func.lower(carry, batch, rates=(), **step.keywords).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
    # What the network keeps is nearly all of it.
    assert needed[1] < 0.36 * needed[0]


REFUSED = [
    (0, ["shared"], "micro_batches: expected an integer >= 1, got 0"),
    (2, ["items"], r"expected a list of some of .*got \[.items.\]; did you mean item\?"),
    (2, "shared", r"a list of some of .*'shared'.*, got 'shared'"),
    (2, [], r"features of one size, got .*'shared': 8.*in whole_features"),
    (3, ["shared"], "expected a multiple of 24 examples, 3 parts on each device, got 32"),
]


@pytest.mark.parametrize(("parts", "whole", "words"), REFUSED)
def test_refused(parts, whole, words):
    options = {"micro_batches": parts, "whole_features": whole, "progress": False}
    with pytest.raises(ValueError, match=words):
        fit(engine_of(8), loss_of, source(), **options)
