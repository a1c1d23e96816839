"""Rows of tables in one form, by id, wherever they are: read, written, copied."""

from tpu_embed.core.rows.devices import (
    BLOCK,
    DeviceRows,
    Grid,
    Ids,
    Rows,
    as_stored,
    blocks_of,
    copy_rows,
    host_arrays,
    pieces,
    read_field,
    write_copy,
)

__all__ = [
    "BLOCK",
    "DeviceRows",
    "Grid",
    "Ids",
    "Rows",
    "as_stored",
    "blocks_of",
    "copy_rows",
    "host_arrays",
    "pieces",
    "read_field",
    "write_copy",
]
