"""An object of a model that has the state of an engine in variables, such as a flax layer.

Such variables hold physical rows, which fit one layout only. Whoever saves or moves a whole model
finds the objects by this type, asks each for its state, and treats all other variables as they are.

Input: an object of a model. Output: its engine, its state, and the variables that hold it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState

__all__ = ["StateHolder"]


class StateHolder(abc.ABC):
    """An object that holds the state of one engine.

    Attributes:
      engine: whose state it is.
    """

    engine: EmbeddingEngine

    @property
    @abc.abstractmethod
    def state(self) -> TableState:
        """The state: physical arrays."""

    @property
    @abc.abstractmethod
    def state_variables(self) -> Sequence[Any]:
        """The variables that hold the state, as the model's framework has them."""

    @abc.abstractmethod
    def set_state(self, state: TableState) -> None:
        """Replace tables, slots, step and counters; the variables stay the same objects."""
