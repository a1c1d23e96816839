"""Plan before you rent: memory and traffic per device, and placements, without any device.

Input: feature configs, and a mesh or a TPU topology. Output: a plan, or configs whose placements
are chosen.
"""

from tpu_embed.planning.chips import CHIPS, Chip, Topology
from tpu_embed.planning.placement import resolve
from tpu_embed.planning.plan import Plan, TablePlan, plan

__all__ = ["CHIPS", "Chip", "Plan", "TablePlan", "Topology", "plan", "resolve"]
