"""Look up rows for serving, in plain arrays: no mesh, no optimizer, no training state.

Ids are checked, packed and combined by the same code as in training; only the place that rows are
read from differs (`Stored`). Every table is its own stack on one shard, so no table is copied. It
is whole, quantized, or has only the rows that the host has picked.

Ids of tables on the host may have 64 bits, and their rows are wherever a function gets them from.
So the distinct ids of a call are numbered, and the lookup reads a table of their rows only:

    ids 9 2**40 9     ->  numbers 0 1 0     table [row of 9, row of 2**40]

Those that nobody has trained have first rows; an exported program finds them in an array of their
own, by the numbers after the exported rows.

Input: tables by `TableConfig` or name, and features. Output: the activations that
`EmbeddingEngine.lookup` returns for the same tables, with the same bits on CPU; those of an engine
without `exchange_dtype`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from tpu_embed._checks import check_type, message, refuse
from tpu_embed._types import PADDING_ID, Array, PyTree, Tracer, snapshot
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.batch import (
    Batch,
    BatchSpec,
    TracedIds,
    fields_of,
    line_length,
    line_of,
    make_traced,
    view_stacks,
)
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.ids import (
    HostIds,
    RaggedIds,
    SparseIds,
    Structure,
    give_rows,
    host_ids,
    structure,
)
from tpu_embed.core.layout import (
    FeatureLayout,
    Layout,
    MeshAxes,
    ResolvedTable,
    Stack,
    make_stacks,
)
from tpu_embed.core.lookup import by_feature, combine, not_differentiable
from tpu_embed.core.place import natural_spec, pack_line
from tpu_embed.core.state import TableState, first_rows
from tpu_embed.io.quantize import QuantizedTable
from tpu_embed.kernels import dispatch, storage
from tpu_embed.kernels.operands import RowsToSum
from tpu_embed.storage import Rows
from tpu_embed.vocabulary import FixedVocabulary, Vocabularies

FIRST = "first"
"""The name of the array of first rows among the parts of a table."""


Find = Callable[[np.ndarray], np.ndarray]
"""Returns the rows of keys, uint64 `[n]`; -1 for keys without a row."""


def serving_lookup(
    tables: Any,
    features: PyTree,
    feature_config: PyTree,
    weights: PyTree | None = None,
    *,
    vocabularies: Any = None,
) -> PyTree:
    """Return the activations of features, looked up in plain arrays.

    Rows are read as they are stored: the `exchange_dtype` of an engine, which rounds them on their
    way between devices, has no counterpart here.

    Outside of a jit, only the rows that the ids name are read from NumPy tables, also from
    memory-mapped ones. Inside a jit, pass the tables as its arguments: an array that a jit closes
    over becomes a constant of the program.

    Args:
      tables: one array `[V, D]` in the table's dtype (NumPy or JAX) or `QuantizedTable` per table,
        by `TableConfig` or by name; declared tables that the features do not use may be missing.
        Of a table on the host (`storage=`), a function that returns the rows of ids: it takes
        int64 `[n]`, all different, and returns `[n, D]` in the table's dtype, such as
        `functools.partial(engine.rows, state, name)`.
      features: arrays, columns of a data set, `SparseIds` or `RaggedIds` in the structure of the
        features, of which mappings may leave out some; inside a jit, dense arrays. Each has a batch
        size of its own.
      feature_config: as for `EmbeddingEngine`; optimizers and placements are ignored.
      weights: one weight per id in the same structure, None for a feature without weights.
      vocabularies: the rows of keys, for tables with a dynamic vocabulary: `engine.vocabularies`,
        or a `FixedVocabulary` by `TableConfig` or by name. Keys without a row have a zero row, or
        the one that unseen keys share. Tables and vocabulary must be of the same step:
        `engine.vocabularies` goes on with the training, so keep a `FixedVocabulary` beside tables
        that you publish.

    Returns:
      One array `[B, …, D]` per given feature in the structure of the features, float32 (float64
      for a float64 table); a `Jagged` of one replica for a jagged feature.

    Raises:
      ValueError: a table is missing, not declared, or has another shape or dtype; ids, weights,
        structure or batch size are bad, as for `EmbeddingEngine.place`.
      TypeError: ids are not integers; a container has another type; the lookup is differentiated
        with respect to the tables.

    Example:
      >>> import numpy as np
      >>> from tpu_embed import FeatureConfig, TableConfig
      >>> films = TableConfig(vocabulary_size=3, dim=2, combiner="sum", name="films")
      >>> table = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
      >>> serving_lookup({films: table}, np.array([[0, 2], [1, -1]]), FeatureConfig(films)).tolist()
      [[6.0, 8.0], [3.0, 4.0]]
    """
    whole = structure.flatten(feature_config)
    declared = whole.part(features)
    stored = stored_tables(tables, whole, declared)
    given, scales = declared.match_weighted(features, weights)
    server = server_of(declared)
    if any(isinstance(leaf, Tracer) for leaf in (*given, *scales)):
        for name, table in declared.configs.items():
            if table.row_rules is not None:
                living = table.vocabulary is not None
                refuse(
                    f"table {name!r}",
                    expected="ids that are row numbers on the devices",
                    got="keys of a dynamic vocabulary"
                    if living
                    else "ids of a table on the host",
                    remedy="look up outside the jit, and give it the activations",
                )
        source = server.traced(given, scales)
        # All: others were refused.
        arrays = [one for one in stored if isinstance(one, Stored)]
        found, bad_ids = server.activations(arrays, source)
        source.report(bad_ids, server.layout)
    else:
        found = server.placed(
            stored, given, scales, _finders(vocabularies, whole, declared)
        )
    return declared.unflatten(found)


def server_of(declared: Structure) -> Server:
    """Return the server of a feature configuration; equal configurations share one."""
    return _server(
        declared.labels, declared.features, declared.tables, declared.table_names
    )


@functools.lru_cache(64)
def _server(
    labels: tuple[str, ...],
    features: tuple[FeatureConfig, ...],
    tables: tuple[TableConfig, ...],
    names: tuple[str, ...],
) -> Server:
    resolved = [
        ResolvedTable(name, table, None, None, (), 1)
        for name, table in zip(names, tables, strict=True)
    ]
    stacks = make_stacks(resolved, stack_tables=False)
    located = []
    for label, feature in zip(labels, features, strict=True):
        g = tables.index(feature.table)
        located.append(FeatureLayout(label, feature, stacks[g].tables[0], g))
    nowhere: Any = AbstractMesh((), (), axis_types=())
    return Server(Layout(MeshAxes(nowhere, ()), stacks, tuple(located), sum_blocks=1))


def _rounded(spec: BatchSpec) -> BatchSpec:
    """Return the spec with sizes rounded up to powers of two, so that few programs compile."""
    stacks = tuple(
        dataclasses.replace(stack, ids=_power_of_two(stack.ids))
        for stack in spec.stacks
    )
    shapes = tuple(
        shape.with_capacity(_power_of_two(shape.capacity or 0))
        for shape in spec.feature_shapes
    )
    return dataclasses.replace(spec, feature_shapes=shapes, stacks=stacks)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


class Server:
    """The lookup of one feature configuration, compiled once per `BatchSpec`.

    Args:
      layout: one stack of one shard per table, in table order.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._program = jax.jit(lambda *operands: self.activations(*operands)[0])

    def placed(
        self,
        tables: Sequence[Stored | RowSource],
        ids: Sequence[Any],
        weights: Sequence[Any],
        find: Mapping[str, Find],
    ) -> Any:
        """Return one activation per feature, for ids on the host.

        Args:
          tables: the tables in order.
          ids: one leaf per feature.
          weights: one leaf per feature; None for a feature without weights.
          find: finds the rows of keys, by table.

        Raises:
          ValueError: whatever `host_ids` refuses.
          TypeError: whatever `host_ids` refuses.
        """
        layout = self.layout
        hosts = [
            host_ids(
                f"feature {feature.path!r}", feature.config, feature.table.name, *leaves
            )
            for feature, *leaves in zip(layout.features, ids, weights, strict=True)
        ]
        hosts, whole = _with_rows(hosts, layout, tables, find)
        spec = _rounded(natural_spec(hosts, layout, layout.axes.replicas))
        line, operands = line_of(spec, layout), []
        packed = np.empty((1, line_length(line)), np.int32)
        for (view, fields), table in zip(line, whole, strict=True):
            own = fields_of(packed, fields)
            pack_line(hosts, view, own)
            operands.append(table.operand(own["row_ids"][0]))
        array: Any = packed
        return self._program(tuple(operands), Batch.of(array, spec, layout))

    def traced(self, ids: Sequence[Any], weights: Sequence[Any]) -> TracedIds:
        """Return dense ids inside a jit in the form that `activations` takes.

        Args:
          ids: one leaf per feature.
          weights: one leaf per feature; None for a feature without weights.

        Raises:
          ValueError: a leaf is not an array; whatever `make_traced` refuses.
          TypeError: whatever `make_traced` refuses.
        """
        for feature, *leaves in zip(self.layout.features, ids, weights, strict=True):
            if any(isinstance(leaf, (SparseIds, RaggedIds)) for leaf in leaves):
                refuse(
                    f"feature {feature.path!r}",
                    expected="dense arrays beside traced ones",
                    got="SparseIds or RaggedIds",
                    remedy="give bags as an array padded with -1, or look up outside the jit",
                )
        return make_traced(ids, weights, None, self.layout)

    def activations(
        self, tables: Sequence[Stored], source: Batch | TracedIds
    ) -> tuple[list[Array], Array]:
        """Return one activation per feature, and the counts of bad ids, int32 `[F]`; runs in a jit.

        Args:
          tables: the tables in order.
          source: the ids.
        """
        layout = self.layout
        (located, bad_ids), splits = source.locate(layout), source.row_splits(layout)
        pairs = zip(layout.stacks, jax.tree.map(jnp.asarray, tables), strict=True)
        fixed: dict[str, Any] = not_differentiable(
            {stack.name: table for stack, table in pairs}
        )
        found: dict[int, Any] = {}
        for view, ids in zip(view_stacks(source.spec, layout), located, strict=True):
            stack = view.stack
            with jax.named_scope(f"lookup/{stack.tables[0].name}"):
                values, index = fixed[stack.name].found(ids.index, stack)
                rows = RowsToSum(values, index, ids.bags, ids.gains)
                found |= by_feature(combine(rows, view.sum_layout, stack), view, splits)
        return [found[f] for f in range(len(layout.features))], bad_ids


