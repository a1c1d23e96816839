"""What leaves a training process, and what comes back: checkpoints; lookups and models that serve.

Checkpoints are imported when they are first asked for: who serves needs no orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpu_embed.core.touched import TouchedRows, Version
from tpu_embed.io.delta import apply_delta, export_delta
from tpu_embed.io.export import export_model
from tpu_embed.io.quantize import QuantizedTable, quantize_rows
from tpu_embed.io.served import ServedModel, load_model
from tpu_embed.io.serving import serving_lookup

if TYPE_CHECKING:
    from tpu_embed.io.checkpoint import Restored, restore, save
    from tpu_embed.io.manager import CheckpointManager, ModuleCheckpointManager
    from tpu_embed.io.module_checkpoint import restore_modules, save_modules

__all__ = [
    "CheckpointManager",
    "ModuleCheckpointManager",
    "QuantizedTable",
    "Restored",
    "ServedModel",
    "TouchedRows",
    "Version",
    "apply_delta",
    "export_delta",
    "export_model",
    "load_model",
    "quantize_rows",
    "restore",
    "restore_modules",
    "save",
    "save_modules",
    "serving_lookup",
]

_LATER = {
    "CheckpointManager": "manager",
    "ModuleCheckpointManager": "manager",
    "Restored": "checkpoint",
    "restore": "checkpoint",
    "restore_modules": "module_checkpoint",
    "save": "checkpoint",
    "save_modules": "module_checkpoint",
}
"""Names that are imported when they are first asked for, and their modules."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpu_embed.io.{_LATER[name]}"), name)
