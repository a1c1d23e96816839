"""The arrays that training changes: how they are stored, created, checked, read and replaced."""

from tpu_embed.core.state import norms
from tpu_embed.core.state.checks import (
    check_arrays,
    check_not_donated,
    check_own,
    check_state,
    check_tables_not_donated,
)
from tpu_embed.core.state.fields import Field, field, fields
from tpu_embed.core.state.init import blank_arrays, init_tables
from tpu_embed.core.state.moved_rows import (
    RowMover,
    Sent,
    check_rule,
    leaving_rooms,
    make_homes,
    row_fields,
)
from tpu_embed.core.state.new_rows import (
    MAP_VERSION,
    NewKeys,
    NewRowWriter,
    first_rows,
    new_version,
    new_vocabulary,
    open_key,
    random_key,
    visiting_tables,
)
from tpu_embed.core.state.rebuilt import (
    matched_counters,
    put_everywhere,
    vocabulary_of_maps,
)
from tpu_embed.core.state.table_state import (
    StackShard,
    TableState,
    describe_leaf,
    logical_rows,
    read_rows,
    refuse_gradient,
    row_unit,
    rule_slots,
    slot_format,
    slot_shapes,
    state_specs,
)

__all__ = [
    "MAP_VERSION",
    "Field",
    "NewKeys",
    "NewRowWriter",
    "RowMover",
    "Sent",
    "StackShard",
    "TableState",
    "blank_arrays",
    "check_arrays",
    "check_not_donated",
    "check_own",
    "check_rule",
    "check_state",
    "check_tables_not_donated",
    "describe_leaf",
    "field",
    "fields",
    "first_rows",
    "init_tables",
    "leaving_rooms",
    "logical_rows",
    "make_homes",
    "matched_counters",
    "new_version",
    "new_vocabulary",
    "norms",
    "open_key",
    "put_everywhere",
    "random_key",
    "read_rows",
    "refuse_gradient",
    "row_fields",
    "row_unit",
    "rule_slots",
    "slot_format",
    "slot_shapes",
    "state_specs",
    "visiting_tables",
    "vocabulary_of_maps",
]
