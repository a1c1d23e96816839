"""The layout of an engine: everything static about it, computed once and only read afterwards.

It says which devices there are and what their axes split, which stacks hold the tables, which
stack each feature looks up, and into how many blocks a batch is divided when gradients are summed.

Beside it stands what is read off a layout: the learning rates that are Python functions, and its
description. A learning rate is a number, a schedule (a function of the step, computed inside the
program) or a function without arguments. The last kind can only be called on the host, so its value
is read before every update and passed into the compiled program as an argument.

`make_layout` makes it of the configs: it names tables, gives each its optimizer, initializer and
placement, and puts them into stacks.

Input: the configs, and the mesh axes. Output: a `Layout`, of which nothing is written
back into the configs; values of learning rates by stack; plain objects, and lines for a repr.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed import initializers
from tpu_embed._checks import check_choice, refuse
from tpu_embed._types import Array, ArrayLike, snapshot
from tpu_embed.config import TableConfig
from tpu_embed.core.ids import Structure
from tpu_embed.core.layout.mesh import MeshAxes
from tpu_embed.core.layout.stacks import (
    ROUNDING_SLOTS,
    ExchangeDtype,
    FeatureLayout,
    ResolvedTable,
    Stack,
    TableSlice,
    make_stacks,
    round_up,
)
from tpu_embed.kernels.formats import PACKED_ROWS, packing_of
from tpu_embed.optimizers import (
    LearningRateKind,
    TableOptimizer,
    as_table_optimizer,
    learning_rate_kind,
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about an engine: mesh, stacks, features.

    Attributes:
      axes: the mesh, and which of its axes split the batch.
      stacks: the stacks, in order of their first table.
      features: the features, in flattening order.
      sum_blocks: G, the number of blocks into which a global batch is divided to sum gradients.
    """

    axes: MeshAxes
    stacks: tuple[Stack, ...]
    features: tuple[FeatureLayout, ...]
    sum_blocks: int

    def placed_for(self, *, updates: bool) -> PlacedFor:
        """Return what its batches depend on; see `PlacedFor`."""
        return self._placed_for[updates]

    @functools.cached_property
    def _placed_for(self) -> tuple[PlacedFor, PlacedFor]:
        return _placed_for(self, blocks=None), _placed_for(self, blocks=self.blocks)

    @functools.cached_property
    def places_routes(self) -> bool:
        """Whether a placed batch carries the route of its ids.

        A single CPU is the exception: its kernel sorts the ids itself, since moving the sort from
        one core to another gains nothing. A mesh without axes (serving) has no devices at all.
        """
        return bool(self.axes.names) and not (
            self.axes.mesh.size == 1 and self.axes.on_cpu
        )

    @functools.cached_property
    def tables(self) -> dict[str, tuple[Stack, TableSlice]]:
        """Every table with its stack, by name, in the order of the stacks."""
        return {
            table.name: (stack, table)
            for stack in self.stacks
            for table in stack.tables
        }

    @functools.cached_property
    def living(self) -> tuple[tuple[Stack, TableSlice], ...]:
        """The tables with a dynamic vocabulary, each with its stack."""
        return tuple(
            pair for pair in self.tables.values() if pair[1].vocabulary is not None
        )

    @functools.cached_property
    def on_host(self) -> tuple[tuple[Stack, TableSlice], ...]:
        """The tables at home on the host, each with its stack; their ids get rows as keys do."""
        return tuple(pair for pair in self.living if pair[1].is_on_host)

    @property
    def version_size(self) -> int:
        """How many numbers a state has of its maps; see `TableState.vocabulary`."""
        return 2 + len(self.living) + bool(self.on_host)

    def check_on_devices(self, what: str, names: Iterable[str] | None = None) -> None:
        """Check that whole tables are on the devices, for what needs them.

        Args:
          what: the call that needs them.
          names: of the tables that it needs; None: all.

        Raises:
          ValueError: one is at home on the host.
        """
        chosen = None if names is None else set(names)
        here = [t.name for _, t in self.on_host if chosen is None or t.name in chosen]
        for name in here[:1]:
            expected, got = (
                "tables that are on the devices",
                f"table {name!r}, with storage",
            )
            remedy = f"engine.touched({name!r}) has the ids of its rows that were trained, and "
            remedy += f"engine.rows(state, {name!r}, ids) reads them"
            refuse(what, expected=expected, got=got, remedy=remedy)

    def visiting(self, rows: int) -> Layout:
        """Return the layout of lookups that bring the rows of tables on the host along.

        The stacks of these tables are replaced by small ones, with the rows of one batch only.

        Args:
          rows: the rows that each shard has of each table on the host.
        """
        if rows not in self._visiting:
            stacks = tuple(_small(s, rows) if s.is_on_host else s for s in self.stacks)
            named = {table.name: table for stack in stacks for table in stack.tables}
            features = [
                dataclasses.replace(f, table=named[f.table.name]) for f in self.features
            ]
            small = dataclasses.replace(self, stacks=stacks, features=tuple(features))
            self._visiting[rows] = small
        return self._visiting[rows]

    @functools.cached_property
    def _visiting(self) -> dict[int, Layout]:
        return {}

    @functools.cached_property
    def features_by_stack(self) -> list[tuple[int, ...]]:
        """By stack, the indices of the features that look up its tables, ascending."""
        every = range(len(self.stacks))
        return [
            tuple(f for f, one in enumerate(self.features) if one.stack == g)
            for g in every
        ]

    @property
    def blocks(self) -> int:
        """G: example e of a feature with B examples is in block e · G // B of the batch.

        It is at least the number of replicas. If the number of replicas divides it, each device
        holds whole blocks, whatever the features' batch sizes are.
        """
        return max(self.sum_blocks, self.axes.replicas)

    def blocks_per_device(self, sizes: Iterable[int]) -> int:
        """Return the largest number of blocks that one device's examples fall into.

        Args:
          sizes: the features' batch sizes on one device, at least 1 each.
        """
        # With 4 replicas, G = 8, and features of 1 and 3 examples per device, the examples fall
        # into the blocks
        #   0 | 2 | 4 | 6        and        0 0 1 | 2 2 3 | 4 4 5 | 6 6 7
        # so 2 blocks per device. With 3 replicas of 8 examples they fall into
        #   0 0 0 1 1 1 2 2 | 2 3 3 3 4 4 4 5 | 5 5 6 6 6 7 7 7
        # so device 1 has 4 blocks, the others 3: every device counts.
        #
        # This bounds the blocks of all features together: on device r each of them begins in
        # block r · G // replicas, so their blocks lie within those of the feature that ends last.
        replicas, blocks = self.axes.replicas, self.blocks
        distinct = {size for size in sizes if size}
        return max(
            ((r + 1) * size - 1) * blocks // (replicas * size)
            - r * blocks // replicas
            + 1
            for r in range(replicas)
            for size in distinct
        )

    def table(self, name: str) -> tuple[Stack, TableSlice]:
        """Return the stack and the slice of the table with a name.

        Raises:
          ValueError: no table has this name.
        """
        if not isinstance(name, str) or name not in self.tables:
            refuse("table", expected=f"one of {sorted(self.tables)}", got=repr(name))
        return self.tables[name]


