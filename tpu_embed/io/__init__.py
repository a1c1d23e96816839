"""Files of a training run: checkpoints to resume from, models to serve, and deltas between them.

The names of checkpoints are imported on first use, because a server needs no orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpu_embed.io.delta import apply_delta, export_delta
from tpu_embed.io.quantize import QuantizedTable, quantize_rows
from tpu_embed.io.serving import (
    FollowingModel,
    ServedModel,
    export_model,
    follow,
    host_table,
    load_model,
    publish,
    serving_lookup,
)
from tpu_embed.touched import TouchedRows, Version

if TYPE_CHECKING:
    from tpu_embed.io.checkpoint import (
        CheckpointManager,
        ModuleCheckpointManager,
        Restored,
        restore,
        restore_modules,
        save,
        save_modules,
    )

__all__ = [
    "CheckpointManager",
    "FollowingModel",
    "ModuleCheckpointManager",
    "QuantizedTable",
    "Restored",
    "ServedModel",
    "TouchedRows",
    "Version",
    "apply_delta",
    "export_delta",
    "export_model",
    "follow",
    "host_table",
    "load_model",
    "publish",
    "quantize_rows",
    "restore",
    "restore_modules",
    "save",
    "save_modules",
    "serving_lookup",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:  # the other names are in this module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("tpu_embed.io.checkpoint"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
