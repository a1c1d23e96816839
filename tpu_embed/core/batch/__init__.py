"""Pack the ids of all features into one array of static shape, and send it to the devices."""

from tpu_embed.core.batch import capacity
from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.intake import Intake
from tpu_embed.core.batch.located import LocalIds
from tpu_embed.core.batch.packing import natural_spec, pack, packed_row_ids, parts
from tpu_embed.core.batch.spec import BatchSpec, StackSpec, worst_case
from tpu_embed.core.batch.stack_view import BagLayout, StackView, view_stacks
from tpu_embed.core.batch.traced import TracedIds, make_traced

__all__ = [
    "BagLayout",
    "Batch",
    "BatchSpec",
    "Intake",
    "LocalIds",
    "StackSpec",
    "StackView",
    "TracedIds",
    "capacity",
    "make_traced",
    "natural_spec",
    "pack",
    "packed_row_ids",
    "parts",
    "view_stacks",
    "worst_case",
]