def _small(stack: Stack, rows: int) -> Stack:
    """Return a stack with other numbers of rows: `rows` on each shard for each table."""
    tables = [
        dataclasses.replace(
            table,
            vocabulary_size=rows * stack.num_shards,
            offset=i * rows,
            rows_per_shard=rows,
        )
        for i, table in enumerate(stack.tables)
    ]
    whole = rows * len(tables)
    whole = whole if stack.packing == "none" else round_up(whole, PACKED_ROWS)
    return dataclasses.replace(stack, tables=tuple(tables), num_rows=whole)


# -- what a placed batch depends on ----------------------------------------------------------------
#
# A batch holds numbers: rows, bags, routes. They mean something only together with the declarations
# for which they were made. With another combiner, say, its gains are wrong; with another number of
# blocks, the order of its sums. So a batch carries what it was placed for, and an engine for which
# anything of it differs refuses the batch.
#
# `test_placed_for.py` lists every field of a config, and every option of an engine, with the
# decision whether `place` reads it. A new one without a decision fails there.


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedFor:
    """What a batch was placed for; equal by value, with a hash that is computed once.

    Args:
      facts: (what, its value) of everything that `place` reads.
    """

    facts: tuple[tuple[str, str], ...]

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, PlacedFor):
            return self is other
        return hash(self) == hash(other) and self.facts == other.facts

    def __hash__(self) -> int:
        return self._checksum

    @functools.cached_property
    def _checksum(self) -> int:
        # A CRC, because Python's `hash` of a string differs from process to process.
        return zlib.crc32(repr(self.facts).encode())

    def __repr__(self) -> str:
        return f"PlacedFor({self._checksum:08x})"

    def difference(self, other: PlacedFor) -> str:
        """Return in words what differs first in a batch that was placed for something else."""
        mine, theirs = dict(self.facts), dict(other.facts)
        for what in (*mine, *theirs):
            if mine.get(what) != theirs.get(what):
                return f"one placed for {what} {theirs.get(what)}, not {mine.get(what)}"
        return "the same"


