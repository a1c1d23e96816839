"""Parts of the check that train small tables on all devices, and compare every number with loops.

Ids, weights and gradients are drawn; the form in which a feature gets its ids is made from the same
arrays as the bags that the loops read.

Input: the devices. Output: faults, and a line that says what was compared.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import optax
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
_ROWS, _EXAMPLES, _HOT, _STEPS = 40, 16, 4, 2
"""V of every table, so few that most rows come several times; the least B; H; steps of training."""


def leaky_rule(gradient: Any, row: Any, slots: Any, learning_rate: Any, step: Any) -> Any:
    """Do what the oracle's formula of `CustomOptimizer` says, as a `CustomOptimizer` wants it."""
    trail = 0.5 * slots["trail"] + gradient / step.astype(gradient.dtype)
    return row - learning_rate * trail, {"trail": trail, "seen": slots["seen"] + 1}


def rules() -> list[Any]:
    """Return every optimizer."""
    return [
        o.SGD(RATE),
        o.SGD(
            RATE, weight_decay_factor=0.1, clipvalue=0.5, clip_weight_min=-0.2, clip_weight_max=0.3
        ),
        o.Momentum(RATE, use_nesterov=True),
        o.Adagrad(RATE),
        o.Adagrad(RATE, use_gradient_accumulation=False),
        o.RowWiseAdagrad(RATE),
        o.AdagradMomentum(RATE, momentum=0.9),
        o.FTRL(RATE, l1_regularization_strength=0.01, l2_regularization_strength=0.02),
        o.Adam(RATE),
        o.LAMB(RATE),
        o.Lion(RATE),
        o.RMSProp(RATE, momentum=0.5),
        o.CenteredRMSProp(RATE, momentum=0.5),
        o.Adadelta(RATE),
        o.ProximalAdagrad(RATE, l1=0.01, l2=0.02),
        o.Yogi(RATE),
        o.CustomOptimizer(leaky_rule, {"trail": 0, "seen": 0}, RATE),
        optax.sgd(RATE, momentum=0.8),
    ]


def _formula(rule: Any) -> oracle.Rule:
    """Return the oracle's formula of one of the rules."""
    if isinstance(rule, optax.GradientTransformation):
        return _momentum_of_optax
    formula = oracle.FORMULAS[type(rule).__name__]
    return functools.partial(oracle.update_row, formula, rule, lr=RATE)


def _momentum_of_optax(w: np.ndarray, s: oracle.Slots, g: np.ndarray, t: int) -> oracle.Updated:
    ((name, trail),) = s.items()
    trail = 0.8 * trail + g
    return w - RATE * trail, {name: trail}


def _table(name: str, dim: int, **options: Any) -> TableConfig:
    return TableConfig(_ROWS, dim, name=name, **{"optimizer": o.Adagrad(RATE)} | options)


class Feature(NamedTuple):
    """A feature and what it gets in a batch.

    Attributes:
      config: its declaration.
      ids: as `place` takes them.
      weights: likewise; None where the container of the ids has them, or all are one.
      bags: what these ids mean.
      gradients: of its activation in each step, `[steps, B, …, D]`.
    """

    config: FeatureConfig
    ids: Any
    weights: Any
    bags: oracle.Bags
    gradients: np.ndarray


