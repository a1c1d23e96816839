"""The base class of layers that have an engine and its state in variables, such as a flax layer.

Such variables contain physical rows, which fit one layout only, so code that saves or moves a whole
model must not treat them like other variables. It finds the layers by this class, and asks each for
its engine and its state.

Input: a layer of a model. Output: its engine, its state, and the variables that hold the state.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState


class EngineLayer(abc.ABC):
    """A layer of a model that holds the state of one engine.

    Attributes:
      engine: the engine that the state belongs to.
    """

    engine: EmbeddingEngine

    @property
    @abc.abstractmethod
    def state(self) -> TableState:
        """The state, with its physical arrays."""

    @property
    @abc.abstractmethod
    def state_variables(self) -> Sequence[Any]:
        """The variables of the model's framework that hold the state."""

    @abc.abstractmethod
    def set_state(self, state: TableState) -> None:
        """Replace tables, slots, step and counters, in the same variables as before."""