# -- tables ---------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """One table as it is served.

    Attributes:
      arrays: NumPy or JAX arrays by part. `"values"` is `[V, D]` in the table's dtype (bfloat16
        also as its bits in uint16); or int8, with `"scale"` and `"offset"`, float32 `[V]`.
      picked: whether the arrays have one row per id instead, in the order of the ids.
    """

    arrays: dict[str, Any]
    picked: bool = dataclasses.field(default=False, metadata={"static": True})

    def operand(self, row_ids: np.ndarray) -> Stored:
        """Return what a program takes to look up ids, `[N]`.

        Of NumPy arrays only the rows go there, any row for an absent id.
        """
        if not all(isinstance(array, np.ndarray) for array in self.arrays.values()):
            return jax.tree.map(snapshot, self)
        valid = np.maximum(row_ids, 0)
        return Stored(
            {name: array[valid] for name, array in self.arrays.items()}, picked=True
        )

    def read(self, rows: np.ndarray) -> Rows:
        """Return some rows, int64 `[n]`, on the host, by part."""
        return {name: np.asarray(array)[rows] for name, array in self.arrays.items()}

    def found(self, row_ids: Array, stack: Stack) -> tuple[Array, Array]:
        """Return rows in the compute dtype, and the position of each id's row; runs in a jit.

        Args:
          row_ids: row ids `[N]`, `PADDING_ID` for an absent id.
          stack: the stack of this table.
        """
        # A plain table needs no gather: the row ids themselves are positions in its values.
        values = self.arrays["values"]
        plain = (
            values.dtype in (stack.compute_dtype, jnp.uint16)
            and FIRST not in self.arrays
        )
        if not self.picked and plain:
            return values, row_ids
        arrays = {name: array for name, array in self.arrays.items() if name != FIRST}
        if not self.picked:
            arrays = {
                name: dispatch.gather_rows(a, row_ids) for name, a in arrays.items()
            }
        values = arrays["values"]
        if "scale" in arrays:
            values = QuantizedTable(**arrays).dequantized()
        if FIRST in self.arrays:
            values = self._with_first(values, row_ids)
        if values.dtype != jnp.uint16:
            values = values.astype(stack.compute_dtype)
        positions = jax.lax.iota(row_ids.dtype, row_ids.shape[0])
        return values, jnp.where(
            row_ids < 0, jnp.asarray(PADDING_ID, row_ids.dtype), positions
        )

    def _with_first(self, values: Array, row_ids: Array) -> Array:
        """Return rows `[N, D]`, those with a number beyond the table from the rows drawn first."""
        num_rows = self.arrays["values"].shape[0]
        numbers = (row_ids - num_rows).astype(row_ids.dtype)
        drawn = dispatch.gather_rows(
            self.arrays[FIRST], jnp.maximum(numbers, PADDING_ID)
        )
        if (
            values.dtype != drawn.dtype
        ):  # dequantized ones are floats, and bfloat16 ones are bits
            drawn = (
                storage.decode(drawn, "bfloat16")
                if drawn.dtype == jnp.uint16
                else drawn
            )
            drawn = drawn.astype(values.dtype)
        return jnp.where((numbers >= 0)[:, None], drawn, values)


@dataclasses.dataclass(frozen=True, eq=False)
class HostTable:
    """The rows of a table on the host whose ids are row numbers; call it with ids.

    Attributes:
      rows: returns the rows of ids, int64 `[n]`, all different, as `[n, D]`.
      ids: those that training batches had, int64 `[n]`, ascending.
      first_rows: draws the first rows of ids that nobody has trained, also in a jit; see
        `core.state.first_rows`.
    """

    rows: Callable[[np.ndarray], np.ndarray]
    ids: np.ndarray
    first_rows: Callable[[Array], Array]

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids, int64 `[n]`, as `[n, D]`."""
        return self.rows(ids)


