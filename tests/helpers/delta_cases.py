"""Engines, steps and servers, for the tests of deltas."""

import dataclasses

import jax
import numpy as np
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig
from tpu_embed.io import TouchedRows, export_delta

BATCH, V = 16, 61


def make_engine(optimizer, devices=8, placement="mod", dtype="float32"):
    """Return an engine of two stacked tables, one of whose rows are few, and one that is fixed."""
    by_row = tpu_embed.RowIdInitializer()
    kind = {"dtype": dtype, "placement": placement, "initializer": by_row}
    item = TableConfig(V, 5, name="item", combiner="sum", **kind)
    features = {
        "item": FeatureConfig(item, on_bad_id="drop"),
        "seen": FeatureConfig(item, max_sequence_length=2, on_bad_id="clip"),
        "tags": FeatureConfig(TableConfig(7, 5, name="day.of/week", **kind)),
        "fixed": FeatureConfig(TableConfig(9, 3, by_row, name="fixed", trainable=False)),
    }
    return tpu_embed.EmbeddingEngine(features, optimizer, mesh=mesh(devices))


def draw(step):
    rng = np.random.default_rng(step)
    seen = [rng.integers(0, V + 9, rng.integers(0, 4)).tolist() for _ in range(BATCH)]
    tags = [rng.integers(0, 7, rng.integers(0, 3)).tolist() for _ in range(BATCH)]
    return {
        "item": rng.integers(-9, 30, (BATCH, 2)),
        "seen": tpu_embed.RaggedIds.from_lists(seen),
        "tags": tpu_embed.SparseIds.from_lists(tags, weights=[[0.5] * len(bag) for bag in tags]),
        "fixed": rng.integers(0, 9, BATCH),
    }


def trained(engine, state, touched, steps):
    """Return the state after some updates, recorded as batches and as features."""
    spec = tpu_embed.BatchSpec.union(*(engine.place(draw(step)).spec for step in range(1, 5)))
    for step in range(int(state.step) + 1, int(state.step) + steps + 1):
        batch, rng = engine.place(draw(step), spec=spec), np.random.default_rng(step)
        touched.record(batch if step % 2 else draw(step), step)
        shapes = jax.eval_shape(engine.lookup, state, batch)
        gradients = jax.tree.map(lambda a, r=rng: r.normal(size=a.shape).astype(a.dtype), shapes)
        state = engine.update_in_place(state, batch, gradients)
    return state


def rewritten(engine, state, touched, steps):
    """Return the state with other rows where updates would have changed them: few programs."""
    for step in range(int(state.step) + 1, int(state.step) + steps + 1):
        touched.record(draw(step), step)
        rng, tables = np.random.default_rng(step), copied(engine, state)
        for name, ids in touched.since(step - 1).items():
            if ids.size:
                tables[name][ids] = rng.normal(size=(ids.size, tables[name].shape[1]))
                state = engine.load(state, name, [tables[name]])
    return dataclasses.replace(state, step=jax.numpy.int32(state.step + steps))


def copied(engine, state):
    """Return the tables as writable NumPy arrays."""
    return {name: np.array(table) for name, table in engine.tables(state).items()}


def published(tmp_path, engine, change=rewritten, *, deltas=2, steps=2):
    """Return tables as they were, their version, the live state, and the deltas in between."""
    state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
    tables, version = copied(engine, state), touched.version(state)
    paths, last = [], version
    for n in range(deltas):
        state = change(engine, state, touched, steps)
        paths.append(tmp_path / f"delta-{n}")
        last = export_delta(paths[-1], engine, state, touched, since=last)
    return tables, version, state, paths
