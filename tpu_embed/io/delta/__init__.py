"""Deltas: files of the rows that changed since a step, for servers between full exports."""

from tpu_embed.io.delta import delta_files
from tpu_embed.io.delta.delta import apply_delta, export_delta
from tpu_embed.io.delta.delta_files import SHARED_ROW, served_parts

__all__ = [
    "SHARED_ROW",
    "apply_delta",
    "delta_files",
    "export_delta",
    "served_parts",
]
