"""The nesting of a feature configuration, and how batches are matched against it.

Users nest their features as they like: dicts, lists, namedtuples, dataclasses. Inside, the package
works on flat lists with one entry per feature. `Structure` remembers the nesting and the order:
mappings go by sorted key, lists and tuples by position, namedtuples and dataclasses by field. A
frame, which is a table with named columns, may stand where a mapping is expected: a DataFrame of
pandas or polars, an Arrow table or record batch. Columns that are no features are left alone.

Input: a feature configuration, once; then features, weights or gradients of the same nesting.
Output: their leaves in one flat order; and, the other way round, leaves put back into the nesting.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed import columns
from tpu_embed._checks import refuse
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids.containers import RaggedIds, SparseIds

# -- frames ----------------------------------------------------------------------------------------


_FRAMES = {("pandas", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}
"""Package and class."""


def as_frame(values: Any) -> Any | None:
    """Return a frame as one of pandas or pyarrow; None for anything else.

    Args:
      values: a pandas DataFrame, a pyarrow Table or RecordBatch is returned as it is; a frame of
        another library, such as polars, as a pyarrow Table.

    Raises:
      ImportError: a frame of another library, and pyarrow is not there.

    Example:
      >>> import pandas as pd
      >>> as_frame(pd.DataFrame({"user": [1, 2]})).shape, as_frame({"user": [1, 2]})
      ((2, 1), None)
    """
    # pyarrow's classes are in pyarrow.lib, pandas' in pandas.core.frame or in pandas.
    classes = (
        (cls.__module__.partition(".")[0], cls.__name__) for cls in type(values).__mro__
    )
    if not _FRAMES.isdisjoint(classes):
        return values
    streamed = columns.read_stream(values)
    return streamed if hasattr(streamed, "schema") else None


def select_columns(values: Any, names: Iterable[Any]) -> Any:
    """Return the columns of a frame with these names, as far as it has them; other values as such.

    A DataFrame whose columns have several levels gives a DataFrame for a name of the first level,
    which matches a nested mapping of features.

    Raises:
      ValueError: several columns have one of the names.
      ImportError: as for `as_frame`.
    """
    frame = as_frame(values)
    if frame is None:
        return values
    # A DataFrame lists the names of its columns in `columns`, the Arrow classes in their schema.
    there = frame.schema.names if hasattr(frame, "schema") else frame.columns
    found, counts = (
        [name for name in names if name in there],
        collections.Counter(there),
    )
    for name in found:
        if counts[name] > 1:
            refuse(
                f"column {name!r} of a {type(frame).__name__}",
                expected="one column of each name",
                got=f"{counts[name]} of it",
            )
    return {name: frame[name] for name in found}


# -- nested features -------------------------------------------------------------------------------


_LEFT_OUT = object()
"""Stands for a leaf that is left out of its mapping."""

_LEAVES = (FeatureConfig, TableConfig, SparseIds, RaggedIds, np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """A feature configuration as flat lists, with what is needed to restore its nesting.

    Args:
      nest: the configuration, in containers that nobody else changes.
      paths: [F] `user/history`, `0/x`: keys, positions and fields from the top, joined by a slash.
      features: [F] the configs, in the same order.
      tables: each table once, by first appearance among the features.
      table_names: the names of the tables, in the same order.
    """

    nest: Any
    paths: tuple[str, ...]
    features: tuple[FeatureConfig, ...]
    tables: tuple[TableConfig, ...]
    table_names: tuple[str, ...]

    @property
    def configs(self) -> dict[str, TableConfig]:
        """The tables by name."""
        return dict(zip(self.table_names, self.tables, strict=True))

    @property
    def labels(self) -> tuple[str, ...]:
        """[F] paths for messages, each with the feature's name if it has one: `user/x (clicks)`."""
        pairs = zip(self.paths, self.features, strict=True)
        return tuple(f"{path} ({f.name})" if f.name else path for path, f in pairs)

    def table_index(self, feature: FeatureConfig) -> int:
        """Return the position in `tables` of the feature's table."""
        return next(i for i, table in enumerate(self.tables) if table is feature.table)

    def match(self, values: Any, *, what: str, columns: bool = False) -> list[Any]:
        """Return the [F] leaves of `values`, which must be nested like the configuration.

        Args:
          values: features, weights or gradients; None is a leaf. A frame (`structure.py`) may stand
            for a mapping, and may have columns that no feature is named after.
          what: their name, for messages.
          columns: whether a list that stands where the configuration has a feature is a leaf, too:
            a column of ids.

        Raises:
          TypeError: a container in `values` has another type than in the configuration.
          ValueError: a container has other keys or another size.
        """
        return _match(self.nest, values, "", what, columns)

    def match_weighted(
        self, features: Any, weights: Any | None
    ) -> tuple[list[Any], list[Any]]:
        """Return the [F] leaves of the features and the [F] leaves of their weights.

        Without weights, each weight is None.

        Raises:
          TypeError, ValueError: as for `match`.
        """
        given = self.match(features, what="features", columns=True)
        none = [None] * len(given)
        return given, none if weights is None else self.match(
            weights, what="weights", columns=True
        )

    def part(self, values: Any) -> Structure:
        """Return the structure of only those features that `values` has.

        Mappings in `values`, and frames in their place, may leave out keys of the configuration's.
        Names of tables stay.
        """
        nest = _part(self.nest, values)
        kept = [path for path, _ in _collect(nest)]
        if len(kept) == len(self.paths) or not kept:
            return self  # whatever else differs, `match` says
        return dataclasses.replace(self.only(kept), nest=nest)

    def only(self, paths: Sequence[str]) -> Structure:
        """Return the flat lists of some features, and of the tables that they use.

        Its nest is still the whole configuration.
        """
        pairs = zip(self.paths, self.features, strict=True)
        features = tuple(feature for path, feature in pairs if path in paths)
        used = {id(feature.table) for feature in features}
        named = zip(self.tables, self.table_names, strict=True)
        tables, names = zip(
            *(pair for pair in named if id(pair[0]) in used), strict=True
        )
        return Structure(self.nest, tuple(paths), features, tables, names)

    def unflatten(self, leaves: Sequence[Any], without: Sequence[str] = ()) -> Any:
        """Return `leaves` [F] in the configuration's nesting, but for some that mappings hold.

        Args:
          leaves: one per feature.
          without: paths of the features that are left out.
        """
        pairs = zip(self.paths, leaves, strict=True)
        remaining = (_LEFT_OUT if path in without else leaf for path, leaf in pairs)
        return unflatten(self.nest, remaining)