def host_table(engine: EmbeddingEngine, state: TableState, name: str) -> HostTable:
    """Return a table on the host for `serving_lookup` or `export_model`.

    It reads rows when it is asked, so the state must stay the newest one until then.

    Args:
      engine: the engine that made the state.
      state: the newest state.
      name: the table, which has `storage` and no vocabulary.

    Raises:
      ValueError: it is no such table.
    """
    ids = engine.touched(name)
    stack, table = engine.layout.table(name)
    if table.key_table is not None or state.vocabulary is None:
        refuse(
            "table",
            expected="a table on the host whose ids are row numbers",
            got=f"{name!r}",
            remedy="functools.partial(engine.rows, state, name) is a function of its ids",
        )
    rows = functools.partial(engine.rows, state, name)
    return HostTable(rows, ids, first_rows(state.vocabulary, table, stack))


@dataclasses.dataclass(frozen=True)
class RowSource:
    """A table on the host as it is served: a function returns the rows of ids.

    Attributes:
      what: the table, for messages.
      rows: takes ids, int64 `[n]`, all different, and returns their rows `[n, D]`.
      dim: D.
      dtype: of the rows.
    """

    what: str
    rows: Callable[[np.ndarray], Any]
    dim: int
    dtype: str

    def read(self, ids: np.ndarray) -> Rows:
        """Return the rows of ids, int64 `[n]`, by part.

        Raises:
          ValueError: the function returns something else.
        """
        found = np.asarray(self.rows(ids))
        if found.shape != (ids.size, self.dim) or found.dtype.name != self.dtype:
            refuse(
                self.what,
                expected=f"{self.dtype} of shape ({ids.size}, {self.dim}) from its function",
                got=f"{found.dtype.name} of shape {found.shape}",
            )
        return {"values": found}


