"""The parts of the check, what they report, and the loop that runs them one after the other.

When a table is wrong, the part that runs each kernel by itself, on every device, beside NumPy, says
which kernel is to blame. On a TPU with SparseCores these are the Pallas kernels, on a CPU the
compiled ones.

Other parts train small tables on all devices, and compare every number with loops. Ids, weights and
gradients are drawn; the form in which a feature gets its ids is made from the same arrays as the
bags that the loops read.

The last part times. The speed is that of a training step beside a copy. The workload is MLPerf's
DLRM-DCNv2 without its network: 26 tables, 214 ids per sample, D = 128, Adagrad. The tables have
fewer rows, as many as a part of the memory holds. The copy, `x + 1` of a large array, shows what
the memory of the device can do at best.

Input: the devices, and which parts to run. Output: a `PartReport` for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embed import optimizers as o
from tpu_embed.check import oracle
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import RaggedIds, SparseIds
from tpu_embed.core.rows import host_arrays
from tpu_embed.kernels import dispatch, rounded, storage
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat, packing_of
from tpu_embed.kernels.operands import RowsToSum, SumLayout
from tpu_embed.planning import CHIPS, costs

# -- reports ---------------------------------------------------------------------------------------

FLOAT32 = 2e-4
"""How far float32 may be from float64: the formulas round 0.999 and 1 - 0.999 to 24 bits, which
alone moves a velocity by 5e-5. Wrong rows or rules differ by far more."""

BFLOAT16 = 2.0**-7
"""Rows of bfloat16 have 8 bits, of which the last may differ where float32 is nearly a tie."""

_LINES, _FAULTS = 12, 8
"""Lines of an exception's message, and faults of a part, that are shown."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
      where: for example "table 'films', Adam, slot 'momenta'".
      expected: what would have been right.
      got: what was found.
      trace: the traceback of an exception, or "".
    """

    where: str
    expected: str
    got: str
    trace: str = ""


@dataclasses.dataclass
class PartReport:
    """What one part found; it fills while the part runs.

    Attributes:
      name: the name of the part.
      seconds: how long it ran.
      what: what was compared or measured, as text; "" if the part did not come to its end.
      faults: what is wrong.
      figures: what was measured, by name.
    """

    name: str
    seconds: float = 0.0
    what: str = ""
    faults: list[Fault] = dataclasses.field(default_factory=list)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def explain(self, *, verbose: bool = False) -> str:
        """Return the part as text: a line for the part, and three lines for each fault.

        Args:
          verbose: whether the traceback of an exception is shown.
        """
        state = "ok" if self.ok else "FAILED"
        lines = [f"{self.name:12}{state:8}{self.seconds:6.1f} s  {self.what}".rstrip()]
        for fault in self.faults[:_FAULTS]:
            lines += [f"  {fault.where}", f"    expected {fault.expected}", f"    got {fault.got}"]
            lines += [fault.trace] if verbose and fault.trace else []
        if len(self.faults) > _FAULTS:
            lines.append(f"  and {len(self.faults) - _FAULTS} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the part as an object that JSON can hold."""
        return dataclasses.asdict(self) | {"ok": self.ok}

    def compare(
        self, where: str, expected: np.ndarray, got: Any, *, tolerance: float = FLOAT32
    ) -> None:
        """Note where two arrays differ.

        Args:
          where: what is compared.
          expected: the right numbers.
          got: an array, of NumPy or JAX, of any float dtype; integers are compared as they are.
          tolerance: the largest difference, relative to the number or, for small numbers, to the
            hundredth part of the largest; 0: the bits must be the same.
        """
        found = np.asarray(got)
        if found.shape != expected.shape:
            self.faults.append(Fault(f"{where}, shape", f"{expected.shape}", f"{found.shape}"))
            return
        if tolerance:
            found, right = found.astype(np.float64), expected.astype(np.float64)
            scale = np.abs(right) + 0.01 * np.max(np.abs(right), initial=0.0)
            wrong = ~(np.abs(found - right) <= tolerance * scale)
        else:
            # Bits: the signs of zeros count, and a NaN equals itself.
            wrong = np.not_equal(
                *(np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (found, expected))
            )
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            count = f"{np.count_nonzero(wrong)} of {wrong.size} numbers differ, first at {first}"
            self.faults.append(Fault(f"{where}: {count}", f"{expected[first]}", f"{found[first]}"))

    @contextlib.contextmanager
    def during(self, where: str) -> Iterator[None]:
        """Note an exception, and go on after the block."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = "\n".join(lines[:_LINES] + ["…"] * (len(lines) > _LINES))
            frames = traceback.extract_tb(error.__traceback__)
            frame = next(one for one in reversed(frames) if one.name != "refuse")
            got = f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
            trace = "".join(traceback.format_exception(error))
            self.faults.append(Fault(where, "no exception", got, trace))


# -- kernels ---------------------------------------------------------------------------------------

DIMS = (1, 7, 8, 16, 20, 128, 130)
"""One number, multiples of the 8 and 16 lanes of SparseCores and others, and more than a line."""
_TRIED_ROWS, _ENTRIES, _SUMS = PACKED_ROWS, 300, SumLayout((40,))
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_SPECIAL = (0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1e-39)
"""Both zeros, infinities, NaN, the greatest number, a tie to either side, one below 2⁻¹²⁶."""

# A kernel takes the format of a table, its stored rows [R, D], bfloat16 as uint16, the format that
# they are sent in if they are rounded on their way, and four arrays: index [N], of rows and numbers
# that are none; segments [N], ascending, the sum of each entry; weights [N]; and places [R], the
# rows to write, every second of which is none.


def _read(form, rows, sent, index, *_):
    array = form.pack(rows).reshape(form.array(_TRIED_ROWS).shape)
    if sent:
        return sent.unpack(rounded.read_rows(array, index, form, sent))
    return form.unpack(dispatch.read_rows(array, index, form))


def _write(form, rows, sent, index, segments, weights, places):
    array = form.pack(rows).reshape(form.array(_TRIED_ROWS).shape)
    array = dispatch.write_rows(array, places, rows[::-1], form)
    return form.unpack(form.by_row(array))[:_TRIED_ROWS]


def _add(form, rows, sent, index, segments, weights, places):
    given = RowsToSum(rows, index, segments, weights if form.dtype == _FLOAT32 else None)
    if sent:
        return storage.widened(sent.unpack(rounded.gather_sum(given, _SUMS, sent)))
    return dispatch.gather_sum(given, _SUMS)[0]


# The same in NumPy, of the rows as they are.


def _rows_read(rows, index, *_):
    present = (index >= 0) & (index < _TRIED_ROWS)
    return np.where(present[:, None], rows[index % _TRIED_ROWS], rows.dtype.type(0))


def _rows_written(rows, index, segments, weights, places):
    new, written = rows.copy(), places >= 0
    new[places[written]] = rows[::-1][written]
    return new


def _rows_added(rows, index, segments, weights, places):
    sums, found = np.zeros((*_SUMS.bags, rows.shape[1])), _rows_read(rows, index)
    factors = weights[:, None] if rows.dtype == _FLOAT32 else 1.0
    np.add.at(sums, segments, factors * found.astype(np.float64))
    return sums


TRIALS = {
    "gather_rows": (_read, _rows_read, 0),
    "set_rows": (_write, _rows_written, 0),
    "gather_sum": (_add, _rows_added, FLOAT32),
    "rounded gather_rows": (_read, _rows_read, 0),
    "rounded gather_sum": (_add, _rows_added, BFLOAT16),
}
"""Each kernel, what it should do, and how far it may be from that."""


def check_kernels(devices: list[Any], report: PartReport) -> str:
    """Run the kernels for rows of several widths and dtypes on every device."""
    rng, packing = np.random.default_rng(0), packing_of(devices[0])
    index = rng.integers(0, _TRIED_ROWS, _ENTRIES).astype(np.int32)
    index[::9] = rng.choice([-1, _TRIED_ROWS, -_TRIED_ROWS, 2**31 - 1], len(index[::9]))
    segments = np.sort(rng.integers(0, _SUMS.bags[0], _ENTRIES)).astype(np.int32)
    weights = rng.uniform(0.5, 2, _ENTRIES).astype(np.float32)
    places = np.where(np.arange(_TRIED_ROWS) % 2, -1, np.arange(_TRIED_ROWS)[::-1]).astype(np.int32)
    asked = index, segments, weights, places
    for name, (kernel, right, tolerance) in TRIALS.items():
        rounds = name.startswith("rounded")  # exchanges round rows of float32 alone
        dtypes = (_FLOAT32,) if rounds else (_FLOAT32, _BFLOAT16)
        forms = [RowFormat((d,), dtype, packing) for dtype in dtypes for d in DIMS]
        tables = [rng.normal(size=(_TRIED_ROWS, *form.shape)).astype(form.dtype) for form in forms]
        if not tolerance:
            for rows in tables:
                rows[: len(_SPECIAL)] = np.array(_SPECIAL, rows.dtype)[:, None]

        def of_tables(tables, *asked, kernel=kernel, forms=forms, rounds=rounds):
            sent = [rounds and dataclasses.replace(form, dtype=_BFLOAT16) for form in forms]
            return [kernel(*one, *asked) for one in zip(forms, tables, sent, strict=True)]

        with report.during(f"kernel {name}"):
            found = on_each(devices, of_tables)([_stored(rows) for rows in tables], *asked)
            for form, rows, got in zip(forms, tables, jax.device_get(found), strict=True):
                expected = right(rows, *asked)
                expected = expected.astype(_BFLOAT16) if rounds and not tolerance else expected
                what = f"kernel {name}, D = {form.shape[0]}, {form.dtype}"
                _compare(report, what, _stored(expected), got, tolerance)
    with report.during("kernel sort_rows"):
        order = np.argsort(index, kind="stable").astype(np.int32)
        ordered, positions = jax.device_get(on_each(devices, dispatch.sort_rows)(index))
        _compare(report, "kernel sort_rows, rows", index[order], ordered)
        _compare(report, "kernel sort_rows, positions", order, positions)
    return f"{', '.join(TRIALS)}, sort_rows; D = {', '.join(map(str, DIMS))}"


def _stored(rows):
    return rows.view(np.uint16) if rows.dtype == _BFLOAT16 else rows


def _compare(report, what, right, got, tolerance=0):
    on_all = np.broadcast_to(right, (len(got), *right.shape))
    report.compare(f"{what}, by device", on_all, got, tolerance=tolerance)


def on_each(devices, kernel):
    """Return a jitted kernel that runs on every device, with results `[devices, …]`."""

    def stacked(*operands):
        return jax.tree.map(lambda array: array[None], kernel(*operands))

    mesh, split = Mesh(np.asarray(devices), ("devices",)), PartitionSpec("devices")
    whole = PartitionSpec()
    return jax.jit(
        jax.shard_map(stacked, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False)
    )


# -- trainings -------------------------------------------------------------------------------------

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
    *named, _, _ = oracle.FORMULAS  # the last two are those of rules of one's own
    bounds: Any = {"clipvalue": 0.5, "clip_weight_min": -0.2, "clip_weight_max": 0.3}
    return [
        *(getattr(o, name)(RATE, **_OPTIONS.get(name, {})) for name in named),
        o.SGD(RATE, weight_decay_factor=0.1, **bounds),
        o.Adagrad(RATE, use_gradient_accumulation=False),
        o.CustomOptimizer(leaky_rule, {"trail": 0, "seen": 0}, RATE),
        o.OptaxOptimizer(optax.sgd(RATE, momentum=0.8)),
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
        present = rng.random(shape) < 0.7
        ids = np.where(present, rng.integers(0, _ROWS, shape, np.int32), -1)
        weighted = form in ("sparse", "ragged")
        weights = rng.uniform(0.5, 2, shape) if weighted else np.ones(shape)
        weights = weights.astype(np.float32)
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
        # An optax transform has no bounds, and no decay: as few as the default rule.
        options = _ADAGRAD if isinstance(rule, o.OptaxOptimizer) else rule
        formula = functools.partial(oracle.update_row, oracle.FORMULAS[kind], options, lr=RATE)
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


# -- speed -----------------------------------------------------------------------------------------

_TABLES = """
    40000000x3 39060x2 17295x1 7424x2 20265x6 3x1 7122x1 1543x1 63x1 40000000x7 3067956x3
    405282x8 10x1 2209x6 11938x9 155x5 4x1 976x1 14x1 40000000x12 40000000x100 40000000x27
    590152x10 12973x3 108x1 36x1
