"""The nesting of a feature configuration: paths, leaves, table names, and matching against it.

A feature configuration enters once; features, weights and gradients are then taken apart in its
order, and activations put together in its nesting. Mappings go by sorted key, lists and tuples by
position, namedtuples and dataclasses by field.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embed import _checks
from tpu_embed.config import FeatureConfig, TableConfig
from tpu_embed.core.ids.containers import RaggedIds, SparseIds

__all__ = ["Structure", "children", "flatten", "rebuild"]

_LEAVES = (FeatureConfig, TableConfig, SparseIds, RaggedIds, np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """Keep a feature configuration taken apart.

    Args:
      nest: the configuration as given.
      paths: [F] `user/history`, `0/x`: keys, positions and fields from the top, joined by a slash.
      features: [F] in the same order.
      tables: each table once, by first appearance.
      table_names: theirs, in the same order.
    """

    nest: Any
    paths: tuple[str, ...]
    features: tuple[FeatureConfig, ...]
    tables: tuple[TableConfig, ...]
    table_names: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """[F] paths for messages, with the feature's name if there is one: `user/x (clicks)`."""
        pairs = zip(self.paths, self.features, strict=True)
        return tuple(f"{path} ({f.name})" if f.name else path for path, f in pairs)

    def table_index(self, feature: FeatureConfig) -> int:
        """Return the position in `tables` of the feature's table."""
        return next(i for i, table in enumerate(self.tables) if table is feature.table)

    def match(self, values: Any, *, what: str) -> list[Any]:
        """Return the [F] leaves of `values`, whose nesting must be the configuration's.

        Args:
          values: features, weights or gradients; None is a leaf.
          what: their name, for messages.

        Raises:
          TypeError: a container of another type.
          ValueError: other keys or another size.
        """
        leaves: list[Any] = []
        _match(self.nest, values, "", what, leaves)
        return leaves

    def match_weighted(self, features: Any, weights: Any | None) -> tuple[list[Any], list[Any]]:
        """Return the [F] leaves of features and of their weights; without weights, each is None.

        Raises:
          TypeError, ValueError: as for `match`.
        """
        given = self.match(features, what="features")
        if weights is None:
            return given, [None] * len(given)
        return given, self.match(weights, what="weights")

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return `leaves` [F] in the configuration's nesting."""
        remaining = iter(leaves)
        return _unflatten(self.nest, remaining)


def flatten(feature_config: Any) -> Structure:
    """Take a feature configuration apart, and name its tables.

    Args:
      feature_config: any nesting of mapping, list, tuple, namedtuple and dataclass over
        `FeatureConfig`s.

    Returns:
      Its `Structure`.

    Raises:
      ValueError: a leaf is not a `FeatureConfig`, there is none, two have one path, a mapping's
        keys can't be sorted, or two tables have one name.

    Example:
      >>> table = TableConfig(10, 4)
      >>> config = {"user": [FeatureConfig(table)] * 2, "item": FeatureConfig(table)}
      >>> structure = flatten(config)
      >>> structure.paths, structure.table_names
      (('item', 'user/0', 'user/1'), ('table_0',))
      >>> structure.unflatten([1, 2, 3])
      {'user': [2, 3], 'item': 1}
    """
    found: list[tuple[str, Any]] = []
    _collect(feature_config, "", found)
    if not found:
        expected = "at least one FeatureConfig"
        raise ValueError(_checks.message("feature_config", expected=expected, got=feature_config))
    paths, features = zip(*found, strict=True)
    for path, count in collections.Counter(paths).items():
        if count > 1:
            expected = "a path of its own for each feature"
            got = f"{count} features at {path!r}"
            raise ValueError(_checks.message("feature_config", expected=expected, got=got))
    tables = tuple({id(feature.table): feature.table for feature in features}.values())
    return Structure(feature_config, paths, features, tables, _name_tables(tables))