def stored_tables(
    tables: Any, declared: Structure, used: Structure | None = None
) -> tuple[Stored | RowSource, ...]:
    """Return what each table that is used is served from, after checking shapes and dtypes.

    Args:
      tables: arrays `[V, D]` in the table's dtype, or `QuantizedTable`s, by `TableConfig` or name;
        functions for tables on the host.
      declared: the feature configuration.
      used: the part of it that is looked up; other declared tables may be missing. None: all.

    Raises:
      ValueError: a table is missing, given twice or not declared, or has another shape or dtype.
      TypeError: `tables` is not a mapping.
    """
    used = declared if used is None else used
    names = used.table_names
    given = _by_name("tables", tables, declared)
    absent, surplus = set(names) - set(given), set(given) - set(declared.table_names)
    if absent or surplus:
        problem = "missing" if absent else "not declared"
        refuse(
            f"tables: {', '.join(sorted(absent or surplus))} {problem}",
            expected=f"exactly {sorted(names)}",
            got=f"{sorted(given)}",
            remedy="key them by TableConfig, or by its name (table_0, … without one)",
        )
    return tuple(
        _stored(f"table {name!r}", given[name], config)
        for name, config in used.configs.items()
    )


def _by_name(what: str, given: Any, declared: Structure) -> dict[str, Any]:
    """Return by name what a user gives by `TableConfig` or by name."""
    check_type(
        what,
        given,
        Mapping,
        expected="a mapping from TableConfig or table name to its array",
    )
    names = dict(zip(declared.tables, declared.table_names, strict=True))
    found: dict[str, Any] = {}
    for key, one in given.items():
        name = names.get(key, f"{key!r}") if isinstance(key, TableConfig) else str(key)
        if name in found:
            refuse(
                f"{what}: {name}",
                expected="each table once",
                got="it by TableConfig and by name",
            )
        found[name] = one
    return found


