"""Rows of tables in one form, by id, wherever they are: read, written, copied."""

from tpu_embed.core.rows import logical
from tpu_embed.core.rows.devices import (
    BLOCK,
    DeviceRows,
    Grid,
    Ids,
    Rows,
    blocks_of,
    copy_rows,
    pieces,
)
from tpu_embed.core.rows.logical import host_arrays

__all__ = [
    "BLOCK",
    "DeviceRows",
    "Grid",
    "Ids",
    "Rows",
    "blocks_of",
    "copy_rows",
    "host_arrays",
    "logical",
    "pieces",
]
