"""With `exchange_dtype="bfloat16"` rows and partial sums are rounded once, on any devices."""

from __future__ import annotations

import dataclasses
import math
import os
import re

import exchange_cases as cases
import jax
import living_cases
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import Mesh

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, optimizers
from tpu_embed.kernels import cpu

whole = pytest.mark.whole
MANY = range(*map(int, os.environ.get("EXCHANGE_SEEDS", "10:40").split(":")))
KERNELS = ["reference"] if cpu.load().path is None else ["native", "reference"]


CASES = [
    (0, 1, False, "native"),
    (1, 1, True, "reference"),
    (2, 8, False, "native"),
    (3, 8, True, "native"),
    (4, 4, False, "reference"),
]


@pytest.mark.parametrize(("seed", "devices", "traced", "kernels"), CASES)
@pytest.mark.quick(1)
def test_bits_are_those_of_the_description(seed, devices, traced, kernels, monkeypatch):
    monkeypatch.setenv("TPU_EMBED_KERNELS", kernels if kernels in KERNELS else "reference")
    case = cases.draw(seed)
    cases.check(cases.make_engine(case, devices), case, traced=traced)


@whole
@pytest.mark.parametrize("seed", MANY)
def test_bits_of_many_cases(seed, monkeypatch):
    rng = np.random.default_rng(seed + 1_000_000)
    monkeypatch.setenv("TPU_EMBED_KERNELS", str(rng.choice(KERNELS)))
    case = cases.draw(seed)
    devices = int(rng.choice([1, 2, 4, 8]))
    cases.check(cases.make_engine(case, devices), case, traced=bool(rng.random() < 0.4))


def mesh_of(*sizes):
    """Return a mesh with the axes "x" and "y"."""
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("x", "y"))


@pytest.mark.parametrize(("sizes", "shard_axes"), [((4, 1), "y"), ((2, 4), "x"), ((2, 4), "y")])
@whole
def test_shards_that_several_devices_have(sizes, shard_axes):
    """With a single shard that all replicas have, sums are sent all the same."""
    # So few rows that a psum would add their sums, were they exact.
    case = cases.draw(7, rows=3, shard_axes=shard_axes)
    cases.check(cases.make_engine(case, 8, mesh=mesh_of(*sizes)), case)


@whole
@pytest.mark.parametrize("traced", [False, True])
def test_batches_that_some_axes_do_not_split(traced):
    case = cases.draw(8)
    engine = cases.make_engine(case, 8, mesh=mesh_of(2, 4), batch_axes="x")
    cases.check(engine, case, traced=traced)


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


QUANTIZED = tpu_embed.QuantizationConfig(33, -2.0, 2.0)
JAGGED = {
    "jagged": TableConfig(40, 8, name="t", quantization_config=QUANTIZED),
    "bags": TableConfig(40, 8, name="b", combiner="mean"),
}


def train_jagged(devices, rule, seed=0):
    """Return activations, tables and slots after two steps of a jagged and a ragged feature."""
    features = {n: FeatureConfig(table, jagged=n == "jagged") for n, table in JAGGED.items()}
    options = {"mesh": mesh(devices), "exchange_dtype": "bfloat16"}
    engine = EmbeddingEngine(features, rule, **options)
    state, rng, found = engine.init(jax.random.key(0)), np.random.default_rng(seed), []
    for _ in range(2):
        bags = {n: [rng.integers(0, 40, k) for k in rng.integers(0, 6, 16)] for n in JAGGED}
        batch = engine.place({name: RaggedIds.from_lists(lists) for name, lists in bags.items()})
        rows = engine.lookup(state, batch)
        found += [np.concatenate(rows["jagged"].to_list()), np.asarray(rows["bags"])]
        values = np.asarray(rows["jagged"].values)
        gradients = {"jagged": values**2 + np.float32(0.1), "bags": found[-1] + np.float32(0.1)}
        state = engine.update_in_place(state, batch, gradients)
    return cases.on_host((found, engine.tables(state), engine.slots(state)))


