"""Exchange rows between devices: collectives, removal of duplicates, routes to the owner shards."""

from tpu_embed.core.exchange import collectives, host_route, route
from tpu_embed.core.exchange.collectives import axis_index
from tpu_embed.core.exchange.route import RowSums, number_runs

__all__ = [
    "RowSums",
    "axis_index",
    "collectives",
    "host_route",
    "number_runs",
    "route",
]
