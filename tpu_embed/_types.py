"""Array types and the padding id, which every part of the package shares.

Where a bag has fewer ids than its array has places, the rest is filled with the padding id, -1.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.typing import ArrayLike

__all__ = ["PADDING_ID", "Array", "ArrayLike", "PyTree", "Tracer"]

PADDING_ID = -1
"""The id of an empty position in a dense bag; in compiled code, also the row id of no row."""

Array = jax.Array
PyTree = Any