def _placed_for(layout: Layout, *, blocks: int | None) -> PlacedFor:
    """Return what the batches of an engine are placed for.

    Args:
      layout: the engine's layout.
      blocks: G, of batches that are routed for updates, too. None: they are only looked up, and
        depend neither on G nor on whether tables are trained.
    """
    axes = layout.axes
    facts = [("mesh", f"{[(name, axes.size((name,))) for name in axes.names]}")]
    facts.append(("batch_axes", f"{axes.batch_axes}"))
    if blocks is not None:
        facts.append(("sum_blocks", f"{blocks}"))
    for feature in layout.features:
        what, config = f"feature {feature.path!r}", feature.config
        facts.append((f"{what}: table", f"{feature.table.name!r}"))
        for name in (
            "max_sequence_length",
            "output_shape",
            "on_bad_id",
            "jagged",
            "keep",
        ):
            facts.append((f"{what}: {name}", f"{getattr(config, name)!r}"))
        for name in ("combiner", "vocabulary", "storage"):
            fact = (
                f"table {feature.table.name!r}: {name}",
                f"{getattr(config.table, name)!r}",
            )
            facts.append(fact)
    for stack in layout.stacks:
        what, optimizer = f"stack {stack.label!r}", stack.optimizer
        facts.append((f"{what}: layout", stack.name))
        facts.append((f"{what}: shard_axes", f"{stack.shard_axes}"))
        accumulates = optimizer is None or optimizer.use_gradient_accumulation
        facts.append((f"{what}: use_gradient_accumulation", f"{accumulates}"))
        if blocks is not None:
            facts.append((f"{what}: trained", f"{optimizer is not None}"))
            # Batches that were pickled before there was this option have no such fact.
            if stack.exchange_dtype is not None:
                facts.append((f"{what}: exchange_dtype", stack.exchange_dtype))
    return PlacedFor(tuple(facts))


# -- learning rates that are callables -------------------------------------------------------------

_CALLABLES = LearningRateKind.HOST, LearningRateKind.SCHEDULE


def rate_callables(
    layout: Layout, kinds: Sequence[LearningRateKind] = _CALLABLES
) -> list[Any]:
    """Return the learning rates of some kinds: each once, and those of one kind after another."""
    rates = [
        stack.optimizer.learning_rate for stack in layout.stacks if stack.optimizer
    ]
    found: list[Any] = []
    for kind in kinds:
        for rate in rates:
            # `not in` compares by equality: a bound method is a new, equal object at each access.
            if learning_rate_kind(rate) is kind and rate not in found:
                found.append(rate)
    return found


