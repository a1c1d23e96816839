"""Which rows have changed since an export, so that only these need to be exported again."""

from tpu_embed.touched.record import TouchedRows, check_record
from tpu_embed.touched.table_marks import (
    Changes,
    Lineage,
    SavedMarks,
    SavedRecord,
    Version,
    merge_records,
)

__all__ = [
    "Changes",
    "Lineage",
    "SavedMarks",
    "SavedRecord",
    "TouchedRows",
    "Version",
    "check_record",
    "merge_records",
]
