"""A state goes through engines of random layouts, the host and files, beside plain arrays.

Devices (any number of shards, placement, stack, packing and dtype), rows at home on the host and
files of a checkpoint: each gives its rows to the next, in blocks of any size. Other seeds:

    RANDOM_SEEDS=1000:2000 python -m pytest tests/core/rows/test_copy_rows.py
"""

import os

import jax
import numpy as np
import pytest
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig, io
from tpu_embed import optimizers as o

# The last case, which `make test` runs, has three tables with slots, in several blocks.
MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "0:988").split(":")))
RULES = (o.SGD(0.1), o.Adagrad(0.1), o.RowWiseAdagrad(0.1))
HOLDERS = ("devices", "host", "devices", "file", "devices", "host", "file", "devices")


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.quick(2)
def test_rows_are_the_same_everywhere(seed, tmp_path, monkeypatch):
    rng = np.random.default_rng(seed)
    dim, dtype = int(rng.integers(1, 40)), str(rng.choice(["float32", "bfloat16"]))
    rule = RULES[rng.integers(len(RULES))]
    sizes = {f"{i}": int(rng.integers(1, 60)) for i in range(rng.integers(1, 4))}
    small = int(rng.integers(1, 200))
    monkeypatch.setattr("tpu_embed.core.rows.devices.BLOCK", small)
    monkeypatch.setattr("tpu_embed.io.checkpoint.row_files.BLOCK", small)

    def make(on_host):
        packing = rng.choice(["none", "lanes", "words"])
        monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
        tables = []
        for name, size in sizes.items():
            options = {"placement": str(rng.choice(["mod", "div", "replicated"]))}
            if on_host and rng.random() < 0.7:
                options = {"storage": HostStorage(device_rows=int(rng.integers(1, size + 1)))}
            tables.append(TableConfig(size, dim, dtype=dtype, name=name, **options))
        features = [FeatureConfig(tables[i]) for i in rng.permutation(len(tables))]
        return EmbeddingEngine(features, rule, mesh=mesh(int(rng.integers(1, 9))))

    engine = make(on_host=False)
    state = engine.init(jax.random.key(0))
    shapes = jax.eval_shape(lambda s: (engine.tables(s), engine.slots(s)), state)
    wanted = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), shapes)
    state = engine.load_arrays(state, *wanted)
    for number, holder in enumerate(HOLDERS):
        other = make(on_host=holder == "host")
        if holder == "file":
            io.save(tmp_path / f"{number}", engine, state)
            state = io.restore(tmp_path / f"{number}", other).state
        else:
            state = other.adopt(state, engine)
        engine = other
        for name, size in sizes.items():
            ids = rng.permutation(size)
            for slot, rows in {None: wanted[0][name], **wanted[1][name]}.items():
                found = np.asarray(engine.rows(state, name, ids, slot=slot))
                assert found.tobytes() == rows[ids].tobytes(), (holder, name, slot)