class HostRates:
    """Learning rates that are callables without arguments: read on the host, once per update.

    Equal callables share one tag: their index in what `read` returns.

    Args:
      layout: the engine's layout.
    """

    def __init__(self, layout: Layout) -> None:
        self._callables = rate_callables(layout, [LearningRateKind.HOST])
        # stack -> tag; many stacks may share one callable, which is then called once per update.
        self._tags: dict[int, int] = {}
        for g, stack in enumerate(layout.stacks):
            rate = None if stack.optimizer is None else stack.optimizer.learning_rate
            if rate in self._callables:
                self._tags[g] = self._callables.index(rate)

    def read(self) -> tuple[Array, ...]:
        """Call each callable once, and return their values: scalars `[]`, indexed by tag.

        Raises:
          ValueError: a callable does not return a number.
        """
        return tuple(_rate_scalar(rate(), rate) for rate in self._callables)

    def by_stack(self, values: Sequence[ArrayLike] | None) -> dict[int, Array]:
        """Return the learning rate of every stack whose rate is read on the host, by stack.

        Args:
          values: what `read` returned; None if there is nothing to read.

        Raises:
          ValueError: the number of values is not the number of callables.
        """
        given, most = () if values is None else values, len(self._callables)
        listed = isinstance(given, (tuple, list))
        if not listed or len(given) != most:
            refuse(
                "learning_rates",
                expected=f"{most} value(s), read outside the jitted function",
                got=f"{len(given)}" if listed and values is not None else repr(values),
                remedy="pass update(..., learning_rates=engine.learning_rates())",
            )
        # dtype `float` means float64 if x64 is on, otherwise float32.
        return {
            g: jnp.asarray(snapshot(given[tag]), float) for g, tag in self._tags.items()
        }


def _rate_scalar(value: Any, rate: Any) -> Array:
    """Return what the callable `rate` returned as a scalar `[]`."""
    try:
        scalar = jnp.asarray(snapshot(value), float)
    except (TypeError, ValueError):
        scalar = None
    if scalar is None or scalar.shape != ():
        name = getattr(rate, "__qualname__", repr(rate))
        refuse(
            f"learning_rate {name}",
            expected="a call that returns a number",
            got=repr(value),
        )
    return scalar


# -- descriptions ----------------------------------------------------------------------------------


def describe(layout: Layout) -> dict[str, Any]:
    """Return tables, their stacks and optimizers, and the devices, as plain objects.

    A learning rate is a number, or `{"tag": i}` with the index of a callable in
    `"learning_rates"`. The callables that are read on the host come first, in the order of
    `EmbeddingEngine.learning_rates`.

    Args:
      layout: the engine's layout.
    """
    mesh, callables = layout.axes.mesh, rate_callables(layout)
    return {
        "tables": {
            name: _describe_table(layout, *pair, callables)
            for name, pair in layout.tables.items()
        },
        "learning_rates": [_rate_name(rate) for rate in callables],
        "features": {feature.path: feature.table.name for feature in layout.features},
        "devices": mesh.size,
        "hosts": len(layout.axes.processes),
        "platform": mesh.devices.flat[0].platform,
        "mesh": {name: int(size) for name, size in mesh.shape.items()},
        "batch_axes": list(layout.axes.batch_axes),
        "sum_blocks": layout.sum_blocks,
        "jax": jax.__version__,
    }


def _describe_table(
    layout: Layout, stack: Stack, table: TableSlice, callables: Sequence[Any]
) -> dict[str, Any]:
    """Return what is known of one table, as plain objects."""
    features = [feature for feature in layout.features if feature.table == table]
    optimizer = stack.optimizer
    rate = None if optimizer is None else optimizer.learning_rate
    return {
        "vocabulary_size": table.declared_size,
        # Every shard has the same number of rows: V = 5 on 2 shards is stored as 6 rows.
        "padded_vocabulary_size": table.rows_per_shard * stack.num_shards,
        "dim": stack.dim,
        "dtype": stack.dtype,
        "exchange_dtype": stack.exchange_dtype,
        "rounding": stack.rounding,
        "placement": stack.placement,
        "shard_axes": list(stack.shard_axes),
        "shards": stack.num_shards,
        "stack": stack.name,
        "offset": table.offset,
        # A sequence counts as L features: it has one activation per position.
        "num_features": sum(
            max(1, feature.config.max_sequence_length) for feature in features
        ),
        "optimizer": None if optimizer is None else optimizer.describe(),
        "learning_rate": {"tag": callables.index(rate)} if callable(rate) else rate,
        "vocabulary": None
        if table.key_rules is None
        else dataclasses.asdict(table.key_rules),
        "storage": None if table.storage is None else dataclasses.asdict(table.storage),
    }


