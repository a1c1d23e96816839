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
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from tpu_embed.kernels import dispatch, rounded
from tpu_embed.kernels.formats import PACKED_ROWS, RowFormat, packing_of
from tpu_embed.kernels.operands import RowsToSum, SumLayout
from tpu_embed.kernels.storage import encode, widened
from tpu_embed.planning import costs

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
            text = (
                f"  {fault.where}\n    expected {fault.expected}\n    got {fault.got}"
            )
            lines.append(text + f"\n{fault.trace}" * verbose)
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
        right, found = np.ascontiguousarray(expected), np.ascontiguousarray(got)
        if found.shape != right.shape:
            self.faults.append(
                Fault(f"{where}, shape", f"{right.shape}", f"{found.shape}")
            )
            return
        if tolerance:
            small = 0.01 * np.max(np.abs(right), initial=0.0)
            wrong = ~np.isclose(found, right, tolerance, tolerance * small)
        else:
            # Bits: the signs of zeros count, and a NaN equals itself.
            wrong = np.not_equal(*(x.view(f"u{x.itemsize}") for x in (found, right)))
        if wrong.any():
            first = tuple(np.argwhere(wrong)[0].tolist())
            count = f"{np.count_nonzero(wrong)} of {wrong.size} numbers differ, first at {first}"
            self.faults.append(
                Fault(f"{where}: {count}", f"{right[first]}", f"{found[first]}")
            )

    @contextlib.contextmanager
    def during(self, where: str) -> Iterator[None]:
        """Note an exception, and go on after the block."""
        try:
            yield
        except Exception as error:
            said, *_ = traceback.format_exception_only(error)
            got = "\n".join(said.splitlines()[:_LINES])
            trace = "".join(traceback.format_exception(error))
            self.faults.append(Fault(where, "no exception", got, trace))


# -- kernels ---------------------------------------------------------------------------------------

DIMS = (1, 7, 8, 16, 20, 128, 130)
"""One number, multiples of the 8 and 16 lanes of SparseCores and others, and more than a line."""
_ENTRIES, _SUMS = 300, SumLayout((40,))
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_SPECIAL = (0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 1e-39)
"""Both zeros, infinities, NaN, the greatest number, a tie to either side, one below 2⁻¹²⁶."""

TRIALS = {
    "gather_rows": 0,
    "set_rows": 0,
    "gather_sum": FLOAT32,
    "rounded gather_rows": 0,
    "rounded gather_sum": BFLOAT16,
}
"""Each kernel, and how far it may be from NumPy."""


def _kernels(packing, rows, index, segments, weights, places):
    """Return each kernel by name, as a function that runs it on one table.

    Args:
      packing: how the rows of the table are packed.
      rows: the rows `[R, D]`, of which the first ones have special numbers.
      index: `[N]`, rows and numbers that are none; special rows are read, and not added.
      segments: `[N]`, ascending, the sum of each entry.
      weights: `[N]`.
      places: `[R]`, where to write the rows; every second one is nowhere.
    """
    form = RowFormat(rows.shape[1:], rows.dtype, packing)
    stored = encode(rows, form.dtype)
    table = form.pack(stored).reshape(form.array(PACKED_ROWS).shape)
    added = RowsToSum(
        stored, jnp.where(index < len(_SPECIAL), -1, index), segments, weights
    )

    kernels = {
        "gather_rows": lambda: form.unpack(dispatch.read_rows(table, index, form)),
        "set_rows": lambda: form.unpack(
            form.by_row(dispatch.write_rows(table, places, stored, form))
        ),
        "gather_sum": lambda: dispatch.gather_sum(added, _SUMS)[0],
    }
    if form.dtype == _FLOAT32:  # exchanges round such rows alone
        sent = dataclasses.replace(form, dtype=_BFLOAT16)
        kernels |= {
            "rounded gather_rows": lambda: sent.unpack(
                rounded.read_rows(table, index, form, sent)
            ),
            "rounded gather_sum": lambda: widened(
                sent.unpack(rounded.gather_sum(added, _SUMS, sent))
            ),
        }
    return kernels


