"""Activation gradients in, new rows out: sum the gradients of each row, apply the optimizer."""

from tpu_embed.core.update.gradients import (
    Guard,
    OnBadGradient,
    check_trainable,
    checked_gradients,
)
from tpu_embed.core.update.in_place import (
    LOOKUP,
    UPDATE,
    check_in_place,
    named,
    note_copies,
)
from tpu_embed.core.update.sharded import Operands, update

__all__ = [
    "LOOKUP",
    "UPDATE",
    "Guard",
    "OnBadGradient",
    "Operands",
    "check_in_place",
    "check_trainable",
    "checked_gradients",
    "named",
    "note_copies",
    "update",
]