def flatten(feature_config: Any) -> Structure:
    """Flatten a feature configuration, and name its tables.

    Args:
      feature_config: `FeatureConfig`s in any nesting of mappings, lists, tuples, namedtuples and
        dataclasses.

    Returns:
      The `Structure`.

    Raises:
      ValueError: a leaf is not a `FeatureConfig`, there is no leaf, two features have the same
        path, a mapping's keys can't be sorted, or two tables have the same name.

    Example:
      >>> table = TableConfig(10, 4)
      >>> config = {"user": [FeatureConfig(table)] * 2, "item": FeatureConfig(table)}
      >>> structure = flatten(config)
      >>> structure.paths, structure.table_names
      (('item', 'user/0', 'user/1'), ('table_0',))
      >>> structure.unflatten([1, 2, 3])
      {'user': [2, 3], 'item': 1}
    """
    found = _collect(feature_config)
    if not found:
        refuse(
            "feature_config", expected="at least one FeatureConfig", got=feature_config
        )
    paths, features = zip(*found, strict=True)
    # Paths may collide although the nesting differs: {"a/b": x, "a": {"b": y}}.
    _check_distinct("path", "feature", paths, "rename a key")
    # Tables compare by identity: features that name one object share one table.
    tables = tuple({id(feature.table): feature.table for feature in features}.values())
    names = tuple(table.name or f"table_{i}" for i, table in enumerate(tables))
    remedy = "rename one, or use one TableConfig object to share a table"
    _check_distinct("name", "table", names, remedy)
    # The containers are copied, so that a caller may change theirs afterwards.
    return Structure(
        unflatten(feature_config, iter(features)), paths, features, tables, names
    )


def _check_distinct(what: str, of: str, names: Sequence[str], remedy: str) -> None:
    """Check that no two features, or tables, have the same name."""
    for name, count in collections.Counter(names).items():
        if count > 1:
            places = ", ".join(str(i) for i, other in enumerate(names) if other == name)
            refuse(
                "feature_config",
                expected=f"a {what} of its own for each {of}",
                got=f"{name!r} for {of}s {places}",
                remedy=remedy,
            )


