"""The compiled step, read in its HLO: in place, no full-table pass, one kernel per stack."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import tpu_embed
from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.core.state import table_state as tables
from tpu_embed.kernels import cpu, dispatch

BATCH = 16
REFERENCE = pytest.param("reference", marks=pytest.mark.whole)
PATHS = ["reference"] if cpu.load().path is None else ["native", REFERENCE]
SMALL, LARGE = 4096, 409_600
"""Vocabulary sizes; both have more rows a shard than a batch has ids."""


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Run a test with the kernels of each path; return which."""
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    return request.param


def make_engine(declared, optimizer, devices):
    features = {name: FeatureConfig(table) for name, table in declared.items()}
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("d",))
    return EmbeddingEngine(features, optimizer, mesh=mesh)


def compiled_step(engine, ids):
    """Return the compiled training step of a linear model, state donated; nothing is allocated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, features):
        activations = engine.lookup(state, features)
        return engine.update(state, features, activations)

    def with_sharding(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    axes = engine.layout.axes
    state = jax.eval_shape(engine.init, jax.random.key(0))
    specs = tables.split_shards(
        {stack.name: tables.stack_specs(stack, axes) for stack in engine.layout.stacks}
    )
    held = jax.tree.map(
        lambda leaf, spec: with_sharding(leaf, NamedSharding(axes.mesh, spec)),
        (state.tables, state.slots),
        specs,
    )
    state = dataclasses.replace(state, tables=held[0], slots=held[1])
    batch = jax.tree.map(
        lambda a: with_sharding(a, NamedSharding(axes.mesh, axes.spec(axes.batch_axes))), ids
    )
    return step.lower(state, batch).compile(), state


def ids_of(engine, width=4):
    return {path: np.zeros((BATCH, width), np.int32) for path in engine.describe()["features"]}


def local_shapes(state):
    """Return the HLO shapes of this device's part of every table and per-row slot."""
    names = {"float32": "f32", "uint16": "u16"}
    leaves = jax.tree.leaves((state.tables, state.slots))
    return {
        f"{names[str(leaf.dtype)]}[{','.join(map(str, leaf.sharding.shard_shape(leaf.shape)))}]"
        for leaf in leaves
        if leaf.ndim
    }


def operations(hlo):
    """Return (name, shape) of every instruction of an HLO text."""
    return [
        (name, shape) for shape, name in re.findall(r"= \(?(\w+\[[\d,]*\])[^ ]* ([\w-]+)\(", hlo)
    ]


CASES = {
    "adagrad": optimizers.Adagrad(0.1),
    "rowwise": optimizers.RowWiseAdagrad(0.1),
    "adam": optimizers.Adam(0.1),
    "occurrences": optimizers.SGD(0.1, use_gradient_accumulation=False),
}


@pytest.mark.parametrize(
    ("case", "dtype", "devices"),
    [
        ("adagrad", "float32", 8),
        ("adam", "float32", 1),
        ("rowwise", "bfloat16", 8),
        ("adam", "bfloat16", 1),
    ],
)
@pytest.mark.quick(1)
def test_tables_and_slots_are_updated_in_place(path, case, dtype, devices):
    table = TableConfig(LARGE, 16, name="t", dtype=dtype)
    engine = make_engine({"x": table}, CASES[case], devices)
    compiled, state = compiled_step(engine, ids_of(engine))
    hlo = compiled.as_text()
    donated = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo, re.S)
    assert donated is not None
    held = jax.tree.leaves((state.tables, state.slots))
    assert donated.group(1).count("may-alias") + donated.group(1).count("must-alias") >= len(held)
    physical = local_shapes(state)
    widened = {shape.replace("u16", "f32") for shape in physical}
    copied = [op for op in operations(hlo) if op[0] == "copy" and op[1] in physical | widened]
    assert not copied
    called = 'custom_call_target="tpu_embed_update"' in hlo
    assert called == (path == "native")
    smallest = min(leaf.dtype.itemsize * leaf.size for leaf in held) // devices
    assert compiled.memory_analysis().temp_size_in_bytes < smallest // 4


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("adagrad", "bfloat16"),
        ("rowwise", "float32"),
        ("adam", "float32"),
        ("occurrences", "bfloat16"),
    ],
)
@pytest.mark.quick(1)
def test_temporaries_do_not_grow_with_the_vocabulary(path, case, dtype):
    temporaries = []
    for size in (SMALL, LARGE):
        engine = make_engine({"x": TableConfig(size, 16, dtype=dtype)}, CASES[case], 1)
        compiled, _ = compiled_step(engine, ids_of(engine))
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    # Less than a byte for each row more; XLA's buffers differ by some hundred bytes.
    assert abs(temporaries[1] - temporaries[0]) < LARGE - SMALL


def test_a_copy_would_be_seen():
    """The reader of the HLO finds the copy that a step without donation makes."""
    engine = make_engine({"x": TableConfig(LARGE, 16)}, CASES["adagrad"], 1)
    state = jax.eval_shape(engine.init, jax.random.key(0))
    ids = ids_of(engine)

    @jax.jit
    def step(state, features):
        return engine.update(state, features, {"x": jnp.zeros((BATCH, 16))})

    hlo = step.lower(state, ids).compile().as_text()
    assert [op for op in operations(hlo) if op == ("copy", f"f32[{LARGE},16]")]


def kernels(engine):
    """Return how often each operation that reads or moves rows occurs, custom calls by target."""
    compiled, _ = compiled_step(engine, ids_of(engine, width=2))
    hlo = compiled.as_text()
    names = ("gather", "scatter", "sort", "all-to-all", "while", "custom-call")
    counts = {name: len(re.findall(rf" {name}\(", hlo)) for name in names}
    return counts | collections.Counter(re.findall(r'custom_call_target="(\w+)"', hlo))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.whole), 8])
@pytest.mark.whole
def test_kernels_grow_with_stacks_not_with_tables(path, devices):
    def declared(count):
        return {f"f{i:02d}": TableConfig(100 + i, (4, 8, 16)[i % 3]) for i in range(count)}

    few = kernels(make_engine(declared(3), optimizers.Adagrad(0.1), devices))
    many = kernels(make_engine(declared(26), optimizers.Adagrad(0.1), devices))
    assert few == many
    assert few.get("tpu_embed_update", 0) == (3 if path == "native" else 0)
    assert few["sort"] or path == "native"


def test_one_transfer_a_batch():
    engine = make_engine(
        {f"f{i}": TableConfig(100, (4, 8)[i % 2]) for i in range(5)}, optimizers.SGD(0.1), 8
    )
    features = ids_of(engine)
    features["f0"] = tpu_embed.RaggedIds.from_lists([[1, 2]] * BATCH)
    assert len(jax.tree.leaves(engine.place(features))) == 1
