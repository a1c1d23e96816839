"""Check that what a function was given as its engine is one.

Input: what the user gave. Output: nothing, or an error that says where an engine is to be had.
"""

from __future__ import annotations

from typing import Any

from tpu_embed._checks import message
from tpu_embed.core.engine.logical_rows import LogicalRows

_WHERE = "a TPUEmbedding has one, embedding.engine, and a layer: layer.engine"


def check_engine(what: str, engine: Any, *, remedy: str | None = None) -> None:
    """Check that a value is an `EmbeddingEngine`.

    Args:
      what: the argument, for the message.
      engine: the value.
      remedy: what to do where it is none; None: where an engine is to be had.

    Raises:
      TypeError: it is something else.
    """
    # Engines alone have this base class; their own file needs this check, so it cannot be named.
    if not isinstance(engine, LogicalRows):
        got = type(engine).__name__
        raise TypeError(
            message(what, expected="an EmbeddingEngine", got=got, remedy=remedy or _WHERE)
        )
