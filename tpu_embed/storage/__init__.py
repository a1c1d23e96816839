"""Rows and slots at home on the host: as many as were touched, wherever their table's rows are.

Input: rows by 64-bit id, NumPy arrays. Output: the same.
"""

from tpu_embed.storage.host_rows import HostRows, RowField

__all__ = ["HostRows", "RowField"]
