"""How rows lie in their array: one below the other, or packed for a TPU.

A TPU stores the last axis of an array in lines of 128 words, and one that is shorter by columns:
reading a row of `[R, 16]` means to transpose it all. So rows of 32-bit words lie one after the
other in an array of lines, `[L, 128]`, which a TPU stores without gaps:

- `"words"`, for SparseCores, which read any contiguous words: a row is padded to a multiple of
  `sparsecore.WORDS`, a very long one to whole lines;
- `"lanes"`, for TensorCores, which read lines: a line has one, two or four rows, or a row has whole
  lines (one below the other then, `[R, 256]`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embed._types import Array
from tpu_embed.kernels.sparsecore import WORDS, has_sparse_cores
from tpu_embed.kernels.storage import stored_dtype

__all__ = ["LINE", "PACKED_ROWS", "Packing", "RowFormat", "packing_of"]

Packing = Literal["none", "lanes", "words"]

LINE = 128
"""Words of a line."""

PACKED_ROWS = 128
"""Packed arrays have a multiple of so many rows: whole tiles of 8 lines, whatever D."""

_LEAST_LANES = 32
"""Words of the shortest row in a line: a line that is written is put together from 4 rows at most.
"""

_LONG = 1024
"""Words from which on a row has whole lines, so that it can be cut into few pieces."""


def packing_of(device: Any) -> Packing:
    """Return how rows are packed for a device, or a mesh's abstract device.

    Args:
      device: anything with a `device_kind`, or None.
    """
    if has_sparse_cores(device):
        return "words"
    return "lanes" if getattr(device, "device_kind", "").startswith("TPU") else "none"


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How the rows of a table, or of one of its slots, lie in their array.

    Attributes:
      shape: of a row: `(D,)`, or `()` for one number a row.
      dtype: the logical dtype.
      packing: what rows of the stack are packed for.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    packing: Packing = "none"

    @property
    def packed(self) -> bool:
        """Whether these rows are packed: numbers of 32 bits or bfloat16, several a row."""
        known = self.dtype.itemsize == 4 or self.dtype == jnp.bfloat16
        return self.packing != "none" and known and self.shape != () and math.prod(self.shape) > 0

    @property
    def moved_by_sparse_cores(self) -> bool:
        """Whether SparseCores can read and write them: words, or one number of 32 bits a row."""
        number = self.shape == () and self.dtype.itemsize == 4
        return self.packing == "words" and (self.packed or number)

    @property
    def words(self) -> int:
        """The 32-bit words of a packed row."""
        used = -(-math.prod(self.shape) * self.dtype.itemsize // 4)
        if self.packing == "words":
            unit = LINE if used > _LONG else WORDS
            return -(-used // unit) * unit
        if used > LINE:
            return -(-used // LINE) * LINE
        return max(_LEAST_LANES, 2 ** (used - 1).bit_length())

    @property
    def in_lines(self) -> bool:
        """Whether a line has several rows, of which a TensorCore picks one."""
        return self.packed and self.packing == "lanes" and self.words < LINE

    def array(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return the shape and the dtype of the array of so many rows."""
        stored = stored_dtype(self.dtype)
        if not self.packed:
            return jax.ShapeDtypeStruct((rows, *self.shape), stored)
        word = np.dtype(np.uint32) if stored.itemsize < 4 else stored
        if self.packing == "lanes" and not self.in_lines:
            return jax.ShapeDtypeStruct((rows, self.words), word)
        return jax.ShapeDtypeStruct((-(-rows * self.words // LINE), LINE), word)

    def by_row(self, array: Any) -> Any:
        """Return the array (NumPy or JAX) with a row a row: `[R, words]` if packed, else as it is.

        On a TPU no bytes move if `sparsecore` reads the result, or a row has whole lines; for
        anything else XLA makes a copy, each of whose rows takes whole lines.
        """
        return array.reshape(-1, self.words) if self.packed else array

    def for_exchange(self, packed: Array, parts: int) -> Array:
        """Return `[n, words]`, or rows that are not packed, cut into parts: `[parts, …]`.

        Where they divide, lines: a TPU then sends them as they lie.
        """
        if self.packed and packed.size % (parts * LINE) == 0:
            return packed.reshape(parts, -1, LINE)
        return packed.reshape(parts, -1, *packed.shape[1:])

    def pack(self, rows: Array) -> Array:
        """Return stored rows `[n, …]` as they lie in a packed array, `[n, words]`.

        Of bfloat16, a word has element i in its lower half, element i + words in its upper one.
        """
        if not self.packed:
            return rows
        flat = rows.reshape(rows.shape[0], -1)
        halves = 4 // flat.dtype.itemsize
        flat = jnp.pad(flat, ((0, 0), (0, self.words * halves - flat.shape[1])))
        if halves == 1:
            return flat
        lower, upper = jnp.split(flat.astype(jnp.uint32), 2, axis=1)
        return lower | (upper << 16)

    def unpack(self, packed: Any) -> Any:
        """Return rows that lay in a packed array (NumPy or JAX) as stored rows `[n, …]`."""
        if not self.packed:
            return packed
        stored = stored_dtype(self.dtype)
        if stored.itemsize < 4:
            xp = np if isinstance(packed, np.ndarray) else jnp
            halves = packed & 0xFFFF, packed >> 16
            packed = xp.concatenate(halves, axis=1).astype(stored)
        return packed[:, : math.prod(self.shape)].reshape(-1, *self.shape)
