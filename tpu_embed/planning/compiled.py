"""Compile a training step for a TPU without having one, and compare the result with the plan.

The TPU compiler in libtpu (`pip install "…[tpu]"`) runs on any machine. It tells how much memory
the step needs and which operations it has. With tables on the host, two more programs are compiled
for each stack of them:

    write     draws rows that were never seen before, and writes them in their places
    exchange  copies the displaced rows, and writes those from home in their places

A step takes at least as long as its slowest part alone: the memory, which moves the step's bytes at
the bandwidth of the chip, or the TensorCore, which runs the cycles that libtpu's profile has. The
estimate is the longest of these bounds. It is not a measurement: waits for other devices and
for the latency of the memory are in none of the bounds.

Input: feature configs, an optimizer, a topology, a batch or its shapes. Output: a `Compiled`, which
holds the `Plan` too; an `Estimate`.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embed._checks import check_type, refuse
from tpu_embed._types import Array, PyTree
from tpu_embed.core.batch import Batch, BatchSpec, line_length, line_of
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import structure
from tpu_embed.core.layout import ExchangeDtype, Parcels, Stack
from tpu_embed.core.lookup import split_activations
from tpu_embed.core.state import (
    NewRowWriter,
    RowMover,
    Sent,
    StackShard,
    TableState,
    row_fields,
    split_shards,
    stack_specs,
)
from tpu_embed.planning.costs import readable
from tpu_embed.planning.host import HitRate, HostPlan
from tpu_embed.planning.plan import AHEAD, MISSES, Plan, plan, resolve, spec_of
from tpu_embed.planning.profile import Profile, Program, moved
from tpu_embed.planning.targets import Topology

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu needs on a machine without a TPU. It does not choose the topology to compile for."""


Lower = Callable[[EmbeddingEngine, TableState, Batch], jax.stages.Lowered]
"""Lowers a step: of an engine, and of the shapes of its state and of a placed batch."""