"""
"""Rows of each table, and its ids per sample."""
_DIM = 128
_BATCH, _CPU_BATCH = 4096, 512
"""Samples per chip, as in the public figure of jax-tpu-embedding; and in all on CPUs, which are
slower and may be emulated."""

_PART_OF_MEMORY, _CPU_BYTES = 4, 2**28
_ROUNDS, _SECONDS = 20, 2.0


def check_speed(devices: list[Any], report: PartReport) -> str:
    """Time a copy, a lookup, a training step and the placing of a batch; return lines.

    The figures are the devices and chips (which may have two devices each), the samples of a batch,
    the rows of the largest table, the seconds of each call, and the 10⁹ bytes per second and device
    that it must move at the least. Placing overlaps with steps in training.
    """
    mesh, count = Mesh(np.asarray(devices), ("devices",)), len(devices)
    of_chips = {chip.device_kind: chip.devices for chip in CHIPS.values()}
    chips = count / of_chips.get(devices[0].device_kind, 1)
    samples = round(_BATCH * chips) // count * count
    if devices[0].platform == "cpu":
        samples = max(1, _CPU_BATCH // count) * count
    # The bytes of tables and slots on all devices; a CPU's are few, so that it is tried quickly.
    memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    budget = memory // _PART_OF_MEMORY * count if memory else _CPU_BYTES
    numbers = budget // count // 8
    sharding = NamedSharding(mesh, PartitionSpec("devices"))
    zeros = jnp.zeros(count * numbers, jnp.float32, device=sharding)
    copy = 8 * numbers / _median(jax.jit(lambda x: x + 1, donate_argnums=0), zeros) / 1e9
    sizes, hots = np.array([one.split("x") for one in _TABLES.split()], int).T
    while sizes.sum() * _DIM * 4 * 2 > budget:  # half the largest ones, again and again
        sizes = np.minimum(sizes, sizes.max() // 2)
    largest, rng = int(sizes.max()), np.random.default_rng(0)
    ids = [
        rng.integers(0, rows, (samples, hot), np.int32)
        for rows, hot in zip(sizes, hots, strict=True)
    ]
    features = [FeatureConfig(TableConfig(int(rows), _DIM, combiner="sum")) for rows in sizes]
    engine = EmbeddingEngine(features, o.Adagrad(0.01), mesh=mesh)
    batch, state, look = engine.place(ids), engine.init(jax.random.key(0)), jax.jit(engine.lookup)
    # The gradients that a loss of half the sum of squares would give.
    train = jax.jit(
        lambda state, batch: engine.update(state, batch, engine.lookup(state, batch)),
        donate_argnums=0,
    )
    place = _median(lambda _: engine.place(ids).packed)
    lookup = _median(lambda _: look(state, batch))
    step = _median(lambda state: train(state, batch), state)
    per_chip, moved = samples / step / chips, costs.moved(engine.layout, batch.spec)
    figures = report.figures = {
        "devices": count,
        "chips": chips,
        "samples": samples,
        "table_rows": largest,
        "copy_gb_per_second": copy,
        "lookup_seconds": lookup,
        "lookup_gb_per_second": moved["lookup"] / lookup / 1e9,
        "step_seconds": step,
        "step_gb_per_second": sum(moved.values()) / step / 1e9,
        "place_seconds": place,
        "samples_per_second_and_chip": per_chip,
    }
    lines = [
        f"26 tables of at most {largest:,} rows x {_DIM}, Adagrad; "
        f"{samples:,} samples of 214 uniform ids",
        f"{'copy':8}{copy:,.1f} GB/s a device, read and written",
    ]
    for name in ("lookup", "step"):
        seconds, speed = figures[f"{name}_seconds"], figures[f"{name}_gb_per_second"]
        rate = f"{samples / count / seconds:12,.0f} samples/s and {speed:,.1f} GB/s a device"
        lines.append(f"{name:8}{seconds * 1e3:9.2f} ms{rate}, {speed / copy:.2f} of the copy")
    lines.append(f"{'place':8}{place * 1e3:9.2f} ms on the host")
    if devices[0].device_kind.startswith("TPU"):
        lines.append(f"{per_chip:,.0f} samples/s a chip")
    return "\n  ".join(lines)


def _median(call, held=None):
    """Return the median time of `held = call(held)` in seconds, after two that warm up."""
    times = []
    while len(times) < 5 or (len(times) < _ROUNDS and sum(times[2:]) < _SECONDS):
        start = time.perf_counter()
        held = jax.block_until_ready(call(held))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


PARTS: dict[str, Callable[[list[Any], PartReport], str]] = {
    "kernels": check_kernels,
    "inputs": check_inputs,
    "placements": check_placements,
    "mesh": check_mesh,
    "traced": check_traced_ids,
    "rules": check_rules,
    "bits": check_bits,
    "speed": check_speed,
}
"""The parts by name, in the order in which they run: the kernels first, because their faults are
likely to cause the others."""


def run_parts(names: Sequence[str], devices: list[Any]) -> Iterator[PartReport]:
    """Run parts of the check, and yield the report of each as soon as it has ended.

    An exception in a part is a fault of that part.

    Args:
      names: keys of `PARTS`.
      devices: the devices, all of this process.
    """
    for name in names:
        report, start = PartReport(name), time.perf_counter()
        with report.during(f"part {name!r}"):
            report.what = PARTS[name](devices, report)
        report.seconds = time.perf_counter() - start
        yield report