def _rate_name(rate: Any) -> str:
    return getattr(rate, "__qualname__", type(rate).__name__)


def describe_devices(layout: Layout) -> str:
    """Return in words which devices there are: `8 cpu devices (x: 4, y: 2)`."""
    mesh = layout.axes.mesh
    platform = (
        getattr(mesh.abstract_mesh.abstract_device, "platform", None) or "unknown"
    )
    axes = ", ".join(f"{name}: {size}" for name, size in mesh.shape.items())
    return f"{mesh.size} {platform} device{'' if mesh.size == 1 else 's'} ({axes})"


def describe_tables(layout: Layout) -> list[str]:
    """Return a line per table, such as `films: [1000, 16] float32, mod over 8 shards, Adam(0.1)`.

    A dynamic vocabulary adds how its keys are evicted: `…, keys (lru)`; a table on the host, where
    its rows are, how many of them the devices hold, and which leave first: `…, at home in memory,
    4096 rows on the devices (lru)`.

    Args:
      layout: the engine's layout.
    """
    return [_describe_line(*pair) for pair in layout.tables.values()]


def _describe_line(stack: Stack, table: TableSlice) -> str:
    shards = f" over {stack.num_shards} shards" if stack.num_shards > 1 else ""
    optimizer, rule = stack.optimizer, "not trained"
    if optimizer is not None:
        rate = optimizer.learning_rate
        described = optimizer.describe()
        rule = described.get("transform", described["class"])
        if rate is not None:
            rule += f"({_rate_name(rate) if callable(rate) else rate})"
    size = f"[{table.declared_size}, {stack.dim}] {stack.dtype}"
    if stack.rounding == "stochastic":
        size += " (stochastic rounding)"
    keys = "" if table.key_rules is None else f", keys ({table.key_rules.evict})"
    if (storage := table.storage) is not None:
        home = "memory" if storage.path is None else "a file"
        keys += f", at home in {home}, {storage.device_rows} rows on the devices ({storage.evict})"
    return f"{table.name}: {size}, {stack.placement}{shards}, {rule}{keys}"


def make_layout(
    declared: Structure,
    optimizer: Any,
    axes: MeshAxes,
    *,
    sum_blocks: int,
    stack_tables: bool,
    exchange_dtype: ExchangeDtype | None = None,
) -> Layout:
    """Return the layout of the declared tables over the mesh.

    Args:
      declared: the feature configuration.
      optimizer: the optimizer of tables that declare none, or None.
      axes: the mesh, and which of its axes split the batch.
      sum_blocks: G, see `Layout`.
      stack_tables: whether tables that can share one physical array do so.
      exchange_dtype: what rows and partial sums of sharded tables are rounded to; see
        `with_exchange_dtype`.

    Raises:
      ValueError: a placement is still "auto"; an optimizer is neither ours nor an optax transform,
        or does not fit its table; `exchange_dtype` is unknown or does not fit a table.
    """
    for name, config in declared.configs.items():
        if config.placement == "auto":
            refuse(
                f"table {name!r}: placement",
                expected="mod, div or replicated",
                got="'auto'",
                remedy="resolve it first: tpu_embed.planning.resolve(feature_config, ...)",
            )
    optimizers = _table_optimizers(declared, optimizer)
    tables = []
    for (name, config), rule in zip(declared.configs.items(), optimizers, strict=True):
        initializer = initializer_of(config)
        shard_axes = axes.shard_axes_of(name, config)
        shards = axes.size(shard_axes)
        tables.append(
            ResolvedTable(name, config, rule, initializer, shard_axes, shards)
        )
    stacks = make_stacks(
        tables, stack_tables=stack_tables, packing=packing_of(axes.device)
    )
    stacks = with_exchange_dtype(stacks, exchange_dtype)
    # table name -> (index of its stack, its slice of the stack)
    home = {
        table.name: (g, table)
        for g, stack in enumerate(stacks)
        for table in stack.tables
    }
    features = []
    for label, feature in zip(declared.labels, declared.features, strict=True):
        g, table = home[declared.table_names[declared.table_index(feature)]]
        features.append(FeatureLayout(label, feature, table, g))
    return Layout(axes, stacks, tuple(features), sum_blocks)


