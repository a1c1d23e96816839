"""Pack the ids of all features into one array of static shape, and send it to the devices."""

from tpu_embed.core.batch import capacity
from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.intake import Intake
from tpu_embed.core.batch.located import BagLayout, LocalIds, bag_layout, bag_offsets
from tpu_embed.core.batch.packing import natural_spec, pack, packed_rows, parts
from tpu_embed.core.batch.spec import BatchSpec, StackSpec, worst_case
from tpu_embed.core.batch.traced import TracedIds, make_traced

__all__ = [
    "BagLayout",
    "Batch",
    "BatchSpec",
    "Intake",
    "LocalIds",
    "StackSpec",
    "TracedIds",
    "bag_layout",
    "bag_offsets",
    "capacity",
    "make_traced",
    "natural_spec",
    "pack",
    "packed_rows",
    "parts",
    "worst_case",
]
