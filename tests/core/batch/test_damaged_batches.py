"""Numbers of a placed batch that something has changed: no kernel leaves its buffers.

A batch is a pytree, so `jax.tree.map` may change it, and so may a damaged file. Results are then
worth nothing, but the process goes on.
"""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
from facade_cases import mesh

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed import optimizers as o

HOSTILE = np.array([-(2**31), -2, -1, 0, 1, 7, 63, 64, 100, 1000, 2**30, 2**31 - 1], np.int32)
V, B, ROUNDS = 50, 16, 8


def damage(devices: int, seed: int) -> None:
    """Look up and update by batches in which some, many or all numbers were changed."""
    rng = np.random.default_rng(seed)
    narrow = TableConfig(1000, 3, name="narrow", combiner="sqrtn")
    wide = TableConfig(V, 8, name="wide", placement=("mod", "replicated")[seed % 2])
    features = {
        "bag": FeatureConfig(wide),
        "single": FeatureConfig(narrow),
        "history": FeatureConfig(wide, jagged=bool(seed & 2), max_sequence_length=3),
    }
    engine = tpu_embed.EmbeddingEngine(features, o.Adagrad(0.1), mesh=mesh(devices))
    state = engine.init(jax.random.key(0))

    def bags():
        return RaggedIds.from_lists([rng.integers(0, V, n) for n in rng.integers(6, size=B)])

    ids = {"bag": bags(), "history": bags(), "single": rng.integers(0, 1000, (B, 3))}
    weights = {**dict.fromkeys(ids), "single": rng.uniform(0.5, 2, (B, 3))}
    batch = engine.place(ids, weights)
    given = engine.lookup(state, batch)

    @jax.jit
    def step(state, batch):
        return engine.lookup(state, batch), engine.update(state, batch, given)

    for round_ in range(ROUNDS):
        shape = batch.packed.shape
        changed = rng.random(shape) < rng.choice([0.02, 0.3, 1])
        any_number = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
        numbers = rng.choice(HOSTILE, shape) if round_ % 2 else any_number
        packed = np.where(changed, numbers, batch.packed)
        placed = jax.device_put(packed, batch.packed.sharding)
        jax.block_until_ready(step(state, dataclasses.replace(batch, packed=placed)))


@pytest.mark.parametrize(("first", "end"), [(3, 40), (1, 2), (2, 3)])
@pytest.mark.quick(1)
def test_damaged_numbers_end_no_process(first, end):
    program = "import conftest, quick_rows, test_damaged_batches as here\n"
    program += "from tpu_embed.core.layout import layout\n"
    program += "layout.initializer_of = quick_rows.initializer_of\n"
    program += f"for seed in range({first}, {end}):\n"
    program += "  for devices in (1, 2): here.damage(devices, seed)"
    paths = f"import sys; sys.path[:0] = {sys.path!r}\n"
    folder = __file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", paths + program], check=True, cwd=folder)
