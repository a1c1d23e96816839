"""Save tables, slots, networks and flax models; restore them on any device count and placement.

Every file has a checksum, which is checked when it is read: chunks of rows in `row_files.py`,
networks in `trees.py`, and all JSON files in `io/schema.py`.
"""

from tpu_embed.io.checkpoint.checked import MismatchError
from tpu_embed.io.checkpoint.commit import MODEL, TOUCHED
from tpu_embed.io.checkpoint.engine_checkpoint import Restored, restore, save
from tpu_embed.io.checkpoint.manager import CheckpointManager, ModuleCheckpointManager
from tpu_embed.io.checkpoint.module_checkpoint import restore_modules, save_modules
from tpu_embed.io.checkpoint.saved_maps import explain, read_maps, statistics_of

__all__ = [
    "MODEL",
    "TOUCHED",
    "CheckpointManager",
    "MismatchError",
    "ModuleCheckpointManager",
    "Restored",
    "explain",
    "read_maps",
    "restore",
    "restore_modules",
    "save",
    "save_modules",
    "statistics_of",
]
