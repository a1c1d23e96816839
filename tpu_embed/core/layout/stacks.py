"""Stacks: tables that are alike share one physical array, which is split over the devices.

Tables with the same dim, dtype, optimizer and placement are stacked, so that a compiled program
has one set of operations per stack, not per table. A stack is an array `[S * R, D]`: S shards of R
local rows each. (For a TPU the rows are packed, see `kernels/formats.py`.) A table with V logical
rows has ceil(V / S) local rows on every shard, from the local row `offset` on. Its logical row r
is the physical row

    MOD:  (r mod S) * R + offset + r div S
    DIV:  (r div rows_per_shard) * R + offset + r mod rows_per_shard

For example, a table of V = 5 rows on S = 2 shards with R = 3 and offset 0:

    MOD:  shard 0 holds rows 0 2 4, shard 1 holds rows 1 3 and one row of padding
    DIV:  shard 0 holds rows 0 1 2, shard 1 holds rows 3 4 and one row of padding

A replicated table is a MOD table with S = 1.

Input: the resolved tables, in table order. Output: the stacks, and
where each feature's table is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.config import FeatureConfig, QuantizationConfig, Rounding, TableConfig
from tpu_embed.kernels.formats import PACKED_ROWS, Packing, RowFormat
from tpu_embed.kernels.sparsecore import MOST_BYTES
from tpu_embed.kernels.stochastic import RowPlaces
from tpu_embed.optimizers import SlotShape, TableOptimizer
from tpu_embed.storage import HostStorage
from tpu_embed.vocabulary import DynamicVocabulary, KeyTable

ExchangeDtype = Literal["float32", "bfloat16"]
"""What is rounded where devices exchange it.

