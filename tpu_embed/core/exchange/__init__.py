"""Exchange rows between devices: collectives, removal of duplicates, routes to the owner shards."""

from tpu_embed.core.exchange import collectives, device_route, host_route, route
from tpu_embed.core.exchange.collectives import axis_index, psum
from tpu_embed.core.exchange.device_route import number_runs
from tpu_embed.core.exchange.route import RowSums

__all__ = [
    "RowSums",
    "axis_index",
    "collectives",
    "device_route",
    "host_route",
    "number_runs",
    "psum",
    "route",
]