@dataclasses.dataclass(frozen=True)
class AdmitProgram:
    """The compiler's figures for a program of `admit`.

    Attributes:
      name: "write" or "exchange".
      tables: the tables on the host that it is for, which share a stack.
      rows: the rows that each device has room for, padding included.
      seconds: how long compiling took.
      arguments: bytes per device of tables and slots of the stack, and of the rows.
      results: bytes per device of results that are not updated in place.
      temporaries: bytes per device of everything else.
      aliased: bytes per device of arguments that are updated in place.
    """

    name: str
    tables: tuple[str, ...]
    rows: int
    seconds: float
    arguments: int
    results: int
    temporaries: int
    aliased: int

    def explain(self) -> str:
        """Return the figures as a line of text."""
        return (
            f"  admit {self.name:8} {self.rows:>11,} rows a device: "
            f"{readable(self.arguments)} arguments, {readable(self.results)} results, "
            f"{readable(self.temporaries)} temporaries"
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures for a step, with its plan.

    Attributes:
      plan: the plan of the same step.
      seconds: how long compiling took.
      arguments: bytes per device of tables, slots and ids.
      temporaries: bytes per device of everything else.
      aliased: bytes per device of arguments that are updated in place.
      operations: how many operations of each name move rows or communicate; `gather_rows`,
        `gather_sum` and `set_rows` are the SparseCore kernels.
      moved: bytes that they move by name, to be compared with `plan.moved`; see `profile.moved`.
      text: the optimised program.
      admit: the programs that move rows of tables on the host before a step; none without them.
    """

    plan: Plan
    seconds: float
    arguments: int
    temporaries: int
    aliased: int
    operations: dict[str, int]
    moved: dict[str, int]
    text: str = dataclasses.field(repr=False)
    admit: tuple[AdmitProgram, ...] = ()

    def explain(self) -> str:
        """Return the compiler's figures next to those of the plan, as text to print."""
        held = sum(self.plan.held.values()) + self.plan.passing["ids"]
        # Ids are arguments, rows from home come before the step, and other batches are none of it.
        besides = ("ids", MISSES, AHEAD)
        passing = sum(n for name, n in self.plan.passing.items() if name not in besides)
        moved, must = sum(self.moved.values()), sum(self.plan.moved.values())
        names = sorted(self.moved)
        return "\n".join(
            [
                f"compiled for {self.plan.target} in {self.seconds:.0f} s",
                f"  arguments    {readable(self.arguments):>12}   planned {readable(held)}",
                f"  temporaries  {readable(self.temporaries):>12}   planned {readable(passing)}",
                f"  in place     {readable(self.aliased):>12}",
                f"  moved        {readable(moved):>12}   must be moved {readable(must)}",
                *(f"  {name:24} × {self.operations[name]:<4d}{readable(self.moved[name]):>12} moved"
                  for name in names),
                *(one.explain() for one in self.admit),
            ]
        )  # fmt: skip


def compile_for(
    topology: str | Topology,
    feature_config: PyTree,
    optimizer: Any,
    batch: PyTree,
    *,
    loss: Callable[[PyTree], Array] | None = None,
    lower: Lower | None = None,
    placed: bool = True,
    hit_rates: HitRate | Mapping[str, HitRate] | None = None,
    admit: bool = True,
    exchange_dtype: ExchangeDtype | None = None,
) -> Compiled:
    """Compile a training step (lookup, gradient, update in place) for a TPU topology; nothing runs.

    With tables on the host, the programs that bring rows to the devices and copy displaced ones are
    compiled, too: for all distinct rows of a batch, or for those that miss if it is known.

    Args:
      topology: for example `"v5p:2x2x1"`.
      feature_config: as for `EmbeddingEngine`; `placement="auto"` is resolved.
      optimizer: as for `EmbeddingEngine`.
      batch: as for `plan`.
      loss: a function of the activations; None takes half the sum of their squares.
      lower: a function that lowers a step of your own, with a network: of the engine, the shapes of
        its state and those of a placed batch, it returns what `jax.jit(step).lower(…)` gives. Not
        with `loss`.
      placed: whether the step gets a placed batch; False: dense ids that are traced inside it.
        Then `batch` holds shapes.
      hit_rates: of tables on the host, as for `plan`.
      admit: whether to compile the programs that move rows of tables on the host, too.
      exchange_dtype: as for `EmbeddingEngine`.

    Returns:
      The compiler's figures and the plan.

    Raises:
      ValueError: whatever `plan` refuses; `lower` with `loss`, or without a placed batch.
      TypeError: `lower` is no function.
      RuntimeError: libtpu is not installed, or does not know the topology.
    """
    if lower is not None:
        check_type(
            "compile_for: lower",
            lower,
            Callable,
            expected="a function of an engine, a state and a batch",
            remedy="it returns jax.jit(step).lower(…)",
        )
        if loss is not None or not placed:
            refuse(
                "compile_for: lower",
                expected="no loss and a placed batch",
                got=f"loss {loss}, placed={placed}",
                remedy="the step that it lowers has a loss of its own",
            )
    target = topology if isinstance(topology, Topology) else Topology(topology)
    mesh = Mesh(np.array(describe_topology(target)).reshape(-1), ("devices",))
    planned = plan(
        feature_config,
        optimizer,
        target,
        batch,
        hit_rates=hit_rates,
        exchange_dtype=exchange_dtype,
    )
    resolved = resolve(feature_config, optimizer, mesh=mesh)
    engine = EmbeddingEngine(
        resolved, optimizer, mesh=mesh, exchange_dtype=exchange_dtype
    )
    if placed:
        # The plan's mesh has no processes; the devices of the topology belong to several.
        batch = abstract_batch(
            engine, spec_of(structure.flatten(resolved), engine.layout, batch)
        )
    else:
        axes = engine.layout.axes
        batch = _sharded(batch, axes.sharding(axes.batch_axes))

    def step(state, ids):
        values, rebuild = split_activations(engine.lookup(state, ids))
        gradients = jax.grad(lambda values: (loss or _squares)(rebuild(values)))(values)
        return engine.update(state, ids, gradients)

    held = abstract_state(engine)
    if lower is None:
        lowered = jax.jit(step, donate_argnums=0).lower(held, batch)
    else:
        lowered = lower(engine, held, batch)
    figures, text = _compiled(lowered)
    program, admitted = Program(text), []
    counts = collections.Counter(
        one.opcode.removesuffix("-start") for one in program.instructions.values()
    )
    sizes = moved(program)
    if admit:
        plans = {one.name: one.host for one in planned.tables if one.host is not None}
        for stack in dict.fromkeys(stack for stack, _ in engine.layout.on_host):
            tables = tuple(table.name for table in stack.tables)
            for name, rows, lowered in _lowered_admit(engine, stack, plans):
                needs, _ = _compiled(lowered)
                admitted.append(AdmitProgram(name, tables, rows, **needs))
    del figures["results"]
    return Compiled(
        plan=planned,
        **figures,
        operations={name: counts[name] for name in sizes},
        moved=sizes,
        text=text,
        admit=tuple(admitted),
    )


def _compiled(lowered: Any) -> tuple[dict[str, Any], str]:
    """Compile a lowered program; return what the compiler says of its memory, and its text."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    figures = {
        "seconds": seconds,
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }
    return figures, compiled.as_text()


def _lowered_admit(
    engine: EmbeddingEngine, stack: Stack, plans: Mapping[str, HostPlan]
) -> Iterator[tuple[str, int, Any]]:
    """Yield the name of each program of a stack, its rows on a device, and the lowered program.

    "write" is for a first batch, in which all rows are new; "exchange" for as many rows as a step
    moves, or for those of a whole batch where that is not known.
    """
    state = abstract_state(engine)
    held = StackShard(state.tables[stack.name], state.slots[stack.name])
    sharding = engine.layout.axes.sharding(stack.shard_axes)

    def array(*shape, dtype: Any = np.uint32) -> Any:
        return jax.ShapeDtypeStruct(
            (stack.num_shards, *shape), dtype, sharding=sharding
        )

    def room(rows):
        """Return the rows that a device's parcel has room for, if rows are even over the shards."""
        counts = {
            one.name: min(rows[one.name], one.vocabulary_size) for one in stack.tables
        }
        return Parcels(
            stack, {name: np.arange(count) for name, count in counts.items()}
        ).size

    every = {name: one.batch_rows for name, one in plans.items()}
    first = room(every)
    parcel = array(5, first)
    yield (
        "write",
        first,
        NewRowWriter(engine.layout).lower(stack, held, state.vocabulary, parcel),
    )
    # A row leaves for each that comes, from home or drawn.
    known = {
        name: one.rows_out for name, one in plans.items() if one.rows_out is not None
    }
    count = room(every | known)
    fields = row_fields(stack).items()
    values = {name: array(count, *one.shape, dtype=one.dtype) for name, one in fields}
    sent = Sent(array(2, count), array(2, count), values)
    yield "exchange", count, RowMover(engine.layout).lower(stack, held, sent)


def describe_topology(topology: Topology) -> list[Any]:
    """Return abstract devices of a topology; none of them need exist.

    During this call, environment variables that libtpu needs are set unless they are set already.

    Args:
      topology: the topology.

    Raises:
      RuntimeError: libtpu is not installed, or does not know the topology.
    """
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        refuse(
            "libtpu",
            expected="it installed",
            got="none",
            remedy='pip install "tpu-embed[tpu]"',
            error=RuntimeError,
        )
    missing = {
        name: value for name, value in _ENVIRONMENT.items() if name not in os.environ
    }
    os.environ.update(missing)
    options = (
        {"chip_config_name": "megacore"} if topology.name.startswith("v4:") else {}
    )
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.name, **options
        )
    except Exception as error:
        refuse(
            f"topology {topology.name}",
            expected="one that libtpu knows",
            got=f"{type(error).__name__}: {error}",
            remedy="take the sizes of a slice that Google offers",
            error=RuntimeError,
            cause=error,
        )
    finally:
        for name in missing:
            del os.environ[name]
    return list(described.devices)


