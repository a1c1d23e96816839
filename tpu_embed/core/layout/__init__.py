"""Decide once, statically, where each row lives: the mesh, its axes, and stacks of tables."""

from tpu_embed.core.layout.arrivals import (
    Agreed,
    Arrival,
    NewKeys,
    arrivals_of,
    drawn_keys,
    rooms_in,
)
from tpu_embed.core.layout.describe import describe, describe_devices, describe_tables
from tpu_embed.core.layout.exchange_dtype import (
    ExchangeDtype,
    sent_rows_format,
    sent_sums_format,
)
from tpu_embed.core.layout.features import FeatureLayout
from tpu_embed.core.layout.layout import Layout
from tpu_embed.core.layout.learning_rates import HostRates
from tpu_embed.core.layout.mesh import MeshAxes, gather_explicit, make_axes
from tpu_embed.core.layout.parcels import (
    BY_ID,
    Parcels,
    aligned_empty,
    fetch_parcels,
    lines,
    most_per_shard,
    open_rows,
    parcel_operand,
    send_lines,
)
from tpu_embed.core.layout.placed_for import (
    ENGINE_OPTIONS,
    FEATURE_FIELDS,
    TABLE_FIELDS,
    PlacedFor,
)
from tpu_embed.core.layout.random_rounding import (
    NUMBERS_SLOT,
    ROUNDING_SLOTS,
    SEED_SLOT,
    keeps_numbers,
    rounding_slots,
    rounds_at_random,
    row_places,
    table_crcs,
)
from tpu_embed.core.layout.resolve import make_layout
from tpu_embed.core.layout.rounding import ROW_MULTIPLE, bucket, roomy, round_up
from tpu_embed.core.layout.stack_names import differences, stack_name
from tpu_embed.core.layout.stacks import INT32_ROWS, ResolvedTable, Stack, TableSlice, make_stacks
from tpu_embed.core.layout.visits import Visits

__all__ = [
    "BY_ID",
    "ENGINE_OPTIONS",
    "FEATURE_FIELDS",
    "INT32_ROWS",
    "NUMBERS_SLOT",
    "ROUNDING_SLOTS",
    "ROW_MULTIPLE",
    "SEED_SLOT",
    "TABLE_FIELDS",
    "Agreed",
    "Arrival",
    "ExchangeDtype",
    "FeatureLayout",
    "HostRates",
    "Layout",
    "MeshAxes",
    "NewKeys",
    "Parcels",
    "PlacedFor",
    "ResolvedTable",
    "Stack",
    "TableSlice",
    "Visits",
    "aligned_empty",
    "arrivals_of",
    "bucket",
    "describe",
    "describe_devices",
    "describe_tables",
    "differences",
    "drawn_keys",
    "fetch_parcels",
    "gather_explicit",
    "keeps_numbers",
    "lines",
    "make_axes",
    "make_layout",
    "make_stacks",
    "most_per_shard",
    "open_rows",
    "parcel_operand",
    "rooms_in",
    "roomy",
    "round_up",
    "rounding_slots",
    "rounds_at_random",
    "row_places",
    "send_lines",
    "sent_rows_format",
    "sent_sums_format",
    "stack_name",
    "table_crcs",
]
