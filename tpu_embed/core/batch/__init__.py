"""What a placed batch is: its static shape, how its bags are numbered, what the devices get."""

from tpu_embed.core.batch.batch import (
    ROW_SPLITS,
    Batch,
    fields_of,
    line_length,
    line_of,
)
from tpu_embed.core.batch.spec import BatchSpec, Routed, StackSpec
from tpu_embed.core.batch.stack_view import (
    LocalIds,
    StackView,
    gather,
    gather_ids,
    view_stacks,
)
from tpu_embed.core.batch.traced import TracedIds, make_traced

__all__ = [
    "ROW_SPLITS",
    "Batch",
    "BatchSpec",
    "LocalIds",
    "Routed",
    "StackSpec",
    "StackView",
    "TracedIds",
    "fields_of",
    "gather",
    "gather_ids",
    "line_length",
    "line_of",
    "make_traced",
    "view_stacks",
]
