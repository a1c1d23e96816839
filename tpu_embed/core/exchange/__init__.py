"""Exchange rows between devices: collectives, removal of duplicates, routes to the owner shards."""

from tpu_embed.core.exchange import collectives, dedup, route
from tpu_embed.core.exchange.collectives import axis_index, psum
from tpu_embed.core.exchange.dedup import find_runs
from tpu_embed.core.exchange.route import FetchedRows, RowSums, padded

__all__ = [
    "FetchedRows",
    "RowSums",
    "axis_index",
    "collectives",
    "dedup",
    "find_runs",
    "padded",
    "psum",
    "route",
]
