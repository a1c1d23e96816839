"""A feature of an engine, and where the rows of its table live.

Input: a feature's config and its table's slice of a stack. Output: `FeatureLayout`.
"""

from __future__ import annotations

import dataclasses

from tpu_embed.config import FeatureConfig
from tpu_embed.core.layout.stacks import TableSlice


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """One feature, and where its table lives.

    Attributes:
      path: the feature's path in the configuration, for messages.
      config: the feature's config.
      table: its table's slice of the stack.
      stack: the index of the stack in `Layout.stacks`.
    """

    path: str
    config: FeatureConfig
    table: TableSlice
    stack: int
