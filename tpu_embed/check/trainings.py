"""Parts of the check that train small tables on all devices, and compare every number with loops.

Ids, weights and gradients are drawn; the form in which a feature gets its ids is made from the same
arrays as the bags that the loops read.

Input: the devices. Output: faults, and a line that says what was compared.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from tpu_embed import optimizers as o
from tpu_embed.check import oracle
from tpu_embed.check.report import BFLOAT16, FLOAT32, PartReport
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import RaggedIds, SparseIds
from tpu_embed.core.rows import host_arrays

RATE = 0.05
"""The learning rate of every optimizer."""
_ADAGRAD = o.Adagrad(RATE)
_ROWS, _EXAMPLES, _HOT, _STEPS = 40, 16, 4, 2
"""V of every table, so few that most rows come several times; the least B; H; steps of training."""
_OPTIONS = {
    "Momentum": {"use_nesterov": True},
    "AdagradMomentum": {"momentum": 0.9},
    "FTRL": {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.02},
    "RMSProp": {"momentum": 0.5},
    "CenteredRMSProp": {"momentum": 0.5},
    "ProximalAdagrad": {"l1": 0.01, "l2": 0.02},
}
"""Options of optimizers besides their rate, by name."""


def leaky_rule(gradient, row, slots, learning_rate, step):
    """Do what the oracle's formula of `CustomOptimizer` says, as a `CustomOptimizer` wants it."""
    trail = 0.5 * slots["trail"] + gradient / step.astype(gradient.dtype)
    return row - learning_rate * trail, {"trail": trail, "seen": slots["seen"] + 1}


def rules() -> list[Any]:
    """Return every optimizer."""
    bounds: Any = {"clipvalue": 0.5, "clip_weight_min": -0.2, "clip_weight_max": 0.3}
    *named, _ = oracle.FORMULAS  # the last one is that of `leaky_rule`
    return [
        *(getattr(o, name)(RATE, **_OPTIONS.get(name, {})) for name in named),
        o.SGD(RATE, weight_decay_factor=0.1, **bounds),
        o.Adagrad(RATE, use_gradient_accumulation=False),
        o.CustomOptimizer(leaky_rule, {"trail": 0, "seen": 0}, RATE),
    ]


def _table(name, dim, optimizer: Any = _ADAGRAD, **options):
    return TableConfig(_ROWS, dim, name=name, optimizer=optimizer, **options)


class Feature(NamedTuple):
    """A feature and what it gets in a batch.

    Attributes:
      config: its declaration.
      ids: as `place` takes them.
      bags: what these ids mean.
      gradients: of its activation in each step, `[steps, B, …, D]`.
    """

    config: FeatureConfig
    ids: Any
    bags: oracle.Bags
    gradients: np.ndarray


