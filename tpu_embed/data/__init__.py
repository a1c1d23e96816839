"""From a user's data to placed batches, while the devices work on the batches before.

`Place`, the transform for grain, is imported on first use, because nothing else needs grain.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpu_embed.data.balance import balance_replicas, reorder_batch
from tpu_embed.data.items import EventValues, place_values
from tpu_embed.data.prefetcher import Prefetcher

if TYPE_CHECKING:
    from tpu_embed.data.grain_transform import Place

__all__ = [
    "EventValues",
    "Place",
    "Prefetcher",
    "balance_replicas",
    "place_values",
    "reorder_batch",
]


def __getattr__(name: str) -> Any:
    if name != "Place":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("tpu_embed.data.grain_transform").Place


def __dir__() -> list[str]:
    return sorted(__all__)
