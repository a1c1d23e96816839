"""Rows for the keys of features that are served, and for the ids of tables on the host.

Such ids may have 64 bits, and their rows are wherever a function gets them from. So the distinct
ids of a call are numbered, and the lookup reads a table that has the rows of these ids only:

    ids 9 2**40 9     ->  numbers 0 1 0     table [row of 9, row of 2**40]

Input: validated ids, keys among them, what the tables are served from, and their vocabularies.
Output: the same ids with rows in the place of keys, and the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_embed._checks import message
from tpu_embed._types import PADDING_ID
from tpu_embed.config import TableConfig
from tpu_embed.core.ids import HostIds, Structure, give_rows
from tpu_embed.core.layout import Layout
from tpu_embed.io.serving.stored import HostTable, RowSource, Stored, name_of_table
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
    named = zip(used.table_names, used.tables, strict=True)
    living = {name: table for name, table in named if table.vocabulary is not None}
    if isinstance(given, Vocabularies):
        found = {n: _find_now(given, n, living[n]) for n in living if n in given.tables}
    elif given is None or isinstance(given, Mapping):
        found = {name: one.find for name, one in _fixed(given, whole).items()}
    else:
        expected, got = "engine.vocabularies, or a mapping by table", type(given).__name__
        raise TypeError(message("vocabularies", expected=expected, got=got))
    missing = sorted(living.keys() - found.keys())
    if missing:
        expected = f"those of the tables {[*living]}, whose ids are keys"
        got = f"none of {missing}"
        remedy = "give vocabularies=engine.vocabularies, or FixedVocabulary(*vocabularies.keys(…))"
        raise ValueError(message("vocabularies", expected=expected, got=got, remedy=remedy))
    return {name: found[name] for name in living}


def all_keys(given: Any, declared: Structure) -> dict[str, FixedVocabulary]:
    """Return the keys of each table whose vocabulary lives, by the table's name.

    Args:
      given: as for `finders`.
      declared: the feature configuration.

    Raises:
      ValueError, TypeError: as for `finders`.
    """
    living = finders(given, declared, declared)  # checks them
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
    for name, config, table in zip(declared.table_names, declared.tables, given, strict=True):
        if config.storage is None or config.vocabulary is not None:
            continue
        rows = table.rows if isinstance(table, RowSource) else None
        if not isinstance(rows, HostTable):
            expected, got = "what io.host_table returned, for a table on the host", "a function"
            remedy = f"give tables={{{name!r}: io.host_table(engine, state, {name!r}), …}}"
            raise ValueError(message(f"table {name!r}", expected=expected, got=got, remedy=remedy))
        found[name] = rows
    return found


def with_rows(
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
        for f in layout.features_of(g):
            keys, table = hosts[f].keys, layout.features[f].table
            if keys is None:
                continue
            rows[f] = keys.view(np.int64)
            if table.key_rules is not None:
                rows[f] = found[table.name](keys).astype(np.int64)
                if table.key_rules.unseen == "shared":
                    rows[f][rows[f] < 0] = table.declared_size - 1
        if isinstance(source, RowSource):
            ids = np.unique(np.concatenate([np.zeros(0, np.int64), *rows.values()]))
            ids = ids[ids >= 0]
            source = source.fetch(ids)
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


def _fixed(given: Mapping[Any, Any] | None, whole: Structure) -> dict[str, FixedVocabulary]:
    tables = dict(zip(whole.table_names, whole.tables, strict=True))
    found = {}
    for key, one in (given or {}).items():
        name = name_of_table(key, whole)
        rules = tables[name].vocabulary if name in tables else None
        if rules is None:
            expected = "tables whose vocabularies live"
            raise ValueError(message("vocabularies", expected=expected, got=name))
        if not isinstance(one, FixedVocabulary):
            expected, got = "a FixedVocabulary", type(one).__name__
            raise TypeError(message(f"vocabularies: {name}", expected=expected, got=got))
        # The last row may be the one that unseen keys share.
        most = tables[name].vocabulary_size - (rules.unseen == "shared")
        if one.num_rows > most:
            raise _not_its_own(name, f"rows below {most}", f"row {one.num_rows - 1}")
        found[name] = one
    return found


def _not_its_own(name: str, expected: str, got: str) -> ValueError:
    """Return the error about a vocabulary that does not fit its table."""
    remedy = "give the vocabulary that belongs to these tables, and declare their capacity"
    what = f"vocabularies: {name}"
    return ValueError(message(what, expected=expected, got=got, remedy=remedy))
