"""Deltas: files of the rows that changed since a step, for servers between full exports."""

from tpu_embed.io.delta import delta_files
from tpu_embed.io.delta.changes import SHARED_ROW, ChangedKeys, TableChanges
from tpu_embed.io.delta.delta import apply_delta, export_delta
from tpu_embed.io.delta.row_blocks import check_numbered, set_rows, set_rows_in_place

__all__ = [
    "SHARED_ROW",
    "ChangedKeys",
    "TableChanges",
    "apply_delta",
    "check_numbered",
    "delta_files",
    "export_delta",
    "set_rows",
    "set_rows_in_place",
]