def _expected(rows, index, segments, weights, places):
    """Return in NumPy what these kernels should make of the rows in their own dtype."""
    present = (index >= 0) & (index < PACKED_ROWS)
    read = np.where(present[:, None], rows[index % PACKED_ROWS], rows.dtype.type(0))
    new, written = rows.copy(), places >= 0
    new[places[written]] = rows[written]
    sums, added = np.zeros((*_SUMS.bags, rows.shape[1])), index >= len(_SPECIAL)
    np.add.at(
        sums, segments[added], weights[added, None] * read[added].astype(np.float64)
    )
    return dict(
        zip(TRIALS, (read, new, sums, read.astype(_BFLOAT16), sums), strict=True)
    )


def check_kernels(devices: list[Any], report: PartReport) -> str:
    """Run the kernels for rows of several widths and dtypes on every device."""
    rng, packing = np.random.default_rng(0), packing_of(devices[0])
    index = rng.integers(0, PACKED_ROWS, _ENTRIES, np.int32)
    index.reshape(-1, 30)[:, :4] = -1, PACKED_ROWS, -PACKED_ROWS, 2**31 - 1
    segments = np.sort(rng.integers(0, _SUMS.bags[0], _ENTRIES, np.int32))
    weights = rng.uniform(0.5, 2, _ENTRIES).astype(np.float32)
    places = np.arange(PACKED_ROWS - 1, -1, -1, dtype=np.int32)
    places[::2] = -1
    asked, tables = (index, segments, weights, places), {}
    for dtype, dim in itertools.product((_FLOAT32, _BFLOAT16), DIMS):
        rows = tables[f"D = {dim}, {dtype}"] = rng.normal(
            size=(PACKED_ROWS, dim)
        ).astype(dtype)
        rows[: len(_SPECIAL)] = np.array(_SPECIAL, dtype)[:, None]

    def compare(what, right, got, tolerance=0):
        right = np.concatenate([right] * len(devices))
        report.compare(f"kernel {what}, by device", right, got, tolerance=tolerance)

    for name, tolerance in TRIALS.items():

        def run(tables, asked, name=name):
            made = {
                what: _kernels(packing, rows, *asked) for what, rows in tables.items()
            }
            return {
                what: kernels[name]()
                for what, kernels in made.items()
                if name in kernels
            }

        with report.during(f"kernel {name}"):
            found = on_each(devices, run)(tables, asked)
            for what, rows in tables.items():
                if what in found:
                    right = _expected(rows, *asked)[name]
                    compare(f"{name}, {what}", right, found[what], tolerance)
    with report.during("kernel sort_rows"):
        order = np.argsort(index, kind="stable").astype(np.int32)
        ordered, positions = on_each(devices, dispatch.sort_rows)(index)
        compare("sort_rows, rows", index[order], ordered)
        compare("sort_rows, positions", order, positions)
    return f"{', '.join(TRIALS)}, sort_rows; D = {', '.join(map(str, DIMS))}"


