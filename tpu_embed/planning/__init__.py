"""Will it fit, and what does it move: answered before a device is there.

Enters: feature configs and a mesh or a TPU topology. Leaves: a plan, or configs whose placements
are chosen.
"""

from tpu_embed.planning.chips import CHIPS, Chip, Topology
from tpu_embed.planning.placement import resolve
from tpu_embed.planning.plan import Plan, TablePlan, plan

__all__ = ["CHIPS", "Chip", "Plan", "TablePlan", "Topology", "plan", "resolve"]
