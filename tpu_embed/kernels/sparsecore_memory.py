"""What the subcores that update rows work on: the device's memory, their own, and the rule.

Input: arrays of an owner of rows. Output: refs for `sparsecore_owner.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tpu_embed.kernels.sparsecore_subcore import SumMemory
from tpu_embed.kernels.sparsecore_subcore import with_memory as with_chunks

AHEAD = 32
"""Two vectors of the widest subcore."""


@dataclasses.dataclass(frozen=True)
class RuleForm:
    """What is static of a `CompiledRule`.

    Attributes:
      kind: one of `sparsecore_rules.KINDS`.
      flag: its switch.
      decays: whether the row is multiplied with 1 - λ first.
      clips_gradient: whether the gradient has bounds.
      clips_row: whether the new row has bounds.
      dim: D, the numbers of a row that count.
    """

    kind: str
    flag: bool
    decays: bool
    clips_gradient: bool
    clips_row: bool
    dim: int


@dataclasses.dataclass(frozen=True)
class Work:
    """What all workers have to do: refs, but for the last two.

    Attributes:
      bounds: int32 `[n]`, as for `sparsecore_worker.run`.
      source: partial sums, float32 `[P, W]`, or uint32 `[P, W / 2]` with two numbers of bfloat16
        to a word; some words more than a row of the table are padding.
      index: int32 `[N]`, the partial sum of each entry; N is a multiple of `chunk`.
      segments: int32 `[N + lanes]`, non-decreasing and without gaps.
      row_ids: int32 `[M]`, the row of each segment, `PADDING_ID` for none; at least
        `chunk + AHEAD + 8` more than there are segments.
      numbers: float32 `[AHEAD]`, `CompiledRule.operand` and padding.
      table: float32 `[R, W]`; or uint32 `[R, words]`, two numbers of bfloat16 to a word.
      slots: float32, `[R, W]` or `[R]` each.
      form: the rule.
      chunk: how many entries are summed at a time.
      keys: int32 `[M]`, for each segment what the random bits of its row depend on, as
        `stochastic.row_draws` says; None: rows are not rounded at random.
    """

    bounds: Any
    source: Any
    index: Any
    segments: Any
    row_ids: Any
    numbers: Any
    table: Any
    slots: tuple[Any, ...]
    form: RuleForm
    chunk: int
    keys: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(SumMemory):
    """What a worker keeps in its subcore's memory: refs.

    Attributes:
      numbers: float32 `[AHEAD]`.
      row_ids: int32 `[chunk + AHEAD]`, the rows of the segments of the next chunk.
      table: `[2, chunk, …]`, the rows of `targets`.
      slots: float32 `[2, chunk, W]` or `[2, chunk]` each, their slots.
      keys: int32 `[chunk + AHEAD]`, those of the segments of the next chunk; or None.
      row_keys: int32 `[2, chunk]`, the key of each row of `targets`; or None.
    """

    numbers: Any
    row_ids: Any
    table: Any
    slots: tuple[Any, ...]
    keys: Any = None
    row_keys: Any = None

    @property
    def before(self) -> Any:
        """The last segment of the chunk that was prepared last."""
        from jax.experimental import pallas as pl

        return self.segments[pl.ds(0, self.lanes)][self.lanes - 1]


def with_memory(run: Callable[[Memory], None], work: Work) -> None:
    """Call `run` with a worker's memory."""
    chunk, float32 = work.chunk, jnp.float32
    slots = {f"slot{n}": ((2, chunk, *x.shape[1:]), float32) for n, x in enumerate(work.slots)}

    def with_refs(refs: dict[str, Any]) -> None:
        own = tuple(refs.pop(name) for name in slots)
        run(Memory(**refs, slots=own))

    others = {
        "numbers": (work.numbers.shape, float32),
        "row_ids": ((chunk + AHEAD,), jnp.int32),
        "table": ((2, chunk, work.table.shape[1]), work.table.dtype),
    }
    if work.keys is not None:
        others |= {"keys": ((chunk + AHEAD,), jnp.int32), "row_keys": ((2, chunk), jnp.int32)}
    with_chunks(with_refs, work.bounds, work.source, chunk, **others, **slots)
