"""Parts of the check that train tables on all devices, and compare them with loops.

Input: the devices. Output: faults, and a line that says what was compared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embed import optimizers
from tpu_embed.check import rules
from tpu_embed.check.findings import Findings
from tpu_embed.check.rules import Pair
from tpu_embed.check.workload import ROWS, Declared, Expected, Workload, batch_size, table
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.rows import host_arrays
from tpu_embed.core.state import TableState
from tpu_embed.stateful import TPUEmbedding

Devices = Sequence[Any]


def make_mesh(devices: Devices) -> Mesh:
    """Return a mesh of one axis over the devices."""
    return Mesh(np.asarray(devices), ("devices",))


def check_inputs(devices: Devices, findings: Findings) -> str:
    """Look up every form of input with every combiner."""
    tables = {c: table(c, 8, combiner=c) for c in ("mean", "sum", "sqrtn")}
    sequence = functools.partial(FeatureConfig, tables["sum"], max_sequence_length=3)
    declared = {
        f"{form}, {combiner}{', weights' * weighted}": Declared(FeatureConfig(one), form, weighted)
        for combiner, one in tables.items()
        for form in ("dense", "nested", "sparse", "ragged")
        for weighted in (False, True)
    }
    declared |= {
        "one id": Declared(FeatureConfig(tables["mean"]), "one"),
        "dense sequence": Declared(sequence(), "dense", weighted=True),
        "sparse sequence": Declared(sequence(), "sparse"),
        "ragged sequence": Declared(sequence(), "ragged", weighted=True),
    }
    workload = Workload(declared, batch_size(len(devices)))
    engine = EmbeddingEngine(workload.features, mesh=make_mesh(devices))
    state = engine.init(jax.random.key(0))
    expected = _expected(engine, state, workload, {}, findings)
    batch = engine.place(workload.ids, workload.weights, training=False)
    expected.compare_activations(jax.device_get(engine.lookup(state, batch)))
    return f"{len(declared)} forms of ids, weights and combiners"


def check_placements(devices: Devices, findings: Findings) -> str:
    """Train tables of every placement and of awkward widths, with the functional API."""
    widths = {"mod": (1, 8, 20, 130), "div": (1, 16), "replicated": (1, 7)}
    tables = [
        table(f"{placement}_{dim}", dim, placement=placement)
        for placement, dims in widths.items()
        for dim in dims
    ]
    tables.append(table("bfloat16_20", 20, dtype="bfloat16"))
    workload = Workload(_two_features(tables), batch_size(len(devices)))
    _train(workload, make_mesh(devices), findings)
    return f"D = {', '.join(map(str, sorted({t.dim for t in tables})))}; mod, div, replicated"


def check_mesh(devices: Devices, findings: Findings) -> str:
    """Train tables that are split over one or both axes of a mesh, with a batch split over one."""
    if len(devices) % 2:
        return "not run: a mesh of two axes needs an even number of devices"
    mesh = Mesh(np.asarray(devices).reshape(-1, 2), ("data", "model"))
    tables = [
        table("both_axes", 8),
        table("one_axis", 8, shard_axes="model"),
        table("batch_axis", 8, shard_axes="data", placement="div"),
        table("no_axis", 8, placement="replicated"),
    ]
    workload = Workload(_two_features(tables), batch_size(len(devices)))
    _train(workload, mesh, findings, batch_axes="data")
    return " × ".join(f"{name} {size}" for name, size in mesh.shape.items())


def check_traced_ids(devices: Devices, findings: Findings) -> str:
    """Train with ids that the devices route themselves, inside a jit."""
    tables = [
        table(placement, 20, placement=placement) for placement in ("mod", "div", "replicated")
    ]
    workload = Workload(_two_features(tables, forms=("dense", "one")), batch_size(len(devices)))
    _train(workload, make_mesh(devices), findings, placed=False)
    return "ids in a jit, routed by the devices"


def check_rules(devices: Devices, findings: Findings) -> str:
    """Train one table with every optimizer, with the stateful API."""
    pairs = rules.pairs()
    declared = {
        name: Declared(FeatureConfig(table(name, 5, optimizer=pair.optimizer)))
        for name, pair in pairs.items()
    }
    workload = Workload(declared, batch_size(len(devices)))
    embedding = TPUEmbedding(workload.features, None, mesh=make_mesh(devices))
    embedding.build()
    expected = Expected(workload, *embedding.retrieve(), pairs, findings)
    for gradients in workload.gradients:
        embedding.enqueue(workload.ids, workload.weights)
        expected.compare_activations(jax.device_get(embedding.dequeue()), "dequeue")
        embedding.apply_gradients(gradients)
        expected.advance()
    expected.compare_tables(*embedding.retrieve(), "apply_gradients")
    return f"{len(pairs)} optimizers"


def check_bits(devices: Devices, findings: Findings) -> str:
    """Compare bits between numbers of devices on CPU, and between two runs everywhere."""
    cpu = all(device.platform == "cpu" for device in devices)
    counts = [n for n in (1, 2, 4, 8) if n <= len(devices)] if cpu else [len(devices)]
    tables = [
        TableConfig(ROWS, 20, name="mod"),  # drawn by the default initializer
        table("div", 20, placement="div", dtype="bfloat16", optimizer=optimizers.Lion(rules.RATE)),
        table("replicated", 7, placement="replicated"),
    ]
    workload = Workload(_two_features(tables), batch_size(max(counts)))
    runs = {}
    for count in counts:
        step, engine = _step(workload, make_mesh(devices[:count]), {})
        runs[f"{count} device(s)"] = _run(step, engine, workload)
        if count == max(counts):
            runs[f"{count} device(s) again"] = _run(step, engine, workload)
    (first, right), *others = runs.items()
    for name, found in others:
        for path, array in found.items():
            where = f"{path} on {name}, beside {first}"
            findings.compare(where, right[path], array, tolerance=0)
    return f"the same bits on {', '.join(map(str, counts))} device(s), and in a second run"


def _two_features(
    tables: Sequence[TableConfig], forms: tuple[Any, Any] = ("ragged", "sparse")
) -> dict[str, Declared]:
    """Return two features for each table, the first with weights if its form may have them."""
    first, second = forms
    found = {}
    for one in tables:
        found[f"{one.name}, {first}"] = Declared(FeatureConfig(one), first, first == "ragged")
        found[f"{one.name}, {second}"] = Declared(FeatureConfig(one), second)
    return found


def _expected(
    engine: EmbeddingEngine,
    state: TableState,
    workload: Workload,
    pairs: Mapping[str, Pair],
    findings: Findings,
) -> Expected:
    tables, slots = host_arrays(state, engine.layout)
    return Expected(workload, tables, slots, pairs, findings)


def _train(
    workload: Workload, mesh: Mesh, findings: Findings, *, placed: bool = True, **options: Any
) -> None:
    """Train with Adagrad, and compare every activation and what the tables are in the end."""
    step, engine = _step(workload, mesh, options)
    state = engine.init(jax.random.key(0))
    pairs = dict.fromkeys(workload.tables, rules.ADAGRAD)
    expected = _expected(engine, state, workload, pairs, findings)
    batch = engine.place(workload.ids, workload.weights) if placed else workload.ids
    for gradients in workload.gradients:
        state, activations = step(state, batch, gradients)
        expected.compare_activations(jax.device_get(activations))
        expected.advance()
    expected.compare_tables(*host_arrays(state, engine.layout))


def _step(workload: Workload, mesh: Mesh, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a jitted training step, and the engine."""
    engine = EmbeddingEngine(workload.features, rules.ADAGRAD.optimizer, mesh=mesh, **options)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TableState, batch: Any, gradients: Any) -> tuple[TableState, Any]:
        activations = engine.lookup(state, batch)
        return engine.update(state, batch, gradients), activations

    return step, engine


def _run(step: Any, engine: EmbeddingEngine, workload: Workload) -> dict[str, np.ndarray]:
    """Return activations, tables and slots after training, by a path that names them."""
    state, found = engine.init(jax.random.key(0)), {}
    batch = engine.place(workload.ids, workload.weights)
    for t, gradients in enumerate(workload.gradients):
        state, activations = step(state, batch, gradients)
        for name, array in jax.device_get(activations).items():
            found[f"step {t + 1}, feature {name!r}"] = array
    tables, slots = host_arrays(state, engine.layout)
    for name, rows in tables.items():
        found[f"table {name!r}"] = rows
        for slot, array in slots[name].items():
            found[f"table {name!r}, slot {slot!r}"] = array
    return found
