"""Workloads, and steps of both APIs, compiled for TPUs that need not exist."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig, optimizers, planning
from tpu_embed.core.update import Operands
from tpu_embed.planning.compiled import abstract_batch, abstract_state, describe_topology

ROOT = Path(__file__).resolve().parents[2]
SMALL = {chip: f"{chip}:2x2" for chip in ("v5e", "v6e")}
SMALL |= {chip: f"{chip}:2x2x1" for chip in ("v4", "v5p", "tpu7x")}
OPTIMIZERS = {
    "sgd": optimizers.SGD(0.1),
    "adagrad": optimizers.Adagrad(0.1),
    "row-wise": optimizers.RowWiseAdagrad(0.1),
    "adam": optimizers.Adam(0.1),
    "ftrl": optimizers.FTRL(0.1),
    "one by one": optimizers.SGD(0.1, use_gradient_accumulation=False),
}


def quickstart(placement="mod", dim=16, dtype="float32"):
    """Return features and shapes of a batch: two tables, three combiners."""
    table = TableConfig(10_000, dim, dtype=dtype, placement=placement, name="item")
    users = dataclasses.replace(table, vocabulary_size=3_000, combiner="mean", name="user")
    days = dataclasses.replace(table, vocabulary_size=7, combiner="sqrtn", name="day")
    features = {"items": table, "users": users, "days": days}
    hot = {"items": 20, "users": 1, "days": 5}
    shapes = {name: jax.ShapeDtypeStruct((1024, width), np.int32) for name, width in hot.items()}
    return jax.tree.map(FeatureConfig, features), shapes


def hosted():
    """Return features of two tables on the host and one that is not, and shapes of a batch."""
    features, shapes = quickstart(dim=128)
    for name in ("items", "users"):
        far = {"vocabulary_size": 2**40, "storage": HostStorage(device_rows=30_000)}
        table = dataclasses.replace(features[name].table, combiner="sum", **far)
        features[name] = FeatureConfig(table)
    return features, shapes


def dlrm_v4(most=None, **sizes):
    """Return features, optimizer and shapes of a batch of DLRMv4, its tables cut to `most` rows."""
    module = config_of("dlrm_v4")
    rows = {name: min(most or size, size) for name, size in module.CONFIG.rows.items()}
    return module.workload(dataclasses.replace(module.CONFIG, rows=rows, **sizes))


def config_of(name):
    """Return a file of `configs` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"configs/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def many(tables):
    """Return features of so many tables, of three widths, and shapes of a batch."""
    names = {f"t{i:03d}": i for i in range(tables)}
    made = {n: TableConfig(1000 + i, (16, 32, 128)[i % 3], name=n) for n, i in names.items()}
    shape = jax.ShapeDtypeStruct((1024, 1), np.int32)
    return jax.tree.map(FeatureConfig, made), dict.fromkeys(names, shape)


def traced(name, features, optimizer, shapes):
    """Return an engine on a topology, the plan, and a state and a batch that are not there."""
    mesh = Mesh(np.array(describe_topology(planning.Topology(name))), ("devices",))
    placed = planning.resolve(features, optimizer, mesh=mesh)
    engine = EmbeddingEngine(placed, optimizer, mesh=mesh)
    plan = planning.plan(features, optimizer, name, shapes)
    return engine, plan, abstract_state(engine), abstract_batch(engine, plan.spec)


def stateful_programs(name, features, optimizer, shapes):
    """Compile the two programs that the stateful API runs; return them, and the plan."""
    engine, plan, state, batch = traced(name, features, optimizer, shapes)
    lookup = engine._programs.lookup.lower(state.tables, batch)
    gradients = jax.tree.leaves(lookup.out_info)
    reads = {name: [] for name in state.tables}
    operands = Operands(gradients, state.step, {}, reads)  # type: ignore[arg-type]
    rows, rest = (state.tables, state.slots), (state.step, state.counters)
    update = engine._programs.update_in_place.lower(rows, rest, batch, operands)
    return lookup.compile(), update.compile(), plan


def pipelined_step(name, features, optimizer, shapes):
    """Compile a step that looks up the next batch beside this batch's dense part."""
    engine, _, state, batch = traced(name, features, optimizer, shapes)
    activations = jax.eval_shape(engine.lookup, state, batch)
    dim = activations["items"].shape[-1]

    def step(state, following, activations, weights):
        ahead = engine.lookup(state, following)
        hidden = activations["items"]
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return ahead, hidden

    weights = [jax.ShapeDtypeStruct((dim, 4096), np.float32)]
    weights += [jax.ShapeDtypeStruct((4096, 4096), np.float32)] * 2
    return jax.jit(step).lower(state, batch, activations, weights).compile().as_text()
