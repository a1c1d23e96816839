"""The rows of tables on the host that features are served with, as small tables of their own.

Ids may have 64 bits, and their rows are wherever a function gets them from. So the distinct ids of
a call are numbered, and the lookup reads a table that has the rows of these ids only:

    ids 9 2**40 9     ->  numbers 0 1 0     table [row of 9, row of 2**40]

Input: validated ids, and what the tables are served from. Output: the same ids as numbers, and the
tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpu_embed._types import PADDING_ID
from tpu_embed.core.ids import HostIds
from tpu_embed.core.layout import Layout
from tpu_embed.core.place import NOBODY, give_rows_of
from tpu_embed.io.serving.stored import RowSource, Stored


def fetched(
    hosts: Sequence[HostIds], layout: Layout, tables: Sequence[Stored | RowSource]
) -> tuple[list[HostIds], list[Stored]]:
    """Return ids with numbers in the place of ids of tables on the host, and all tables.

    Args:
      hosts: the ids of every feature.
      layout: one stack of one shard per table, in table order.
      tables: what they are served from.

    Raises:
      ValueError: a function returns something else than rows.
    """
    given, found = list(hosts), []
    for g, table in enumerate(tables):
        if not isinstance(table, RowSource):
            found.append(table)
            continue
        keys = {f: hosts[f].keys for f in layout.features_of(g)}
        every = np.concatenate(
            [np.zeros(0, np.uint64), *(x for x in keys.values() if x is not None)]
        )
        ids = np.unique(every[every != NOBODY])
        found.append(table.fetch(ids))
        for f, mine in keys.items():
            assert mine is not None, "ids of tables on the host are numbered"
            numbers = np.searchsorted(ids, mine).astype(np.int32)
            rows = np.where(mine == NOBODY, PADDING_ID, numbers)
            given[f] = give_rows_of(layout.features[f], hosts[f], rows.astype(np.int32))
    return given, found
