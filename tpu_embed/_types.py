"""Array aliases and the padding id, shared by every floor."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.typing import ArrayLike

__all__ = ["PADDING_ID", "Array", "ArrayLike", "PyTree", "Tracer"]

PADDING_ID = -1
"""The id of an empty position in a dense bag; in compiled code, of an absent row."""

Array = jax.Array
PyTree = Any
