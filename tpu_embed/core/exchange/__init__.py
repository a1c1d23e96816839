"""Exchange rows between devices: collectives, removal of duplicates, routes to the owner shards."""

from tpu_embed.core.exchange import collectives, route
from tpu_embed.core.exchange.collectives import axis_index
from tpu_embed.core.exchange.route import RowSums, number_runs

__all__ = [
    "RowSums",
    "axis_index",
    "collectives",
    "number_runs",
    "route",
]