def initializer_of(config: TableConfig) -> Callable[..., Array]:
    """Return the initializer of a table: its own, or the default one."""
    return initializers.resolve(config.initializer, config.dim)


def _table_optimizers(declared: Structure, default: Any) -> list[TableOptimizer | None]:
    """Return the optimizer of every table; None for a table that is never updated.

    An object that is given for several tables is resolved once, so that these tables have equal
    optimizers and may share a stack.
    """
    known: dict[int, TableOptimizer | None] = {}

    def resolved(what, given):
        if id(given) not in known:
            try:
                known[id(given)] = as_table_optimizer(given)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        return known[id(given)]

    fallback = resolved("EmbeddingEngine", default)
    optimizers = []
    for name, config in declared.configs.items():
        own = fallback
        if config.optimizer is not None:
            own = resolved(f"table {name!r}", config.optimizer)
        own = own if config.trainable else None
        # Every device has a replicated table whole and must apply the same update to it, so its
        # gradients are first summed over all devices.
        if (
            own is not None
            and not own.use_gradient_accumulation
            and config.placement == "replicated"
        ):
            refuse(
                f"table {name!r}: use_gradient_accumulation",
                expected="True for a replicated table",
                got="False",
                remedy='place it "mod" or "div", or accumulate',
            )
        if own is not None and config.rounding == "stochastic":
            slots = own.slot_shapes(config.dim, np.float32).keys()
            if taken := sorted(slots & {*ROUNDING_SLOTS}):
                refuse(
                    f'table {name!r}: slots of an optimizer with rounding="stochastic"',
                    expected=f"other names than {', '.join(ROUNDING_SLOTS)}",
                    got=f"{taken}",
                    remedy="give these slots other names",
                )
        optimizers.append(own)
    return optimizers


def with_exchange_dtype(
    stacks: tuple[Stack, ...], exchange_dtype: ExchangeDtype | None
) -> tuple[Stack, ...]:
    """Return the stacks, those that are sharded with the dtype of their exchange.

    Args:
      stacks: the stacks. Replicated ones exchange no rows and keep whole sums: nothing is rounded.
      exchange_dtype: the option of the engine; None means "float32", which rounds nothing.

    Raises:
      ValueError: another dtype; a sharded table is float64, or its optimizer does not accumulate
        gradients, and they are to be rounded.
    """
    if exchange_dtype is not None:
        check_choice("exchange_dtype", exchange_dtype, get_args(ExchangeDtype))
    if exchange_dtype != "bfloat16":
        return stacks
    return tuple(
        _rounded(stack) if stack.placement != "replicated" else stack
        for stack in stacks
    )


def _rounded(stack: Stack) -> Stack:
    """Return a sharded stack whose rows and partial sums are rounded to bfloat16."""
    what, name = "exchange_dtype", stack.tables[0].name
    if stack.compute_dtype != np.float32:
        refuse(
            what,
            expected="tables of float32 or bfloat16 with exchange_dtype='bfloat16'",
            got=f"table {name!r} of {stack.dtype}",
            remedy="leave exchange_dtype out",
        )
    # Without accumulation there are no partial sums: each occurrence is applied by itself.
    if stack.optimizer is not None and not stack.optimizer.use_gradient_accumulation:
        refuse(
            what,
            expected="optimizers that accumulate gradients with exchange_dtype='bfloat16'",
            got=f"use_gradient_accumulation=False for table {name!r}",
            remedy="leave exchange_dtype out, or accumulate",
        )
    return dataclasses.replace(stack, exchange_dtype="bfloat16")