Rows travel from their owner shard to the devices that look them up, and partial sums of gradients
travel back. With "bfloat16" both are rounded to bfloat16 on their way, so they take half the bytes.
They are rounded on one device, too, where nothing travels: so tables have the same bits on every
number of devices. What is stored, and every sum, stays float32.
"""

INT32_ROWS = 2**31 - 1
"""The largest number of physical rows of a stack whose row ids are int32."""


@dataclasses.dataclass(frozen=True)
class TableSlice:
    """One logical table inside its stack.

    Attributes:
      name: the table's name.
      vocabulary_size: V, logical rows; of a table on the host, those that the devices hold.
      offset: the table's first local row, the same on every shard.
      rows_per_shard: ceil(V / S) local rows.
      initializer: the initializer of the rows (never None).
      vocabulary: how keys, or the ids of a table on the host, get its rows; None if its ids are row
        numbers.
      storage: of a table on the host; otherwise None.
      num_ids: V of a table on the host; 0 of any other.
      key_table: of a table on the host with a dynamic vocabulary, how keys get ids; otherwise None.
    """

    name: str
    vocabulary_size: int
    offset: int
    rows_per_shard: int
    initializer: Any = dataclasses.field(compare=False)
    vocabulary: DynamicVocabulary | None = None
    storage: HostStorage | None = None
    num_ids: int = 0
    key_table: KeyTable | None = None

    @property
    def declared_size(self) -> int:
        """V as it is declared: how many ids there are."""
        return self.num_ids or self.vocabulary_size

    @property
    def is_on_host(self) -> bool:
        """Whether its rows are at home on the host."""
        return self.storage is not None

    @property
    def key_rules(self) -> DynamicVocabulary | None:
        """How what users call keys get rows, at home or on the devices; None: ids are numbers."""
        if self.is_on_host:
            return None if self.key_table is None else self.key_table.vocabulary
        return self.vocabulary


@dataclasses.dataclass(frozen=True)
class Stack:
    """One stack: tables of one dim, dtype, optimizer and placement in one array `[S * R, D]`.

    Attributes:
      name: the stack's key in `TableState`; it says what the rows are (`stack_name`).
      tables: its tables, in table order.
      dim: D.
      dtype: the logical dtype of the stored rows.
      optimizer: the update rule; None if the tables are only looked up.
      placement: "mod", "div" or "replicated".
      shard_axes: mesh axes that split the rows, in mesh order; () if replicated.
      num_shards: S.
      num_rows: R, the local rows of one shard.
      quantization: how looked-up rows are quantized, or None.
      packing: which unit of the device its rows are packed for, or "none".
      exchange_dtype: what rows and partial sums are rounded to (`ExchangeDtype`); None: they
        are not rounded.
      rounding: how new values of rows are rounded when they are stored.
    """

    name: str
    tables: tuple[TableSlice, ...]
    dim: int
    dtype: str
    optimizer: TableOptimizer | None
    placement: str
    shard_axes: tuple[str, ...]
    num_shards: int
    num_rows: int
    quantization: QuantizationConfig | None
    packing: Packing = "none"
    exchange_dtype: str | None = None
    rounding: Rounding = "nearest"

    @property
    def is_on_host(self) -> bool:
        """Whether its tables are at home on the host; they share a stack with no others."""
        return self.tables[0].is_on_host

    @property
    def label(self) -> str:
        """The part of the name before the @, for profiles: XLA cuts names of operations there."""
        return self.name.partition("@")[0]

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows in the stack's array."""
        return self._format(self.dtype)

    @property
    def sent_rows_format(self) -> RowFormat:
        """The format in which rows are sent between devices."""
        return self._format(self.exchange_dtype or self.dtype)

    @property
    def sent_sums_format(self) -> RowFormat:
        """The format in which partial sums of the rows' gradients are sent."""
        return self._format(self.exchange_dtype or self.compute_dtype)

    def _format(self, dtype: str | np.dtype) -> RowFormat:
        return RowFormat((self.dim,), jnp.dtype(dtype), self.packing)

    @property
    def rounds_at_random(self) -> bool:
        """Whether updates round its new rows at random."""
        return self.rounding == "stochastic" and self.optimizer is not None

    @property
    def keeps_numbers(self) -> bool:
        """Whether the state keeps what stands for each row, because a map decides it."""
        # All tables of a stack that is rounded at random have a map, or none: see `kind`.
        return self.rounds_at_random and self.tables[0].vocabulary is not None

    @property
    def physical_rows(self) -> int:
        """S * R, the number of rows on all shards."""
        return self.num_shards * self.num_rows

    @property
    def index_dtype(self) -> np.dtype:
        """int32, or int64 for a stack of more than 2^31 - 1 physical rows."""
        return np.dtype(np.int32 if self.physical_rows <= INT32_ROWS else np.int64)

    @property
    def compute_dtype(self) -> np.dtype:
        """The dtype of activations, gradients, slots and rule arithmetic."""
        return _compute_dtype(self.dtype)

    def physical(self, ids: Any, table: TableSlice) -> Any:
        """Return the physical rows of valid logical ids (NumPy or jax integers of any shape).

        Args:
          ids: integers in [0, V). For an id outside, the result is meaningless and must be masked.
          table: the table's slice of this stack.
        """
        return self.physical_in(ids, table.offset, table.rows_per_shard)

    def physical_in(self, ids: Any, offset: Any, rows_per_shard: Any) -> Any:
        """Return the physical rows of logical ids that may belong to different tables.

        Args:
          ids: as for `physical`.
          offset: the offset of the table, or of each id's table; broadcasts to the ids' shape.
          rows_per_shard: the rows per shard of the table, or of each id's table; likewise.
        """
        if self.num_shards == 1:
            return ids + offset
        # Remainders are computed from the quotient, which saves a second division.
        if self.placement == "div":
            shard = ids // rows_per_shard
            return shard * self.num_rows + offset + (ids - shard * rows_per_shard)
        # MOD: local = r div S, so r - local * S = r mod S is the shard.
        local = ids // self.num_shards
        return (ids - local * self.num_shards) * self.num_rows + offset + local

    def logical_in(self, shard: Any, index: Any, rows_per_shard: Any) -> Any:
        """Return the logical row ids of local rows; the inverse of `physical_in`.

        Args:
          shard: the shard of each local row; NumPy or jax integers.
          index: the local row, counted from its table's first one (local row - offset); likewise.
          rows_per_shard: the rows per shard of the table, or of each row's table.

        Returns:
          Row ids in the broadcast shape; V or more for the padding at the end of a table. For an
          index outside [0, rows_per_shard) the result is meaningless and must be masked.
        """
        # With 2 shards of 3 rows, the indices 0, 1, 2 of shard 1 are the row ids 3, 4, 5 under DIV
        # (consecutive) and 1, 3, 5 under MOD (every second one).
        if self.placement == "div":
            return shard * rows_per_shard + index
        return index * self.num_shards + shard

    def logical_view(self, physical: Any, table: TableSlice) -> Any:
        """Return a table's part of a stack's array, with its rows in logical order.

        Args:
          physical: `[S * R, …]`, NumPy or jax.
          table: the table's slice of this stack.

        Returns:
          A view `[rows_per_shard, S, …]` (MOD) or `[S, rows_per_shard, …]` (DIV). Flattened to
          `[S * rows_per_shard, …]` its first V rows are the logical ones, the rest is padding.
        """
        # [S * R, …] -> [S, R, …] -> [S, rows_per_shard, …], the table's rows on each shard.
        by_shard = physical.reshape(self.num_shards, self.num_rows, *physical.shape[1:])
        mine = by_shard[:, table.offset : table.offset + table.rows_per_shard]
        # With MOD on 2 shards, shard 0 has rows 0, 2, 4 and shard 1 has 1, 3, 5: after the swap
        # they are read in the order 0, 1, 2, 3, ….
        return mine if self.placement == "div" else mine.swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class ResolvedTable:
    """A declared table in which every default is filled in.

    Attributes:
      name: its unique name.
      config: its config.
      optimizer: its update rule; None for a table that is never updated.
      initializer: the initializer of its rows.
      shard_axes: mesh axes that split its rows, in mesh order.
      shards: S, the product of the sizes of these axes.
    """

    name: str
    config: TableConfig
    optimizer: TableOptimizer | None
    initializer: Any
    shard_axes: tuple[str, ...]
    shards: int

    @property
    def rows_per_shard(self) -> int:
        """The number of local rows on each shard, ceil(V / S)."""
        return -(-self.config.device_rows // self.shards)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Everything that tables must have in common to share a stack."""
        config, optimizer = self.config, self.optimizer
        rule = None if optimizer is None else (type(optimizer), optimizer)
        declared = (
            config.dim,
            config.dtype,
            config.placement,
            config.quantization_config,
        )
        # Visits bring all rows along, and `NUMBERS_SLOT` keeps numbers of all rows.
        rounds = config.rounding == "stochastic" and (config.row_rules is not None,)
        return (*declared, self.shard_axes, rule, config.storage is not None, rounds)


def make_stacks(
    tables: Sequence[ResolvedTable],
    *,
    stack_tables: bool = True,
    packing: Packing = "none",
) -> tuple[Stack, ...]:
    """Divide the tables into stacks, and lay out every stack over the mesh.

    Args:
      tables: the tables, in table order.
      stack_tables: False gives every table a stack of its own.
      packing: which unit of the device the rows are packed for, or "none".

    Returns:
      The stacks, in order of their first table. A stack has at most `INT32_ROWS` rows, unless a
      single table has more. For SparseCores, its table and each of its slots have at most
      `sparsecore.MOST_BYTES` on a device.

    Raises:
      ValueError: a table has more than `INT32_ROWS` rows, and x64 is off; it, or one of its slots,
        has more bytes on a device than SparseCores address.
    """
    stacks: dict[Any, list[ResolvedTable]] = {}
    for table in tables:
        key: Any = (table.kind, None if stack_tables else table.name)
        # If the stack would become too large, try the next stack of this kind: the keys are
        # key, (key, "next"), ((key, "next"), "next"), …
        while key in stacks and (
            _too_many_rows(larger := [*stacks[key], table], packing)
            or _array_bytes(larger, packing) > MOST_BYTES
        ):
            key = (key, "next")
        stacks.setdefault(key, []).append(table)
    return tuple(_make_stack(members, packing) for members in stacks.values())


def _array_bytes(members: Sequence[ResolvedTable], packing: Packing) -> int:
    """Return the bytes on a device of the largest array of a stack that SparseCores would read.

    That is the array of the tables or of a slot; 0 on other devices.
    """
    if packing != "words":
        return 0
    config, optimizer = members[0].config, members[0].optimizer
    parts = [((config.dim,), config.dtype)]
    if optimizer is not None:
        slots = optimizer.slot_shapes(config.dim, _compute_dtype(config.dtype)).values()
        parts += [(slot.shape, slot.dtype) for slot in slots if slot.per_row]
    rows = _rows(members, packing)
    arrays = [
        RowFormat(shape, jnp.dtype(dtype), packing).array(rows)
        for shape, dtype in parts
    ]
    return max(math.prod(array.shape) * array.dtype.itemsize for array in arrays)


def _compute_dtype(dtype: str) -> np.dtype:
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def _too_many_rows(members: Sequence[ResolvedTable], packing: Packing) -> bool:
    """Tell whether a stack of these tables would have more physical rows than int32 can number."""
    return _rows(members, packing) * members[0].shards > INT32_ROWS


def _rows(members: Sequence[ResolvedTable], packing: Packing) -> int:
    """Return R, the local rows of a stack of these tables, rounded up if rows are packed."""
    rows = sum(table.rows_per_shard for table in members)
    return rows if packing == "none" else round_up(rows, PACKED_ROWS)


def _make_stack(members: Sequence[ResolvedTable], packing: Packing) -> Stack:
    first, size = members[0], _array_bytes(members, packing)
    config = first.config
    if _too_many_rows(members, packing) and not jax.config.read("jax_enable_x64"):
        refuse(
            f"table {first.name!r}",
            expected=f"at most {INT32_ROWS} rows, padding included, while x64 is off",
            got=f"{config.device_rows}",
            remedy="set jax_enable_x64, or split the table",
        )
    if size > MOST_BYTES:  # of a single table
        most, shards = MOST_BYTES / 2**30, first.shards * -(-size // MOST_BYTES)
        expected = (
            f"at most {most:.0f} GiB on a device, in the table and in each of its slots"
        )
        got = f"{size / 2**30:.1f} GiB, more than SparseCores address"
        what, remedy = (
            f"table {first.name!r}",
            f"split its rows over {shards} shards or more, or ",
        )
        remedy += 'take fewer bytes per row (dtype="bfloat16", RowWiseAdagrad)'
        refuse(what, expected=expected, got=got, remedy=remedy)
    # The tables lie one after another on every shard: rows per shard 3 2 4 give offsets 0 3 5.
    slices, offset = [], 0
    for table in members:
        size, own, rules = (
            table.config.device_rows,
            table.rows_per_shard,
            table.config.row_rules,
        )
        made = table.initializer, rules, table.config.storage, *_at_home(table.config)
        slices.append(TableSlice(table.name, size, offset, own, *made))
        offset += own
    # The tables agree in everything but name, vocabulary and initializer; the first stands for all.
    rows = _rows(members, packing)
    kind = (config.dim, config.dtype, packing)
    living = [table.name for table in slices if table.vocabulary is not None]
    return Stack(
        name=stack_name(
            [(table.name, table.vocabulary_size) for table in slices],
            placement=config.placement,
            shards=first.shards,
            rows=rows,
            kind=(*kind, living) if living else kind,
        ),
        tables=tuple(slices),
        dim=config.dim,
        dtype=config.dtype,
        optimizer=first.optimizer,
        placement=config.placement,
        shard_axes=first.shard_axes,
        num_shards=first.shards,
        num_rows=rows,
        quantization=config.quantization_config,
        packing=packing,
        rounding=config.rounding,
    )


def _at_home(config: TableConfig) -> tuple[int, KeyTable | None]:
    """Return `num_ids` and `key_table` of a table."""
    if config.storage is None:
        return 0, None
    size, rules = config.vocabulary_size, config.vocabulary
    return size, None if rules is None else KeyTable(size, rules)


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """One feature, and where its table lives.

    Attributes:
      path: the feature's path in the configuration, for messages.
      config: the feature's config.
      table: its table's slice of the stack.
      stack: the index of the stack in `Layout.stacks`.
    """

    path: str
    config: FeatureConfig
    table: TableSlice
    stack: int


# -- names of stacks ------------------------------------------------------------------------------


_LABEL_LENGTH = 32
"""How many characters of the first table's name a stack's name shows."""
# Example: items+2@mod8x250#0f3a9c1e55d2
_FORM = re.compile(
    r"(?P<label>[^@]*)@(?P<placement>[a-z]+)(?P<shards>\d+)x(?P<rows>\d+)#(?P<digest>\w+)"
)


def stack_name(
    tables: Sequence[tuple[str, int]],
    *,
    placement: str,
    shards: int,
    rows: int,
    kind: Any,
) -> str:
    """Return the name of a stack.

    It says what the stack's rows are, so that layouts can't be confused: it is the key of the
    stack's arrays in a `TableState`, and keys survive pickle, orbax and `jax.tree`. Static fields
    of a pytree do not, because orbax takes the template's. For example

        items+2@mod8x250#0f3a9c1e55d2

    is the stack of "items" and two more tables, placed by MOD on 8 shards of 250 rows each. After
    "#" comes a digest of the tables in order (names and vocabulary sizes), of their dim and dtype,
    of how rows are packed, and of the names of tables with a dynamic vocabulary. Optimizers are not
    part of it, because their hyperparameters may change between runs.

    Args:
      tables: (name, vocabulary size) of its tables, in the order of their rows.
      placement: "mod", "div" or "replicated".
      shards: S.
      rows: R, the rows of one shard.
      kind: whatever else decides how the rows are stored; its `repr` goes into the digest.

    Example:
      >>> stack_name([("items", 2000)], placement="mod", shards=8, rows=250, kind=(64, "float32"))
      'items@mod8x250#a49d2e99fd13'
    """
    # Replace what could be confused with a separator (@, #, +) or a part of a file path.
    label = re.sub(r"[^\w-]", "_", tables[0][0], flags=re.ASCII)[:_LABEL_LENGTH]
    if len(tables) > 1:
        label += f"+{len(tables) - 1}"
    digest = hashlib.blake2b(
        repr((list(tables), kind)).encode(), digest_size=6
    ).hexdigest()
    return f"{label}@{placement}{shards}x{rows}#{digest}"


def differences(expected: str, got: str) -> str:
    """Return in words how the stack named `got` differs from the stack named `expected`.

    Example:
      >>> differences("items@mod8x250#0f3a", "items@mod1x2000#0f3a")
      'the same tables in 1 shard of 2000 rows (mod), not in 8 shards of 250 rows (mod)'
    """
    ours, theirs = _FORM.fullmatch(expected), _FORM.fullmatch(got)
    if ours is None or theirs is None:
        return "a name that is not the name of a stack"
    if ours["digest"] == theirs["digest"]:
        return f"the same tables in {_shards(theirs)}, not in {_shards(ours)}"
    return "other tables, or tables of another vocabulary size, dim or dtype, or packed differently"


def _shards(name: re.Match[str]) -> str:
    plural = "" if name["shards"] == "1" else "s"
    return (
        f"{name['shards']} shard{plural} of {name['rows']} rows ({name['placement']})"
    )


# -- sizes of arrays -------------------------------------------------------------------------------
#
# A compiled program depends on the shapes of its arrays. If the number of ids in a batch were used
# as it is, nearly every batch would need a program of its own; rounded up to one of a few sizes
# ("buckets"), batches share programs, at the cost of some padding.

ROW_MULTIPLE = 64
"""The number of rows in one call of an initializer or an optimizer's rule is a multiple of this.

Vectorised loops then have no remainder, in which rounding could differ from the loop's body.
"""


def round_up(n: int, multiple: int) -> int:
    """Return the least positive multiple of `multiple` that is at least `n`."""
    # -(-n // m) is n / m rounded up.
    return max(1, -(-n // multiple)) * multiple


def bucket(n: int) -> int:
    """Return `n` rounded up so that about one part in eight is padding at most.

    There are eight sizes between each power of two and the next: 64, 72, 80, …, 120, 128.

    Example:
      >>> [bucket(n) for n in (0, 7, 9, 100, 1000)]
      [0, 8, 9, 104, 1024]
    """
    if n == 0:
        return 0
    # 100 has 7 bits, so 64 <= n < 128, and the step is 2**(7 - 4) = 64 / 8 = 8.
    step = max(1, 2 ** max(0, n.bit_length() - 4))
    return max(8, -(-n // step) * step)


def roomy(n: int) -> int:
    """Return a bucket that has room for the next batches too.

    A count that is n in one batch varies by about √n from batch to batch, so 2√n is added.

    Example:
      >>> [roomy(n) for n in (0, 20, 1000, 100_000)]
      [0, 28, 1152, 106496]
    """
    return bucket(n + 2 * math.isqrt(n))


# -- rounding at random ----------------------------------------------------------------------------
#
# Random bits depend on a seed, which the state must keep, and on which row of which table a local
# row is (`kernels/stochastic.py`). Of a table without a map on the host, the row's place tells it.
# Of a dynamic vocabulary, or a table on the host, the key or id of a row takes the place of its
# number, so the state keeps it by row. Both are slots of the stack: so they are saved, moved and
# sharded as slots are.

SEED_SLOT = "rounding_seed"
"""The slot that all rows share: the seed, uint32 `[]`, equal in all stacks of a state."""

NUMBERS_SLOT = "rounding_numbers"
"""The slot with what stands for each row's key or id in the hash, uint32 `[V]`."""

ROUNDING_SLOTS = (SEED_SLOT, NUMBERS_SLOT)
"""The slots of a stack that are not its optimizer's."""


def rounding_slots(stack: Stack) -> dict[str, SlotShape]:
    """Return the slots that a stack has for rounding at random; none if it does not."""
    number = np.dtype(np.uint32)
    slots = {}
    if stack.rounds_at_random:
        slots[SEED_SLOT] = SlotShape((), number, per_row=False)
    if stack.keeps_numbers:
        slots[NUMBERS_SLOT] = SlotShape((), number)
    return slots


def table_crcs(tables: Sequence[TableSlice]) -> np.ndarray:
    """Return the CRC-32 of the name of each table, uint32 `[T]`."""
    return np.array([zlib.crc32(table.name.encode()) for table in tables], np.uint32)


def row_places(stack: Stack) -> RowPlaces:
    """Return which rows of which tables the local rows of a shard are."""
    # The rows of 2 shards are 0 2 4 and 1 3 5 under MOD: 1 from shard to shard, and 2 from row to
    # row. Under DIV they are 0 1 2 and 3 4 5, so 3 and 1.
    sizes = [table.rows_per_shard for table in stack.tables]
    shard_steps = tuple(stack.logical_in(1, 0, size) for size in sizes)
    firsts = tuple(table.offset for table in stack.tables)
    return RowPlaces(firsts, shard_steps, stack.logical_in(0, 1, sizes[0]))
