"""Rows and slots at home on the host: as many as were touched, wherever their table's rows are.

Input: rows by 64-bit id, NumPy arrays. Output: the same.
"""

from tpu_embed.storage.homes import (
    VALUES,
    Homes,
    HomeTable,
    HostStorage,
    Incoming,
    Room,
    RowGroups,
    Save,
    slot_field,
)
from tpu_embed.storage.host_rows import HostRows, NewRows, Replacement, RowField, Rows

__all__ = [
    "VALUES",
    "HomeTable",
    "Homes",
    "HostRows",
    "HostStorage",
    "Incoming",
    "NewRows",
    "Replacement",
    "Room",
    "RowField",
    "RowGroups",
    "Rows",
    "Save",
    "slot_field",
]