def _stored(what: str, table: Any, config: TableConfig) -> Stored | RowSource:
    rows, dim = config.vocabulary_size, config.dim
    if config.storage is not None:
        if not callable(table):
            expected, got = (
                "a function from ids to rows, for a table on the host",
                type(table),
            )
            refuse(
                what,
                expected=expected,
                got=got.__name__,
                remedy="functools.partial(engine.rows, state, name) is one; or leave storage out",
            )
        return RowSource(what, table, dim, config.dtype)
    if isinstance(table, QuantizedTable):
        arrays = dict(vars(table))
        _check(f"{what}: values", table.values, "int8", (rows, dim))
        for part in ("scale", "offset"):
            _check(f"{what}: {part}", arrays[part], "float32", (rows,))
        return Stored(arrays)
    _check(what, table, config.dtype, (rows, dim))
    return Stored({"values": table})


def _check(what: str, array: Any, dtype: str, shape: tuple[int, ...]) -> None:
    if not isinstance(array, (np.ndarray, jax.Array)):
        got = type(array).__name__
    elif not np.dtype(array.dtype).isnative:
        got = f"{np.dtype(array.dtype).str}, of another byte order"
    elif jnp.dtype(array.dtype).name != dtype or array.shape != shape:
        got = f"{jnp.dtype(array.dtype).name} of shape {tuple(array.shape)}"
    else:
        return
    refuse(
        what,
        expected=f"{dtype} of shape {shape}",
        got=got,
        remedy="give what the training engine's tables returned, or cast it to the declared dtype",
    )


# -- keys, and ids of tables on the host ---------------------------------------------------------


def _finders(given: Any, whole: Structure, used: Structure) -> dict[str, Find]:
    """Return how the keys of each table that is used are found, by the table's name.

    Args:
      given: `Vocabularies`; or a `FixedVocabulary` by `TableConfig` or by name; or None.
      whole: the feature configuration.
      used: the part of it that is looked up.

    Raises:
      ValueError: a vocabulary is missing, does not fit its table, or is of a table whose ids
        are row numbers.
      TypeError: it is of another type.
    """
    living = {
        name: one for name, one in used.configs.items() if one.vocabulary is not None
    }
    if isinstance(given, Vocabularies):
        found = {n: _find_now(given, n, living[n]) for n in living if n in given.tables}
    elif given is None or isinstance(given, Mapping):
        found = {name: one.find for name, one in _fixed(given, whole).items()}
    else:
        refuse(
            "vocabularies",
            expected="engine.vocabularies, or a mapping by table",
            got=type(given).__name__,
            error=TypeError,
        )
    missing = sorted(living.keys() - found.keys())
    if missing:
        refuse(
            "vocabularies",
            expected=f"those of the tables {[*living]}, whose ids are keys",
            got=f"none of {missing}",
            remedy="give vocabularies=engine.vocabularies, or "
            "FixedVocabulary(*vocabularies.keys(…))",
        )
    return {name: found[name] for name in living}