def _squares(activations: PyTree) -> Array:
    values, _ = split_activations(activations)
    return jnp.stack([(a * a).sum() for a in jax.tree.leaves(values)]).sum() / 2


def abstract_state(engine: EmbeddingEngine) -> TableState:
    """Return the shapes and shardings of an engine's state, to lower a step of your own.

    Args:
      engine: an engine on a mesh whose devices need not exist.
    """
    shapes = jax.eval_shape(engine.init, jax.random.key(0))
    axes, whole = engine.layout.axes, PartitionSpec()
    tables, slots = split_shards(
        {s.name: stack_specs(s, axes) for s in engine.layout.stacks}
    )
    vocabulary: Any = shapes.vocabulary and whole
    specs: Any = tables, slots, whole, whole, vocabulary
    return jax.tree.map(
        lambda spec, part: _sharded(part, NamedSharding(axes.mesh, spec)),
        TableState(*specs),
        shapes,
    )


def _sharded(shapes: PyTree, sharding: NamedSharding) -> PyTree:
    """Return shapes with a sharding."""
    return jax.tree.map(lambda one: one.update(sharding=sharding), shapes)


def abstract_batch(engine: EmbeddingEngine, spec: BatchSpec) -> Batch:
    """Return the shape and sharding of a placed batch, to lower a step of your own.

    Args:
      engine: an engine on a mesh whose devices need not exist.
      spec: the shape of the batch, for example `plan(…).spec`.
    """
    axes = engine.layout.axes
    shape = (axes.size(axes.names), line_length(line_of(spec, engine.layout)))
    sharding = axes.sharding(axes.names)
    packed = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    steps = None
    if engine.layout.living:
        steps = jax.ShapeDtypeStruct((3,), np.int32, sharding=axes.sharding(()))
    return Batch.of(packed, spec, engine.layout, steps)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Lower bounds of the time of a step on each device. Nothing has run.

    The SparseCores have no bound: their programs do not say how often a loop runs, nor how long it
    waits for rows. The bytes that they move are in that of the memory.

    Attributes:
      moved: bytes that the compiled step moves in memory.
      bandwidth: bytes per second between the device and its memory.
      cycles: of the TensorCore, by libtpu's profile; None if they are not known.
      clock: cycles per second; None if it is not known.
      missing: operations whose cycles the profile does not have.

    Example:
      >>> found = Estimate(moved=2_765_000, bandwidth=2.765e12, cycles=3_500, clock=1.75e9)
      >>> found.bounds, found.seconds
      ({'memory': 1e-06, 'TensorCore': 2e-06}, 2e-06)
    """

    moved: int
    bandwidth: float
    cycles: int | None = None
    clock: float | None = None
    missing: int = 0

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that the memory and the TensorCore take, as far as they are known."""
        bounds = {"memory": self.moved / self.bandwidth}
        if self.cycles is not None and self.clock is not None:
            bounds["TensorCore"] = self.cycles / self.clock
        return bounds

    @property
    def seconds(self) -> float:
        """The estimate, which is the longest bound."""
        return max(self.bounds.values())

    def figures(self) -> dict[str, Any]:
        """Return the attributes, the bounds and the estimate, for JSON."""
        return dataclasses.asdict(self) | {
            "bounds": self.bounds,
            "seconds": self.seconds,
        }

    def explain(self) -> str:
        """Return the bounds as text to print."""
        bounds, clock = self.bounds, self.clock or 0
        longest = max(bounds, key=bounds.__getitem__)
        memory = f"{readable(self.moved)} moved at {self.bandwidth / 1e9:,g} GB/s"
        core = "not known: the profile was left out, or on this chip libtpu writes no whole one"
        if "TensorCore" in bounds:
            lost = f"; {self.missing} operation(s) not counted" if self.missing else ""
            by = f"{self.cycles:,} cycles by libtpu's profile at {clock / 1e9:g} GHz{lost}"
            core = f"{_milliseconds(bounds['TensorCore'])}   {by}"
        return "\n".join(
            [
                f"estimated time of a step: at least {self.seconds * 1e3:.3f} ms, the bound by the "
                f"{longest}; nothing was measured",
                f"  memory      {_milliseconds(bounds['memory'])}   {memory}",
                f"  TensorCore  {core}",
                "  SparseCores not known: their programs do not say how often a loop runs",
            ]
        )


def estimate(compiled: Compiled, profile: Profile | None = None) -> Estimate:
    """Return the bounds of a compiled step.

    Args:
      compiled: the step, from `compile_for`.
      profile: its profile, from `profile_step`; None leaves the cycles of the TensorCore out.

    Returns:
      The bounds; without that of the TensorCore also where the clock of the chip is None.
    """
    chip, moved = Topology(compiled.plan.target).chip, sum(compiled.moved.values())
    bandwidth = chip.bandwidth * 1e9
    if profile is None or chip.clock is None:
        return Estimate(moved, bandwidth)
    return Estimate(moved, bandwidth, profile.cycles, chip.clock * 1e9, profile.missing)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms".rjust(12)