def _draw(tables: Sequence[TableConfig], forms: Sequence[str], size: int) -> dict[str, Feature]:
    """Draw a feature of each form for each table, in a batch that `size` devices divide.

    The forms are "one" id per example, "dense", "sequence" (dense, a row per position), "sparse"
    and "ragged"; the last three have weights.
    """
    rng, batch, found = np.random.default_rng(0), -(-_EXAMPLES // size) * size, {}
    for table, form in itertools.product(tables, forms):
        shape = (batch,) if form == "one" else (batch, _HOT)
        ids = rng.integers(0, _ROWS, shape).astype(np.int32)
        present = rng.random(shape) < 0.7
        ids[~present] = -1
        weights = rng.uniform(0.5, 2, shape).astype(np.float32)
        if form in ("one", "dense"):
            weights[:] = 1
        # A bag for each id, or for each example.
        per_id = form in ("one", "sequence")
        pairs = [zip(ids.flat, weights.flat, strict=True)] * (1 if per_id else _HOT)
        bags = [[(i, w) for i, w in bag if i >= 0] for bag in zip(*pairs, strict=True)]
        means = oracle.Bags(bags, *((None, shape) if per_id else (table.combiner, shape[:1])))
        own, given, length = weights[present], None, 0
        if form == "sequence":
            given, length = weights, _HOT
        elif form == "sparse":
            ids = SparseIds(np.argwhere(present), ids[present], shape, own)
        elif form == "ragged":
            ids = RaggedIds(ids[present], np.append(0, np.cumsum(present.sum(1))), own)
        gradients = rng.normal(size=(_STEPS, *means.shape, table.dim)).astype(np.float32)
        config = FeatureConfig(table, max_sequence_length=length)
        found[f"{table.name}, {form}"] = Feature(config, ids, given, means, gradients)
    return found


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(engine: EmbeddingEngine, state: Any, batch: Any, gradients: Any) -> Any:
    activations = engine.lookup(state, batch)
    return engine.update(state, batch, gradients), activations


def _engine(features: dict[str, Feature], mesh: Mesh, **options: Any) -> EmbeddingEngine:
    configs = {name: one.config for name, one in features.items()}
    return EmbeddingEngine(configs, mesh=mesh, **options)


def _run(engine: EmbeddingEngine, features: dict[str, Feature], *, placed: bool = True) -> Any:
    """Train; return tables and slots before, the activations of each step, both after."""
    state = engine.init(jax.random.key(0))
    found: list[Any] = [host_arrays(state, engine.layout)]
    batch: Any = {name: one.ids for name, one in features.items()}
    if placed:
        batch = engine.place(batch, {name: one.weights for name, one in features.items()})
    for t in range(_STEPS):
        gradients = {name: one.gradients[t] for name, one in features.items()}
        state, activations = _step(engine, state, batch, gradients)
        found.append(jax.device_get(activations))
    return [*found, host_arrays(state, engine.layout)]


def _train(
    tables: Sequence[TableConfig],
    forms: Sequence[str],
    mesh: Mesh,
    report: PartReport,
    *,
    placed: bool = True,
    tolerance: float = FLOAT32,
    **options: Any,
) -> None:
    """Train tables, and compare all activations, and rows and slots in the end, with the loops."""
    features = _draw(tables, forms, mesh.size)
    (rows, slots), *steps, last = _run(_engine(features, mesh, **options), features, placed=placed)
    for table in tables:
        name, allowed = str(table.name), BFLOAT16 if table.dtype == "bfloat16" else tolerance
        compare = functools.partial(report.compare, tolerance=allowed)
        where = f"table {name!r}, {type(table.optimizer).__name__}"
        mine = {path: one for path, one in features.items() if one.config.table is table}
        held, held_slots = rows[name].astype(np.float64), slots[name]
        for t, activations in enumerate(steps):
            found = []
            for path, one in mine.items():
                right = oracle.lookup(held, one.bags)
                compare(f"{where}, step {t + 1}, feature {path!r}", right, activations[path])
                found += [pair[1:] for pair in oracle.row_gradients(one.bags, one.gradients[t])]
            if getattr(table.optimizer, "use_gradient_accumulation", True):
                found = oracle.summed(found).items()
            rule = _formula(table.optimizer)
            held, held_slots = oracle.update(held, held_slots, found, rule, t + 1)
            # Only stored rows are rounded, to nearest even; slots never are.
            if table.dtype == "bfloat16":
                held = held.astype(ml_dtypes.bfloat16).astype(np.float64)
        compare(f"{where}, rows", held, last[0][name])
        for slot, right in held_slots.items():
            compare(f"{where}, slot {slot!r}", right, last[1][name][slot])


def _mesh(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.asarray(devices), ("devices",))


def check_inputs(devices: Sequence[Any], report: PartReport) -> str:
    """Train with every form of input and every combiner."""
    tables = [_table(combiner, 8, combiner=combiner) for combiner in ("mean", "sum", "sqrtn")]
    forms = ("one", "dense", "sequence", "sparse", "ragged")
    _train(tables, forms, _mesh(devices), report)
    return f"ids of {', '.join(forms)}; mean, sum, sqrtn"


def check_placements(devices: Sequence[Any], report: PartReport) -> str:
    """Train tables of every placement and of awkward widths, also with rounded exchanges."""
    widths = {"mod": (1, 8, 20, 130), "div": (1, 16), "replicated": (1, 7)}
    tables = [
        _table(f"{placement}_{dim}", dim, placement=placement)
        for placement, dims in widths.items()
        for dim in dims
    ]
    tables.append(_table("bfloat16_20", 20, dtype="bfloat16"))
    _train(tables, ("ragged", "dense"), _mesh(devices), report)
    # Rows and sums are rounded on their way in each of two steps. No row of a sequence cancels
    # another one.
    options: Any = {"tolerance": 16 * BFLOAT16, "exchange_dtype": "bfloat16"}
    _train(tables[1:3], ("sequence",), _mesh(devices), report, **options)
    dims = sorted({table.dim for table in tables})
    return f"D = {', '.join(map(str, dims))}; mod, div, replicated; an exchange in bfloat16"


def check_mesh(devices: Sequence[Any], report: PartReport) -> str:
    """Train tables that are split over one or both axes of a mesh, with a batch split over one."""
    if len(devices) % 2:
        return "not run: a mesh of two axes needs an even number of devices"
    mesh = Mesh(np.asarray(devices).reshape(-1, 2), ("data", "model"))
    tables = [
        _table("both_axes", 8),
        _table("one_axis", 8, shard_axes="model"),
        _table("batch_axis", 8, shard_axes="data", placement="div"),
        _table("no_axis", 8, placement="replicated"),
    ]
    _train(tables, ("ragged", "sparse"), mesh, report, batch_axes="data")
    return " × ".join(f"{name} {size}" for name, size in mesh.shape.items())


def check_traced_ids(devices: Sequence[Any], report: PartReport) -> str:
    """Train with ids that the devices route themselves, inside a jit."""
    tables = [_table(name, 20, placement=name) for name in ("mod", "div", "replicated")]
    _train(tables, ("dense", "one"), _mesh(devices), report, placed=False)
    return "ids in a jit, routed by the devices"


def check_rules(devices: Sequence[Any], report: PartReport) -> str:
    """Train one table with every optimizer."""
    tables = [_table(f"rule_{i}", 5, optimizer=rule) for i, rule in enumerate(rules())]
    _train(tables, ("dense",), _mesh(devices), report)
    return f"{len(tables)} optimizers"


def check_bits(devices: Sequence[Any], report: PartReport) -> str:
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
        engine = _engine(features, _mesh(devices[:count]))
        for again in ("", ", again"):
            found = _run(engine, features)
            right = right or jax.tree.leaves_with_path(found)
            for (path, expected), got in zip(right, jax.tree.leaves(found), strict=True):
                where = f"{jax.tree_util.keystr(path)} on {count} device(s){again}"
                report.compare(where, expected, got, tolerance=0)
    return f"the same bits on {', '.join(map(str, counts))} device(s), and in a second run"