def children(nest: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container in flattening order; None for a leaf.

    Raises:
      ValueError: a mapping's keys can't be sorted.
    """
    if nest is None or isinstance(nest, _LEAVES):
        return None
    if isinstance(nest, Mapping):
        try:
            return [(key, nest[key]) for key in sorted(nest)]
        except TypeError as error:
            refuse(
                "a mapping",
                expected="keys that can be sorted",
                got=", ".join(map(repr, nest)),
                cause=error,
            )
    names = _field_names(nest)
    if names is not None:
        return [(name, getattr(nest, name)) for name in names]
    return list(enumerate(nest)) if isinstance(nest, (list, tuple)) else None


def rebuild(nest: Any, values: Mapping[Any, Any]) -> Any:
    """Return a container like `nest` that holds `values`, keyed as by `children`.

    A mapping need not have all keys.
    """
    make: Callable[..., Any] = type(nest)
    if isinstance(nest, Mapping):
        # Mappings keep the key order of `nest`; `children` lists them in sorted order.
        kept = {key: values[key] for key in nest if key in values}
        if isinstance(nest, collections.defaultdict):
            return collections.defaultdict(nest.default_factory, kept)
        # A mapping type that JAX does not know as a pytree could not leave a jit: use a dict.
        return kept if jax.tree_util.all_leaves([nest]) else make(kept)
    return make(values.values()) if _field_names(nest) is None else make(**values)


def _field_names(nest: Any) -> tuple[str, ...] | None:
    """Return the fields of a namedtuple or dataclass; None for anything else."""
    if isinstance(nest, tuple):
        return getattr(nest, "_fields", None)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        # Fields with init=False are derived by __post_init__ and can't be passed to rebuild it.
        return tuple(field.name for field in dataclasses.fields(nest) if field.init)
    return None


def join_path(path: str, key: Any) -> str:
    """Return a path one level down: `user/history` for the key "history" below `user`."""
    return f"{path}/{key}" if path else str(key)


def _collect(nest: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the (path, config) pairs below `nest`, depth first."""
    inner = children(nest)
    if inner is not None:
        return [
            pair
            for key, child in inner
            for pair in _collect(child, join_path(path, key))
        ]
    if isinstance(nest, FeatureConfig):
        return [(path or "feature", nest)]
    refuse(
        f"feature_config: {path}" if path else "feature_config",
        expected="a FeatureConfig",
        got=repr(nest),
    )


def _part(nest: Any, values: Any) -> Any:
    """Return the part of a configuration whose keys the mappings in `values` have."""
    inner, (values, given) = children(nest), _given(nest, values)
    if inner is None or given is None or _kind(values) != _kind(nest):
        return nest
    known, may_lack = dict(inner), isinstance(nest, Mapping)
    if not known.keys() >= given.keys() or (len(given) < len(known) and not may_lack):
        return nest
    found = {key: _part(child, given[key]) for key, child in inner if key in given}
    return found if may_lack else rebuild(nest, found)


def unflatten(nest: Any, leaves: Iterator[Any]) -> Any:
    """Return a container like `nest`, at any depth, with other leaves in flattening order."""
    # `children` visits keys in flattening order, so the iterator yields the right leaf each time.
    inner = children(nest)
    if inner is None:
        return next(leaves)
    values = [(key, unflatten(child, leaves)) for key, child in inner]
    return rebuild(
        nest, {key: value for key, value in values if value is not _LEFT_OUT}
    )


def _kind(nest: Any) -> str | type:
    """Return what must agree between two containers.

    Any mapping matches any other mapping, but a list does not match a tuple.
    """
    if isinstance(nest, Mapping):
        return "a mapping"
    if isinstance(nest, (list, tuple)) and _field_names(nest) is None:
        return "a list" if isinstance(nest, list) else "a tuple"
    return type(nest)


def _given(nest: Any, values: Any) -> tuple[Any, Mapping[Any, Any] | None]:
    """Return `values`, a frame as the mapping that `nest` is, and their children by key.

    None in place of the children is a leaf. The keys of a mapping need not be sortable among
    themselves: they are checked against those of `nest`.
    """
    if isinstance(values, _LEAVES):
        return values, None
    if isinstance(nest, Mapping):
        values = select_columns(values, nest)
    inner = values if isinstance(values, Mapping) else children(values)
    return values, None if inner is None else dict(inner)


def _match(nest: Any, values: Any, path: str, what: str, columns: bool) -> list[Any]:
    """Return the leaves of `values`, following `nest`; raise where they differ."""
    inner, (values, given) = children(nest), _given(nest, values)
    where = f"{what}: {path or 'the top'}"
    if inner is None:
        # The configuration has a feature here, so `values` must have a leaf, not a container.
        if given is None or (columns and isinstance(values, list)):
            return [values]
        may = columns and isinstance(values, tuple)
        refuse(
            where,
            expected="one feature's value",
            got=_named(values),
            remedy="a column may be a list, not a tuple" if may else "",
            error=TypeError,
        )
    if given is None or _kind(values) != _kind(nest):
        refuse(where, expected=_named(nest), got=_named(values), error=TypeError)
    _check_keys([key for key, _ in inner], list(given), path, what)
    below = [(child, given[key], join_path(path, key)) for key, child in inner]
    return [leaf for one in below for leaf in _match(*one, what, columns)]


def _named(nest: Any) -> str:
    kind = _kind(nest)
    return kind if isinstance(kind, str) else kind.__name__


def _check_keys(expected: list[Any], got: list[Any], path: str, what: str) -> None:
    absent = [join_path(path, key) for key in expected if key not in got]
    surplus = [join_path(path, key) for key in got if key not in expected]
    if not absent and not surplus:
        return
    problem, remedy = f"{(absent or surplus)[0]} is missing", ""
    if not absent:
        are = "is" if len(surplus) == 1 else "are"
        problem = f"{_listed(surplus)} {are} not among the features"
        remedy = (
            "leave out what is no feature; of a frame, other columns are left alone"
        )
    refuse(
        f"{what}: {problem}",
        expected=f"{len(expected)} entries ({_listed(expected)})",
        got=f"{len(got)} entries ({_listed(got)})",
        remedy=remedy,
    )


def _listed(keys: list[Any]) -> str:
    shown = ", ".join(map(str, keys[:8]))
    return f"{shown}, …" if len(keys) > 8 else shown
