"""How the rows of a table are stored in its array: plainly as `[R, D]`, or packed for a TPU.

TPUs tile the last axis in 128 words (a word is 32 bits) and store narrower arrays column-major, so
reading one row of `[R, 16]` would transpose the whole array. Therefore rows are packed one after
the other into lines of 128 words, `[L, 128]`, which a TPU stores without gaps:

- `"words"` is for SparseCores, which read any contiguous words: a row is padded to a multiple of
  `sparsecore.WORDS`, and a very long row to whole lines;
- `"lanes"` is for TensorCores, which read whole lines: a line holds one, two or four rows. A row
  longer than a line is padded to whole lines, and the array is then `[R, 256]`, for example.

Input: rows `[n, D]`. Output: packed rows `[n, words]`, and the shape of the array that holds them.
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
from tpu_embed.kernels.storage import bits_of_bfloat16, narrowed, stored_dtype

Packing = Literal["none", "lanes", "words"]

LINE = 128
"""Words per line."""

PACKED_ROWS = 128
"""The number of rows in a packed array is a multiple of this, so that it has whole tiles of 8
lines for every D."""

_LEAST_LANES = 32
"""The fewest words of a row that shares a line. A line then holds at most 4 rows, from which it is
assembled when it is written."""

_LONG = 1024
"""Rows with more words than this have whole lines, so that they can be cut into few pieces."""


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
      shape: the shape of one row: `(D,)`, or `()` for one number per row.
      dtype: the logical dtype.
      packing: what the rows of the stack are packed for.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    packing: Packing = "none"

    @property
    def packed(self) -> bool:
        """Whether these rows are packed: they have several numbers, of 32 bits or bfloat16."""
        known = self.dtype.itemsize == 4 or self.dtype == jnp.bfloat16
        return (
            self.packing != "none"
            and known
            and self.shape != ()
            and math.prod(self.shape) > 0
        )

    @property
    def moved_by_sparse_cores(self) -> bool:
        """Whether SparseCores can move the rows: packed words, or one 32-bit number per row."""
        number = self.shape == () and self.dtype.itemsize == 4
        return self.packing == "words" and (self.packed or number)

    @property
    def words(self) -> int:
        """The number of 32-bit words of a packed row, padding included."""
        used = -(-math.prod(self.shape) * self.dtype.itemsize // 4)
        # D = 20 float32 use 20 words: 32 (a multiple of 16) for SparseCores.
        if self.packing == "words":
            unit = LINE if used > _LONG else WORDS
            return -(-used // unit) * unit
        if used > LINE:
            return -(-used // LINE) * LINE
        # For TensorCores, the next power of two, so that rows fill a line: 20 -> 32, 50 -> 64.
        return max(_LEAST_LANES, 2 ** (used - 1).bit_length())

    @property
    def in_lines(self) -> bool:
        """Whether several rows share a line, out of which a TensorCore picks one."""
        return self.packed and self.packing == "lanes" and self.words < LINE

    def array(self, rows: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of an array of `rows` rows.

        Example:
          >>> RowFormat((20,), np.dtype("float32"), "lanes").array(256).shape
          (64, 128)
        """
        stored = stored_dtype(self.dtype)
        if not self.packed:
            return jax.ShapeDtypeStruct((rows, *self.shape), stored)
        word = np.dtype(np.uint32) if stored.itemsize < 4 else stored
        if self.packing == "lanes" and not self.in_lines:
            return jax.ShapeDtypeStruct((rows, self.words), word)
        return jax.ShapeDtypeStruct((-(-rows * self.words // LINE), LINE), word)

    def by_row(self, array: Any) -> Any:
        """Return the array (NumPy or JAX) as rows: `[R, words]` if packed, else unchanged.

        On a TPU this moves no bytes if `sparsecore` reads the result, or if a row has whole lines.
        Otherwise XLA makes a copy in which every row takes whole lines.
        """
        return array.reshape(-1, self.words) if self.packed else array

    def for_exchange(self, packed: Array, parts: int) -> Array:
        """Return rows `[n, …]`, packed or not, cut into `parts` equal parts: `[parts, …]`.

        If each part is a whole number of lines, it is returned as lines, which a TPU sends without
        rearranging them.
        """
        # 8 rows of 32 words for 2 parts: [8, 32] -> [2, 1, 128]; for 4 parts: [4, 2, 32].
        if self.packed and packed.size % (parts * LINE) == 0:
            return packed.reshape(parts, -1, LINE)
        return packed.reshape(parts, -1, *packed.shape[1:])

    def pack(self, rows: Array) -> Array:
        """Return stored rows `[n, …]` as they lie in a packed array, `[n, words]`.

        A word holds two numbers of bfloat16: word i has element i in its lower half and element
        i + words in its upper half.
        """
        if not self.packed:
            return rows
        # Padded to the row's words: with 16 words, 20 bfloat16 become 32, then the two halves of
        # each row [n, 16] and [n, 16] become one array of words [n, 16].
        flat = rows.reshape(rows.shape[0], -1)
        halves = 4 // flat.dtype.itemsize
        flat = jnp.pad(flat, ((0, 0), (0, self.words * halves - flat.shape[1])))
        if halves == 1:
            return flat
        lower, upper = jnp.split(flat.astype(jnp.uint32), 2, axis=1)
        return lower | (upper << 16)

    def pack_rounded(self, rows: Array) -> Array:
        """Return float32 rows `[n, D]`, rounded to bfloat16, as `pack` returns them.

        A TPU does so in one pass: no array of single halves is stored.
        """
        if not self.packed:
            return narrowed(rows)
        lower, upper = jnp.split(
            jnp.pad(rows, ((0, 0), (0, 2 * self.words - rows.shape[1]))), 2, axis=1
        )
        return (bits_of_bfloat16(lower) >> 16) | bits_of_bfloat16(upper)

    def unpack(self, packed: Any) -> Any:
        """Return packed rows `[n, words]` (NumPy or JAX) as stored rows `[n, …]`."""
        if not self.packed:
            return packed
        stored = stored_dtype(self.dtype)
        # The inverse of `pack`: lower halves, then upper halves, then the padding is cut off.
        if stored.itemsize < 4:
            xp = np if isinstance(packed, np.ndarray) else jnp
            halves = packed & 0xFFFF, packed >> 16
            packed = xp.concatenate(halves, axis=1).astype(stored)
        return packed[:, : math.prod(self.shape)].reshape(-1, *self.shape)
