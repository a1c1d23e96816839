"""Columns and frames of a library that the package does not know by name, as polars is one."""

from typing import Any


class Streamed:
    """What is known of it is its Arrow stream alone, which is that of an Arrow column or table."""

    def __init__(self, values: Any):
        self.values = values

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.values.__arrow_c_stream__(requested_schema)
