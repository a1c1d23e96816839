"""Rows for the keys of features that are served.

Input: validated ids, keys among them, and the vocabularies of their tables. Output: the same with
rows in the place of keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_embed._checks import message
from tpu_embed.config import TableConfig
from tpu_embed.core.ids import HostIds, Structure
from tpu_embed.core.layout import FeatureLayout, Layout
from tpu_embed.core.place import give_rows_of
from tpu_embed.io.serving.keyed import Keys
from tpu_embed.io.serving.stored import RowSource, Stored, name_of_table
from tpu_embed.vocabulary import FixedVocabulary, Vocabularies

Find = Callable[[np.ndarray], np.ndarray]
"""Returns the rows of keys, uint64 `[n]`; -1 for keys without a row."""


def finders(given: Any, whole: Structure, used: Structure) -> dict[str, Find]:
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
    named = dict(zip(used.table_names, used.tables, strict=True))
    living = [name for name, table in named.items() if table.vocabulary is not None]
    if isinstance(given, Vocabularies):
        found = {n: _find_now(given, n, named[n]) for n in living if n in given.tables}
    elif given is None or isinstance(given, Mapping):
        found = _fixed(given or {}, whole)
    else:
        expected, got = "engine.vocabularies, or a mapping by table", type(given).__name__
        raise TypeError(message("vocabularies", expected=expected, got=got))
    missing = sorted(set(living) - set(found))
    if missing:
        expected, got = f"those of the tables {living}, whose ids are keys", f"none of {missing}"
        remedy = "give vocabularies=engine.vocabularies, or FixedVocabulary(*vocabularies.keys(…))"
        raise ValueError(message("vocabularies", expected=expected, got=got, remedy=remedy))
    return {name: found[name] for name in living}


def all_keys(given: Any, declared: Structure) -> dict[str, Keys]:
    """Return the keys of each table whose vocabulary lives, by the table's name.

    Args:
      given: as for `finders`.
      declared: the feature configuration.

    Raises:
      ValueError, TypeError: as for `finders`.
    """
    found = {}
    finders(given, declared, declared)  # checks them
    for name, table in zip(declared.table_names, declared.tables, strict=True):
        if table.vocabulary is None:
            continue
        if isinstance(given, Vocabularies):
            keys, rows = given.keys(name)
            order = np.argsort(keys)
            found[name] = Keys(keys[order], rows[order])
        else:
            named = {name_of_table(key, declared): one for key, one in given.items()}
            found[name] = Keys(named[name].keys, named[name].rows)
    return found


def ids_on_host(declared: Structure, given: Sequence[Stored | RowSource]) -> dict[str, Keys]:
    """Return the ids of each table on the host whose ids are row numbers, by the table's name.

    Args:
      declared: the feature configuration.
      given: what its tables are served from.

    Raises:
      ValueError: nobody has said which ids a table has.
    """
    found = {}
    for name, config, table in zip(declared.table_names, declared.tables, given, strict=True):
        if config.storage is None or config.vocabulary is not None:
            continue
        if not isinstance(table, RowSource) or table.host_table is None:
            expected, got = "what io.host_table returned, for a table on the host", "a function"
            remedy = f"give tables={{{name!r}: io.host_table(engine, state, {name!r}), …}}"
            raise ValueError(message(f"table {name!r}", expected=expected, got=got, remedy=remedy))
        ids = np.asarray(table.host_table.ids, np.int64)
        found[name] = Keys(ids.view(np.uint64), ids)
    return found


def with_rows(hosts: Sequence[HostIds], layout: Layout, found: Mapping[str, Find]) -> list[HostIds]:
    """Return the ids of every feature with rows in the place of keys."""
    given = list(hosts)
    for f, host in enumerate(hosts):
        feature = layout.features[f]
        if feature.table.key_rules is not None:
            assert host.keys is not None, "ids of living vocabularies are keys"
            rows = found[feature.table.name](host.keys).astype(np.int32)
            if feature.table.is_on_host:
                # These are ids at home, whose rows `fetched` gets; -1 is no id.
                given[f] = dataclasses.replace(host, keys=_ids(feature, rows))
            else:
                given[f] = give_rows_of(feature, host, rows)
    return given


def _ids(feature: FeatureLayout, rows: np.ndarray) -> np.ndarray:
    """Return ids at home, uint64, from the rows of keys, int32; all bits are set for none."""
    rules = feature.table.key_rules
    if rules is not None and rules.unseen == "shared":
        rows = np.where(rows < 0, feature.table.declared_size - 1, rows)
    return rows.astype(np.int64).view(np.uint64)


def _find_now(vocabularies: Vocabularies, name: str, config: TableConfig) -> Find:
    capacity = vocabularies.capacity(name)
    if capacity != config.vocabulary_size:
        raise _not_its_own(name, f"{config.vocabulary_size} rows", f"{capacity}")
    return lambda keys: vocabularies.find(name, keys, vocabularies.admitted)


def _fixed(given: Mapping[Any, Any], whole: Structure) -> dict[str, Find]:
    tables = dict(zip(whole.table_names, whole.tables, strict=True))
    found: dict[str, Find] = {}
    for key, one in given.items():
        name = name_of_table(key, whole)
        if name not in tables or tables[name].vocabulary is None:
            expected = "tables whose vocabularies live"
            raise ValueError(message("vocabularies", expected=expected, got=name))
        if not isinstance(one, FixedVocabulary):
            expected, got = "a FixedVocabulary", type(one).__name__
            raise TypeError(message(f"vocabularies: {name}", expected=expected, got=got))
        most = _rows_for_keys(tables[name])
        if one.num_rows > most:
            raise _not_its_own(name, f"rows below {most}", f"row {one.num_rows - 1}")
        found[name] = one.find
    return found


def _rows_for_keys(config: TableConfig) -> int:
    """Return how many rows of a table can belong to keys."""
    assert config.vocabulary is not None
    # The last row may be the one that unseen keys share.
    return config.vocabulary_size - (config.vocabulary.unseen == "shared")


def _not_its_own(name: str, expected: str, got: str) -> ValueError:
    """Return the error about a vocabulary that does not fit its table."""
    remedy = "give the vocabulary that belongs to these tables, and declare their capacity"
    what = f"vocabularies: {name}"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))
