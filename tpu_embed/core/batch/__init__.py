"""Pack the ids of all features into one array of static shape, and send it to the devices."""

from tpu_embed.core.batch.batch import Batch
from tpu_embed.core.batch.choose import choose_vocabularies
from tpu_embed.core.batch.intake import Intake, Turn
from tpu_embed.core.batch.keyed import give_rows_of
from tpu_embed.core.batch.line import fields_of, line_length, line_of
from tpu_embed.core.batch.located import LocalIds, RoutedIds
from tpu_embed.core.batch.packing import StackIds, natural_spec, pack, pack_all, pack_by_place
from tpu_embed.core.batch.routing import sort_stack, with_capacities, write_lines
from tpu_embed.core.batch.spec import BatchSpec, StackSpec, worst_case
from tpu_embed.core.batch.stack_view import BagLayout, StackView, view_stacks
from tpu_embed.core.batch.steps import (
    Admission,
    KeyedRows,
    MapStates,
    Steps,
    check_vocabulary,
    new_history,
    steps_of,
)
from tpu_embed.core.batch.traced import TracedIds, make_traced, padded_lengths
from tpu_embed.core.batch.vocabularies import Vocabularies

__all__ = [
    "Admission",
    "BagLayout",
    "Batch",
    "BatchSpec",
    "Intake",
    "KeyedRows",
    "LocalIds",
    "MapStates",
    "RoutedIds",
    "StackIds",
    "StackSpec",
    "StackView",
    "Steps",
    "TracedIds",
    "Turn",
    "Vocabularies",
    "check_vocabulary",
    "choose_vocabularies",
    "fields_of",
    "give_rows_of",
    "line_length",
    "line_of",
    "make_traced",
    "natural_spec",
    "new_history",
    "pack",
    "pack_by_place",
    "pack_all",
    "padded_lengths",
    "sort_stack",
    "steps_of",
    "with_capacities",
    "write_lines",
    "view_stacks",
    "worst_case",
]
