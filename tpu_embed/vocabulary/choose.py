"""Choose the maps of an engine: its own, or those of another engine that it shares.

Input: tables with living vocabularies, and what the user gave. Output: `Vocabularies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpu_embed._checks import message
from tpu_embed.storage import Homes
from tpu_embed.vocabulary.config import LivingTable, check_lookahead
from tpu_embed.vocabulary.vocabularies import Vocabularies


def choose_vocabularies(
    tables: Sequence[LivingTable], lookahead: int | None, shared: Any, homes: Homes | None
) -> Vocabularies | None:
    """Return the maps of an engine: new ones, or those of another engine; None if it needs none.

    Args:
      tables: those with living vocabularies.
      lookahead: as for `Vocabularies`; None: 0, or that of the other engine.
      shared: the other engine's maps, or None.
      homes: of the tables on the host; None without them.

    Raises:
      ValueError: a lookahead that is no number from 0 to 2¹⁶; or the other engine's maps are for
        other tables, or another lookahead.
    """
    if lookahead is not None:
        lookahead = check_lookahead(lookahead)
    if shared is None:
        return Vocabularies(tables, lookahead or 0, homes) if tables else None
    if not isinstance(shared, Vocabularies):
        expected, got = "the vocabularies of another engine", type(shared).__name__
        raise ValueError(message("vocabularies", expected=expected, got=got))
    ours, theirs = (
        {table.name: (table.vocabulary_size, table.vocabulary, table.key_table) for table in some}
        for some in (tables, shared.tables.values())
    )
    if ours != theirs:
        expected, got = f"maps of the engine's tables {ours}", f"{theirs}"
        raise ValueError(message("vocabularies", expected=expected, got=got))
    ours, theirs = (one and one.tables for one in (homes, shared.homes))
    if ours != theirs:
        expected, got = f"homes of the same rows, {ours}", f"{theirs}"
        raise ValueError(message("vocabularies", expected=expected, got=got))
    if lookahead not in (None, shared.lookahead):
        expected, got = f"lookahead={lookahead}", f"{shared.lookahead}"
        remedy = "leave lookahead out"
        raise ValueError(message("vocabularies", expected=expected, got=got, remedy=remedy))
    return shared
