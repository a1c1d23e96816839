"""The shapes that batches of a model's layers get, as JSON for the position of a `Prefetcher`.

Input: the engines of the layers. Output: what `Intake.shapes` says of each; and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from tpu_embed._checks import message
from tpu_embed.core.engine import EmbeddingEngine


@final
class ModelIntake:
    """The shapes that the batches of several engines get.

    Args:
      engines: by path of the layer.
    """

    def __init__(self, engines: Mapping[str, EmbeddingEngine]) -> None:
        self._intakes = {path: engine.intake for path, engine in engines.items()}

    def shapes(self) -> Any:
        """Return those of each layer with jagged features, as JSON; None without such layers."""
        found = {path: intake.shapes() for path, intake in self._intakes.items()}
        return {path: one for path, one in found.items() if one is not None} or None

    def expect(self, shapes: Any) -> None:
        """Give the next batches shapes that `shapes` returned; those of other layers are left out.

        Raises:
          ValueError: they are something else.
        """
        if not isinstance(shapes, dict):
            remedy, got = "give what get_state returned", type(shapes).__name__
            raise ValueError(message("shapes", expected="one per layer", got=got, remedy=remedy))
        for path, one in shapes.items():
            if path in self._intakes:
                self._intakes[path].expect(one)
