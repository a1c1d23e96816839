"""Plan before you rent: memory and traffic per device, and placements, without any device.

Input: feature configs, and a mesh or a TPU topology. Output: a plan, or configs whose placements
are chosen.
"""

from tpu_embed.planning.host import HitCount, HostPlan, count_hits
from tpu_embed.planning.plan import Plan, TablePlan, plan, resolve
from tpu_embed.planning.targets import CHIPS, Chip, Topology

__all__ = [
    "CHIPS",
    "Chip",
    "HitCount",
    "HostPlan",
    "Plan",
    "TablePlan",
    "Topology",
    "count_hits",
    "plan",
    "resolve",
]