def all_keys(given: Any, declared: Structure) -> dict[str, FixedVocabulary]:
    """Return the keys of each table with a dynamic vocabulary, by the table's name.

    Args:
      given: as for `serving_lookup`.
      declared: the feature configuration.

    Raises:
      ValueError, TypeError: as for `serving_lookup`.
    """
    living = _finders(given, declared, declared)  # checks them
    if isinstance(given, Vocabularies):
        return {name: FixedVocabulary(*given.keys(name)) for name in living}
    return _fixed(given, declared)


def tables_on_host(
    declared: Structure, given: Sequence[Stored | RowSource]
) -> dict[str, HostTable]:
    """Return each table on the host whose ids are row numbers, by its name.

    Args:
      declared: the feature configuration.
      given: what its tables are served from.

    Raises:
      ValueError: nobody has said which ids a table has.
    """
    found = {}
    for (name, config), table in zip(declared.configs.items(), given, strict=True):
        if config.storage is None or config.vocabulary is not None:
            continue
        rows = table.rows if isinstance(table, RowSource) else None
        if not isinstance(rows, HostTable):
            refuse(
                f"table {name!r}",
                expected="what io.host_table returned, for a table on the host",
                got="a function",
                remedy=f"give tables={{{name!r}: io.host_table(engine, state, {name!r}), …}}",
            )
        found[name] = rows
    return found


def _with_rows(
    hosts: Sequence[HostIds],
    layout: Layout,
    tables: Sequence[Stored | RowSource],
    found: Mapping[str, Find],
) -> tuple[list[HostIds], list[Stored]]:
    """Return the ids of every feature with rows in the place of keys, and all tables.

    Args:
      hosts: the ids of every feature.
      layout: one stack of one shard per table, in table order.
      tables: what they are served from.
      found: finds the rows, or ids at home, of keys, by table.

    Raises:
      ValueError: a function returns something else than rows.
    """
    given, whole = list(hosts), []
    for g, source in enumerate(tables):
        rows = {}
        for f in layout.features_by_stack[g]:
            keys, table = hosts[f].keys, layout.features[f].table
            if keys is None:
                continue
            rows[f] = keys.view(np.int64)
            if table.key_rules is not None:
                rows[f] = found[table.name](keys).astype(np.int64)
                shared = table.key_rules.shared_row(table.declared_size)
                if shared is not None:
                    rows[f][rows[f] < 0] = shared
        if isinstance(source, RowSource):
            ids = np.unique(np.concatenate([np.zeros(0, np.int64), *rows.values()]))
            ids = ids[ids >= 0]
            values = source.read(ids)["values"]
            # One row more, so that there is one to pick for what is absent.
            source = Stored({"values": np.pad(values, [(0, 1), (0, 0)])})
            for f, mine in rows.items():
                rows[f] = np.where(mine < 0, PADDING_ID, np.searchsorted(ids, mine))
        whole.append(source)
        for f, mine in rows.items():
            given[f] = give_rows(hosts[f], mine.astype(np.int32))
    return given, whole


def _find_now(vocabularies: Vocabularies, name: str, config: TableConfig) -> Find:
    capacity = vocabularies.capacity(name)
    if capacity != config.vocabulary_size:
        raise _not_its_own(name, f"{config.vocabulary_size} rows", f"{capacity}")
    return lambda keys: vocabularies.find(name, keys, vocabularies.admitted)


def _fixed(
    given: Mapping[Any, Any] | None, whole: Structure
) -> dict[str, FixedVocabulary]:
    tables, found = whole.configs, {}
    for name, one in _by_name("vocabularies", given or {}, whole).items():
        rules = tables[name].vocabulary if name in tables else None
        if rules is None:
            refuse(
                "vocabularies", expected="tables with a dynamic vocabulary", got=name
            )
        check_type(
            f"vocabularies: {name}", one, FixedVocabulary, expected="a FixedVocabulary"
        )
        # The last row may be the one that unseen keys share.
        most = tables[name].vocabulary_size - (rules.unseen == "shared")
        if one.num_rows > most:
            raise _not_its_own(name, f"rows below {most}", f"row {one.num_rows - 1}")
        found[name] = one
    return found


def _not_its_own(name: str, expected: str, got: str) -> ValueError:
    """Return the error about a vocabulary that does not fit its table."""
    remedy = (
        "give the vocabulary that belongs to these tables, and declare their capacity"
    )
    what = f"vocabularies: {name}"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))