def _draw(tables, forms, size):
    """Draw a feature of each form for each table, in a batch that `size` devices divide.

    The forms are "one" id per example, "dense", "sequence" (dense, a row per position), "sparse"
    and "ragged"; the last two have weights.
    """
    rng, batch, found = np.random.default_rng(0), -(-_EXAMPLES // size) * size, {}
    for table, form in itertools.product(tables, forms):
        shape = (batch,) if form == "one" else (batch, _HOT)
        ids = rng.integers(0, _ROWS, shape).astype(np.int32)
        ids[rng.random(shape) < 0.3] = -1
        present = ids >= 0
        weights = np.ones(shape, np.float32)
        if form in ("sparse", "ragged"):
            weights = rng.uniform(0.5, 2, shape).astype(np.float32)
        # A bag for each id, or for each example.
        per_id = form in ("one", "sequence")
        pairs = [zip(ids.flat, weights.flat, strict=True)] * (1 if per_id else _HOT)
        bags = [[(i, w) for i, w in bag if i >= 0] for bag in zip(*pairs, strict=True)]
        means = oracle.Bags(bags, *((None, shape) if per_id else (table.combiner, shape[:1])))
        flat = ids[present], weights[present]
        if form == "sparse":
            ids = SparseIds(np.argwhere(present), flat[0], shape, flat[1])
        elif form == "ragged":
            ids = RaggedIds(flat[0], np.append(0, np.cumsum(present.sum(1))), flat[1])
        gradients = rng.normal(size=(_STEPS, *means.shape, table.dim)).astype(np.float32)
        config = FeatureConfig(table, max_sequence_length=_HOT * (form == "sequence"))
        found[f"{table.name}, {form}"] = Feature(config, ids, means, gradients)
    return found


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(engine, state, batch, gradients):
    activations = engine.lookup(state, batch)
    return engine.update(state, batch, gradients), activations


def _engine(devices, features, **options):
    """Return an engine on devices of one axis, "model", or `[data, model]`."""
    grid = np.asarray(devices)
    mesh = Mesh(grid, ("data", "model")[-grid.ndim :])
    configs = {name: one.config for name, one in features.items()}
    return EmbeddingEngine(configs, mesh=mesh, **options)


def _run(engine, features, *, placed=True):
    """Train; return tables and slots before, the activations of each step, both after."""
    state = engine.init(jax.random.key(0))
    found = [host_arrays(state, engine.layout)]
    batch = {name: one.ids for name, one in features.items()}
    batch = engine.place(batch) if placed else batch
    for t in range(_STEPS):
        gradients = {name: one.gradients[t] for name, one in features.items()}
        state, activations = _step(engine, state, batch, gradients)
        found.append(jax.device_get(activations))
    return [*found, host_arrays(state, engine.layout)]


def _train(tables, forms, devices, report, *, placed=True, tolerance=FLOAT32, **options):
    """Train tables, and compare all activations, and rows and slots in the end, with the loops."""
    features = _draw(tables, forms, np.size(devices))
    engine = _engine(devices, features, **options)
    (rows, slots), *steps, last = _run(engine, features, placed=placed)
    for table in tables:
        rounded, rule, name = table.dtype == "bfloat16", table.optimizer, str(table.name)
        compare = functools.partial(report.compare, tolerance=BFLOAT16 if rounded else tolerance)
        kind = type(rule).__name__
        where = f"table {name!r}, {kind}"
        formula = functools.partial(oracle.update_row, oracle.FORMULAS[kind], rule, lr=RATE)
        mine = {path: one for path, one in features.items() if one.config.table is table}
        held, held_slots = rows[name].astype(np.float64), slots[name]
        for t, activations in enumerate(steps):
            found = []
            for path, one in mine.items():
                right = oracle.lookup(held, one.bags)
                compare(f"{where}, step {t + 1}, feature {path!r}", right, activations[path])
                found += [pair[1:] for pair in oracle.row_gradients(one.bags, one.gradients[t])]
            if rule.use_gradient_accumulation:
                found = oracle.summed(found).items()
            held, held_slots = oracle.update(held, held_slots, found, formula, t + 1)
            if rounded:  # stored rows alone, to nearest even
                held = held.astype(ml_dtypes.bfloat16).astype(np.float64)
        compare(f"{where}, rows", held, last[0][name])
        for slot, right in held_slots.items():
            compare(f"{where}, slot {slot!r}", right, last[1][name][slot])


def check_inputs(devices: list[Any], report: PartReport) -> str:
    """Train with every form of input and every combiner."""
    tables = [_table(combiner, 8, combiner=combiner) for combiner in ("mean", "sum", "sqrtn")]
    forms = ("one", "dense", "sequence", "sparse", "ragged")
    _train(tables, forms, devices, report)
    return f"ids of {', '.join(forms)}; mean, sum, sqrtn"


def check_placements(devices: list[Any], report: PartReport) -> str:
    """Train tables of every placement and of awkward widths, also with rounded exchanges."""
    dims, placements = (1, 20, 130), ("mod", "div", "replicated")
    pairs = itertools.product(placements, dims)
    tables = [_table(f"{where}_{dim}", dim, placement=where) for where, dim in pairs]
    rounded = _table("bfloat16", 16, dtype="bfloat16")
    _train([*tables, rounded], ("ragged", "dense"), devices, report)
    # Rows and sums are rounded on their way in each of two steps. No row of a sequence cancels
    # another one.
    options = {"tolerance": 16 * BFLOAT16, "exchange_dtype": "bfloat16"}
    _train(tables[1:2], ("sequence",), devices, report, **options)
    return f"D = {', '.join(map(str, dims))}; {', '.join(placements)}; an exchange in bfloat16"


def check_mesh(devices: list[Any], report: PartReport) -> str:
    """Train tables that are split over one or both axes of a mesh, with a batch split over one."""
    if len(devices) % 2:
        return "not run: a mesh of two axes needs an even number of devices"
    tables = [
        _table("both_axes", 8),
        _table("one_axis", 8, shard_axes="model"),
        _table("batch_axis", 8, shard_axes="data", placement="div"),
        _table("no_axis", 8, placement="replicated"),
    ]
    grid = np.reshape(devices, (-1, 2))
    _train(tables, ("ragged", "sparse"), grid, report, batch_axes="data")
    return f"data {len(grid)} × model 2"


def check_traced_ids(devices: list[Any], report: PartReport) -> str:
    """Train with ids that the devices route themselves, inside a jit."""
    tables = [_table(name, 20, placement=name) for name in ("mod", "div", "replicated")]
    _train(tables, ("dense", "one"), devices, report, placed=False)
    return "ids in a jit, routed by the devices"


def check_rules(devices: list[Any], report: PartReport) -> str:
    """Train one table with every optimizer."""
    tables = [_table(f"rule_{i}", 5, optimizer=rule) for i, rule in enumerate(rules())]
    _train(tables, ("dense",), devices, report)
    return f"{len(tables)} optimizers"


def check_bits(devices: list[Any], report: PartReport) -> str:
    """Compare bits between numbers of devices on CPU, and between two runs everywhere."""
    cpu = all(device.platform == "cpu" for device in devices)
    counts = [n for n in (1, 2, 4, 8) if n <= len(devices)] if cpu else [len(devices)]
    tables = [
        _table("mod", 20),
        _table("div", 20, placement="div", dtype="bfloat16", optimizer=o.Lion(RATE)),
        _table("replicated", 7, placement="replicated"),
    ]
    features, right = _draw(tables, ("ragged", "dense"), counts[-1]), None
    for count in counts:
        engine = _engine(devices[:count], features)
        for again in ("", ", again"):
            found = _run(engine, features)
            right = right or jax.tree.leaves_with_path(found)
            for (path, expected), got in zip(right, jax.tree.leaves(found), strict=True):
                where = f"{jax.tree_util.keystr(path)} on {count} device(s){again}"
                report.compare(where, expected, got, tolerance=0)
    return f"the same bits on {', '.join(map(str, counts))} device(s), and in a second run"