@pytest.mark.parametrize("rule", [optimizers.Adagrad(0.1), optimizers.LAMB()])
@whole
def test_jagged_and_quantized_rows_have_the_bits_of_one_device(rule, monkeypatch):
    """On one device a kernel sums what the host has routed, or XLA does."""
    expected = train_jagged(4, rule)
    for kernels in KERNELS:
        monkeypatch.setenv("TPU_EMBED_KERNELS", kernels)
        same(train_jagged(1, rule), expected)


COLLECTIVE = re.compile(r"= \(?(\w+)\[\S* (?:.*)?(all-to-all|all-gather|all-reduce)\(")


def test_what_is_sent_of_sharded_tables_has_16_bits():
    """Nor does XLA undo it: what crosses an all-to-all are bits, not numbers to be converted."""
    case = cases.draw(10)
    engine, (ids, weights, gradients) = cases.make_engine(case, 4), case.steps[0]
    state, batch = engine.init(jax.random.key(0)), engine.place(ids, weights)

    def step(state, batch, gradients):
        return engine.lookup(state, batch), engine.update(state, batch, gradients)

    program = jax.jit(step, donate_argnums=0).lower(state, batch, gradients).compile()
    sent = COLLECTIVE.findall(program.as_text())
    assert {dtype for dtype, name in sent if name == "all-to-all"} == {"u16"}
    # The replicated table sums its gradients in float32.
    assert {dtype for dtype, name in sent if dtype.startswith("f")} == {"f32"}


def test_other_dtypes_and_single_occurrences_are_refused_unless_replicated(refused):
    def make(exchange_dtype="bfloat16", **options):
        table = TableConfig(4, 2, name="t", **options)
        return EmbeddingEngine(FeatureConfig(table), exchange_dtype=exchange_dtype)

    refused(r"exchange_dtype: expected 'float32' \| 'bfloat16', got", make, "float16")
    each = optimizers.SGD(0.1, use_gradient_accumulation=False)
    refused("use_gradient_accumulation=False for table 't'", make, optimizer=each)
    with jax.enable_x64(True):
        make(dtype="float64", placement="replicated")
        refused("table 't' of float64", make, dtype="float64")


def test_it_is_described_and_float32_is_the_default():
    case = cases.draw(0)
    default, exact = (cases.make_engine(case, 1, exchange_dtype=x) for x in (None, "float32"))
    assert default.describe() == exact.describe()
    tables = cases.make_engine(case, 1).describe()["tables"]
    found = {name: table["exchange_dtype"] for name, table in tables.items()}
    assert found == {"items": "bfloat16", "flags": None, "words": "bfloat16"}


def test_the_stateful_api_rounds_too():
    case = cases.draw(0)
    options = {"mesh": mesh(2), "exchange_dtype": "bfloat16"}
    embedding = tpu_embed.TPUEmbedding(case.features, optimizers.SGD(float(cases.RATE)), **options)
    first, found = cases.on_host(embedding.retrieve()[0]), None
    for ids, weights, gradients in case.steps:
        embedding.enqueue(ids, weights)
        found = embedding.dequeue()
        embedding.apply_gradients(gradients)
    got = cases.on_host((found, embedding.retrieve()[0]))
    same(got, cases.expected(dataclasses.replace(case, blocks=8), first))


@whole
def test_living_vocabularies_have_the_bits_of_one_device():
    found = []
    for devices in (1, 8):
        made = living_cases.engine(devices, exchange_dtype="bfloat16")
        state, seen = living_cases.train(made, made.init(jax.random.key(0)), 4)
        found.append((seen, living_cases.whole(made, state)))
    same(*found)
    exact = living_cases.engine(1)
    state, _ = living_cases.train(exact, exact.init(jax.random.key(0)), 4)
    assert np.any(living_cases.whole(exact, state)["table items"] != found[0][1]["table items"])