def on_each(devices, kernel):
    """Return a jitted kernel that runs on every device, whose results stand one after the other."""
    mesh, split = Mesh(np.asarray(devices), ("devices",)), PartitionSpec("devices")
    return jax.jit(
        jax.shard_map(
            kernel,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=split,
            check_vma=False,
        )
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
    return [
        *(getattr(o, name)(RATE, **_OPTIONS.get(name, {})) for name in named),
        o.SGD(
            RATE,
            weight_decay_factor=0.1,
            clipvalue=0.5,
            clip_weight_min=-0.2,
            clip_weight_max=0.3,
        ),
        o.Adagrad(RATE, use_gradient_accumulation=False),
        o.CustomOptimizer(leaky_rule, {"trail": 0, "seen": 0}, RATE),
        o.OptaxOptimizer(optax.sgd(RATE, momentum=0.8)),
    ]


def _table(name, dim, optimizer: Any = _ADAGRAD, **options):
    return TableConfig(_ROWS, dim, name=name, optimizer=optimizer, **options)


def _placed(*dims):
    """Return a table of each placement and width."""
    pairs = itertools.product(("mod", "div", "replicated"), dims)
    return [_table(f"{where}_{dim}", dim, placement=where) for where, dim in pairs]


def _draw(tables, forms, size):
    """Draw a feature of each form for each table, in a batch that `size` devices divide.

    The forms are "one" id per example, "dense", "sequence" (dense, a row per position), "sparse"
    and "ragged"; the last two have weights.

    Returns:
      by name: the declarations; ids as `place` takes them; the bags that these ids mean; and the
      gradients of the activations, a dict for each step.
    """
    rng, batch = np.random.default_rng(0), -(-_EXAMPLES // size) * size
    configs, given, means, steps = {}, {}, {}, [{} for _ in range(_STEPS)]
    for table, form in itertools.product(tables, forms):
        shape = (batch,) if form == "one" else (batch, _HOT)
        ids = np.maximum(rng.integers(-_ROWS // 2, _ROWS, shape, np.int32), -1)
        present, weights = ids >= 0, rng.uniform(0.5, 2, shape).astype(np.float32)
        if form not in ("sparse", "ragged"):
            weights[:] = 1
        # A bag for each id, or for each example.
        per_id = form in ("one", "sequence")
        pairs = [zip(ids.flat, weights.flat, strict=True)] * (1 if per_id else _HOT)
        bags = [[(i, w) for i, w in bag if i >= 0] for bag in zip(*pairs, strict=True)]
        if form == "sparse":
            ids = SparseIds(np.argwhere(present), ids[present], shape, weights[present])
        elif form == "ragged":
            splits = np.append(0, np.cumsum(present.sum(1)))
            ids = RaggedIds(ids[present], splits, weights[present])
        path, of_bags = f"{table.name}, {form}", shape if per_id else shape[:1]
        configs[path] = FeatureConfig(
            table, max_sequence_length=_HOT * (form == "sequence")
        )
        given[path] = ids
        means[path] = oracle.Bags(bags, None if per_id else table.combiner, of_bags)
        for gradients in steps:
            gradients[path] = rng.normal(size=(*of_bags, table.dim)).astype(np.float32)
    return configs, given, means, steps


def _run(configs, batch, steps, devices, *, placed=True, **options):
    """Train on devices of one axis, "model", or `[data, model]`.

    Return tables and slots before, the activations of each step, and tables and slots after.
    """
    mesh = Mesh(np.asarray(devices), ("data", "model")[-np.ndim(devices) :])
    engine = EmbeddingEngine(configs, mesh=mesh, **options)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, gradients):
        return engine.lookup(state, batch), engine.update(state, batch, gradients)

    state = engine.init(jax.random.key(0))
    batch = engine.place(batch) if placed else batch
    found: list[Any] = [host_arrays(state, engine.layout)]
    for gradients in steps:
        activations, state = step(state, batch, gradients)
        found.append(jax.device_get(activations))
    return [*found, host_arrays(state, engine.layout)]


def _train(tables, forms, devices, report, *, tolerance=FLOAT32, **options):
    """Train tables, and compare all activations, and rows and slots in the end, with the loops."""
    configs, batch, means, gradients = _draw(tables, forms, np.size(devices))
    found = (rows, slots), *steps, last = _run(
        configs, batch, gradients, devices, **options
    )
    for table in tables:
        rounded, rule, name = table.dtype == "bfloat16", table.optimizer, table.name
        compare = functools.partial(
            report.compare, tolerance=BFLOAT16 if rounded else tolerance
        )
        kind = type(rule).__name__
        where = f"table {name!r}, {kind}"
        # An optax transform has no bounds, and no decay: as few as the default rule.
        options = _ADAGRAD if isinstance(rule, o.OptaxOptimizer) else rule
        formula = functools.partial(
            oracle.update_row, oracle.FORMULAS[kind], options, lr=RATE
        )
        held, held_slots = rows[name].astype(np.float64), slots[name]
        for t, activations in enumerate(steps):
            pushed = []
            for path, bags in means.items():
                if configs[path].table is table:
                    right = oracle.lookup(held, bags)
                    compare(
                        f"{where}, step {t + 1}, feature {path!r}",
                        right,
                        activations[path],
                    )
                    mine = oracle.row_gradients(bags, gradients[t][path])
                    pushed += [pair[1:] for pair in mine]
            if rule.use_gradient_accumulation:
                pushed = oracle.summed(pushed).items()
            held, held_slots = oracle.update(held, held_slots, pushed, formula, t + 1)
            if rounded:  # stored rows alone, to nearest even
                held = held.astype(_BFLOAT16).astype(np.float64)
        compare(f"{where}, rows", held, last[0][name])
        for slot, right in held_slots.items():
            compare(f"{where}, slot {slot!r}", right, last[1][name][slot])
    return found


def check_inputs(devices: list[Any], report: PartReport) -> str:
    """Train with every form of input and every combiner."""
    tables = [
        _table(combiner, 8, combiner=combiner) for combiner in ("mean", "sum", "sqrtn")
    ]
    forms = ("one", "dense", "sequence", "sparse", "ragged")
    _train(tables, forms, devices, report)
    return f"ids of {', '.join(forms)}; mean, sum, sqrtn"


def check_placements(devices: list[Any], report: PartReport) -> str:
    """Train tables of every placement and of awkward widths, also with rounded exchanges."""
    tables = _placed(1, 20, 130)
    stored = _table("bfloat16", 16, dtype="bfloat16")
    _train([*tables, stored], ("ragged", "dense"), devices, report)
    # Rows and sums are rounded on their way in each of two steps. No row of a sequence cancels
    # another one.
    _train(
        tables[1:2],
        ("sequence",),
        devices,
        report,
        tolerance=16 * BFLOAT16,
        exchange_dtype="bfloat16",
    )
    return "D = 1, 20, 130; mod, div, replicated; an exchange in bfloat16"


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
    _train(_placed(20), ("dense", "one"), devices, report, placed=False)
    return "ids in a jit, routed by the devices"


def check_rules(devices: list[Any], report: PartReport) -> str:
    """Train one table with every optimizer."""
    tables = [_table(f"rule_{i}", 5, optimizer=rule) for i, rule in enumerate(rules())]
    _train(tables, ("dense",), devices, report)
    return f"{len(tables)} optimizers"


def check_bits(devices: list[Any], report: PartReport) -> str:
    """Compare bits between numbers of devices on CPU, and between two runs everywhere."""
    counts = [len(devices)]
    if devices[0].platform == "cpu":
        counts = [n for n in (1, 2, 4, 8) if n <= len(devices)]
    tables = [
        *_placed(20),
        _table("bfloat16", 20, dtype="bfloat16", optimizer=o.Lion(RATE)),
    ]
    right = None
    for count in (*counts, counts[-1]):
        found = _train(tables, ("ragged", "dense"), devices[:count], report)
        right = right or jax.tree.leaves_with_path(found)
        for (path, expected), got in zip(right, jax.tree.leaves(found), strict=True):
            where = f"{jax.tree_util.keystr(path)} on {count} device(s)"
            report.compare(where, expected, got, tolerance=0)
    return (
        f"the same bits on {', '.join(map(str, counts))} device(s), and in a second run"
    )


# -- speed -----------------------------------------------------------------------------------------

_TABLES = """
    40000000x3 39060x2 17295x1 7424x2 20265x6 3x1 7122x1 1543x1 63x1 40000000x7 3067956x3
    405282x8 10x1 2209x6 11938x9 155x5 4x1 976x1 14x1 40000000x12 40000000x100 40000000x27
    590152x10 12973x3 108x1 36x1
"""
"""Rows of each table, and its ids per sample."""
_DIM = 128
_BATCH, _CPU_BATCH = 4096, 512
"""Samples per device, as in the public figure of jax-tpu-embedding; and in all on CPUs, which are
slower and may be emulated."""

_PART_OF_MEMORY, _CPU_BYTES = 4, 2**28
_ROUNDS = 12


def check_speed(devices: list[Any], report: PartReport) -> str:
    """Time a copy, a lookup, a training step and the placing of a batch; return lines.

    The figures are the samples of a batch, the rows of the largest table, the seconds of each call,
    and the 10⁹ bytes per second and device that it must move at the least. Placing overlaps with
    steps in training.
    """
    mesh, count = Mesh(np.asarray(devices), ("devices",)), len(devices)
    each = max(1, _CPU_BATCH // count) if devices[0].platform == "cpu" else _BATCH
    # The bytes of tables and slots on all devices; a CPU's are few, so that it is tried quickly.
    memory = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    budget = memory // _PART_OF_MEMORY * count or _CPU_BYTES
    numbers = budget // count // 8
    split = NamedSharding(mesh, PartitionSpec("devices"))
    zeros = jnp.zeros(count * numbers, jnp.float32, device=split)
    copy = (
        8 * numbers / _median(jax.jit(lambda x: x + 1, donate_argnums=0), zeros) / 1e9
    )
    sizes, hots = np.array([one.split("x") for one in _TABLES.split()], int).T
    while sizes.sum() * _DIM * 4 * 2 > budget:  # half the largest ones, again and again
        sizes = np.minimum(sizes, sizes.max() // 2)
    rng, shapes = np.random.default_rng(0), [(each * count, hot) for hot in hots]
    ids = [rng.integers(0, *pair, np.int32) for pair in zip(sizes, shapes, strict=True)]
    configs = [FeatureConfig(TableConfig(rows, _DIM, combiner="sum")) for rows in sizes]
    engine = EmbeddingEngine(configs, o.Adagrad(0.01), mesh=mesh)
    batch, state, look = (
        engine.place(ids),
        engine.init(jax.random.key(0)),
        jax.jit(engine.lookup),
    )
    # The gradients that a loss of half the sum of squares would give.
    train = jax.jit(
        lambda state, batch: engine.update(state, batch, engine.lookup(state, batch)),
        donate_argnums=0,
    )
    moved = costs.moved(engine.layout, batch.spec)
    place = _median(lambda _: engine.place(ids).packed)
    report.figures = {
        "samples": each * count,
        "table_rows": int(sizes.max()),
        "copy_gb_per_second": copy,
        "place_seconds": place,
    }
    lines = [
        f"26 tables of at most {sizes.max():,} rows x {_DIM}, Adagrad; "
        f"{each * count:,} samples of 214 uniform ids",
        f"{'copy':8}{copy:,.1f} GB/s a device, read and written",
    ]
    for name, call, size in (
        ("lookup", lambda _: look(state, batch), moved["lookup"]),
        ("step", lambda state: train(state, batch), sum(moved.values())),
    ):
        seconds = _median(call, state)
        speed = size / seconds / 1e9
        report.figures |= {f"{name}_seconds": seconds, f"{name}_gb_per_second": speed}
        rate = f"{each / seconds:12,.0f} samples/s and {speed:,.1f} GB/s a device"
        lines.append(
            f"{name:8}{seconds * 1e3:9.2f} ms{rate}, {speed / copy:.2f} of the copy"
        )
    return "\n  ".join([*lines, f"{'place':8}{place * 1e3:9.2f} ms on the host"])


def _median(call, held=None):
    """Return the median time of `held = call(held)` in seconds, after two that warm up."""
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        held = jax.block_until_ready(call(held))
        times.append(time.perf_counter() - start)
    return np.median(times[2:])


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