def children(nest: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, child) pairs of a container in flattening order; None for a leaf.

    Raises:
      ValueError: a mapping's keys can't be sorted.
    """
    if nest is None or isinstance(nest, _LEAVES):
        return None
    if isinstance(nest, Mapping):
        return [(key, nest[key]) for key in _sorted_keys(nest)]
    names = _field_names(nest)
    if names is not None:
        return [(name, getattr(nest, name)) for name in names]
    return list(enumerate(nest)) if isinstance(nest, (list, tuple)) else None


def rebuild(nest: Any, values: Mapping[Any, Any]) -> Any:
    """Return a container like `nest` with `values` by key: those that `children` names."""
    if isinstance(nest, collections.defaultdict):
        return collections.defaultdict(nest.default_factory, {key: values[key] for key in nest})
    make: Callable[..., Any] = type(nest)
    if isinstance(nest, Mapping):
        if jax.tree_util.all_leaves([nest]):  # JAX could not carry it into or out of a jit
            make = dict
        return make({key: values[key] for key in nest})
    if _field_names(nest) is not None:
        return make(**values)
    return make(values[i] for i in range(len(nest)))


def _field_names(nest: Any) -> tuple[str, ...] | None:
    """Return the fields of a namedtuple or dataclass; None for anything else."""
    if isinstance(nest, tuple):
        return getattr(nest, "_fields", None)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return tuple(field.name for field in dataclasses.fields(nest) if field.init)
    return None


def _sorted_keys(nest: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(nest)
    except TypeError as error:
        got = ", ".join(repr(key) for key in nest)
        expected = "keys that can be sorted"
        raise ValueError(_checks.message("a mapping", expected=expected, got=got)) from error


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _collect(nest: Any, path: str, found: list[tuple[str, Any]]) -> None:
    inner = children(nest)
    if inner is not None:
        for key, child in inner:
            _collect(child, _join(path, key), found)
    elif isinstance(nest, FeatureConfig):
        found.append((path or "feature", nest))
    else:
        what = f"feature_config: {path}" if path else "feature_config"
        raise ValueError(_checks.message(what, expected="a FeatureConfig", got=repr(nest)))


def _name_tables(tables: tuple[TableConfig, ...]) -> tuple[str, ...]:
    names = tuple(table.name or f"table_{i}" for i, table in enumerate(tables))
    for name, count in collections.Counter(names).items():
        if count > 1:
            places = ", ".join(str(i) for i, other in enumerate(names) if other == name)
            raise ValueError(
                _checks.message(
                    "feature_config",
                    expected="a name of its own for each table",
                    got=f"{name!r} for tables {places}",
                    remedy="rename one, or use one TableConfig object to share a table",
                )
            )
    return names


def _unflatten(nest: Any, leaves: Any) -> Any:
    inner = children(nest)
    if inner is None:
        return next(leaves)
    return rebuild(nest, {key: _unflatten(child, leaves) for key, child in inner})


def _kind(nest: Any) -> str | type:
    """Return what must agree: any mapping is as good as any other, a list is no tuple."""
    if isinstance(nest, Mapping):
        return "mapping"
    if isinstance(nest, (list, tuple)) and _field_names(nest) is None:
        return "list" if isinstance(nest, list) else "tuple"
    return type(nest)


def _match(nest: Any, values: Any, path: str, what: str, leaves: list[Any]) -> None:
    inner = children(nest)
    where = f"{what}: {path or 'the top'}"
    given = None if isinstance(values, _LEAVES) else _given(values)
    if inner is None:
        if given is not None:
            sequence = isinstance(values, (list, tuple))
            raise TypeError(
                _checks.message(
                    where,
                    expected="one feature's value",
                    got=_named(values),
                    remedy="np.asarray or RaggedIds.from_lists takes a list" if sequence else "",
                )
            )
        leaves.append(values)
        return
    if given is None or _kind(values) != _kind(nest):
        raise TypeError(_checks.message(where, expected=_named(nest), got=_named(values)))
    _check_keys([key for key, _ in inner], list(given), path, what)
    for key, child in inner:
        _match(child, given[key], _join(path, key), what, leaves)


def _given(values: Any) -> Mapping[Any, Any] | None:
    if isinstance(values, Mapping):
        return values
    inner = children(values)
    return None if inner is None else dict(inner)


def _named(nest: Any) -> str:
    kind = _kind(nest)
    return f"a {kind}" if isinstance(kind, str) else f"{kind.__name__}"


def _check_keys(expected: list[Any], got: list[Any], path: str, what: str) -> None:
    absent = [key for key in expected if key not in got]
    surplus = [key for key in got if key not in expected]
    if absent or surplus:
        problem = "missing" if absent else "not among the features"
        first = _join(path, (absent + surplus)[0])
        raise ValueError(
            _checks.message(
                f"{what}: {first} is {problem}",
                expected=f"{len(expected)} entries {_listed(expected)}",
                got=f"{len(got)} entries {_listed(got)}",
            )
        )


def _listed(keys: list[Any]) -> str:
    shown = ", ".join(str(key) for key in keys[:8])
    return f"({shown}, …)" if len(keys) > 8 else f"({shown})"
