"""What the subcores that update rows work on: the device's memory, their own, and the rule.

Input: arrays of an owner of rows. Output: refs for `sparsecore_owner.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp


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
        `chunk + 2 * lanes` more than there are segments.
      numbers: float32 `[2 * lanes]`, `CompiledRule.operand` and padding.
      table: float32 `[R, W]`.
      slots: float32, `[R, W]` or `[R]` each.
      form: the rule.
      chunk: how many entries are summed at a time.
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


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a worker keeps in its subcore's memory: refs.

    Attributes:
      bounds: int32 `[workers + WORDS]`.
      numbers: float32 `[2 * lanes]`.
      index: int32 `[chunk]`, the partial sum of each entry of the chunk that comes next.
      segments: int32 `[lanes + chunk + lanes]`: the end of the chunk before, the chunk, and the
        beginning of the chunk after it.
      row_ids: int32 `[chunk + 2 * lanes]`, the rows of these segments, from `first` on.
      starts: int32 `[2, chunk]`, 1 where a segment starts. The 2 are this chunk and the next,
        alternately, here and below.
      ids: int32 `[2, chunk]`, partial sums to fetch, `PADDING_ID` for none.
      targets: int32 `[2, chunk]`, where a segment ends its row, otherwise `PADDING_ID`.
      rows: `[2, chunk, …]`, fetched partial sums.
      sums: float32 `[2, chunk, W]`, running sums; the memory of `rows` unless these are packed.
      table: float32 `[2, chunk, W]`, the rows of `targets`.
      slots: float32 `[2, chunk, W]` or `[2, chunk]` each, their slots.
      running: float32 `[W]`, the running sum at the end of the chunk before.
      arrived: semaphore of numbers.
      fetched: semaphores `[2]` of `rows`, `table` and `slots`.
      written: semaphores `[2]` of `table` and `slots`.
    """

    bounds: Any
    numbers: Any
    index: Any
    segments: Any
    row_ids: Any
    starts: Any
    ids: Any
    targets: Any
    rows: Any
    sums: Any
    table: Any
    slots: tuple[Any, ...]
    running: Any
    arrived: Any
    fetched: Any
    written: Any
    factors: Any = None  # weights are in the partial sums already

    @property
    def chunk(self) -> int:
        """The entries of a chunk."""
        return self.ids.shape[1]

    @property
    def lanes(self) -> int:
        """The numbers of a vector."""
        return (self.segments.shape[0] - self.chunk) // 2

    @property
    def packed(self) -> bool:
        """Whether the partial sums are bfloat16, two to a word."""
        return self.sums is not self.rows

    @property
    def before(self) -> Any:
        """The last segment of the chunk that was prepared last."""
        from jax.experimental import pallas as pl

        return self.segments[pl.ds(0, self.lanes)][self.lanes - 1]


def allocate(run: Callable[[Memory], None], work: Work) -> None:
    """Call `run` with a worker's memory."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas import tpu_sc as plsc

    vmem, dma, int32, float32 = pltpu.VMEM, pltpu.SemaphoreType.DMA, jnp.int32, jnp.float32
    chunk, lanes = work.chunk, plsc.get_sparse_core_info().num_lanes
    words, packed = work.source.shape[1], work.source.dtype == jnp.uint32
    width = words * (2 if packed else 1)
    kinds = {
        "bounds": vmem(work.bounds.shape, int32),
        "numbers": vmem(work.numbers.shape, float32),
        "index": vmem((chunk,), int32),
        "segments": vmem((lanes + chunk + lanes,), int32),
        "row_ids": vmem((chunk + 2 * lanes,), int32),
        "starts": vmem((2, chunk), int32),
        "ids": vmem((2, chunk), int32),
        "targets": vmem((2, chunk), int32),
        "rows": vmem((2, chunk, words), work.source.dtype),
        "table": vmem((2, chunk, work.table.shape[1]), float32),
        "running": vmem((width,), float32),
        "arrived": dma(()),
        "fetched": dma((2,)),
        "written": dma((2,)),
    }
    if packed:
        kinds["sums"] = vmem((2, chunk, width), float32)
    slots = {f"slot{n}": vmem((2, chunk, *x.shape[1:]), float32) for n, x in enumerate(work.slots)}

    def with_refs(**refs: Any) -> None:
        own = tuple(refs.pop(name) for name in slots)
        run(Memory(**({"sums": refs["rows"]} | refs), slots=own))

    pl.run_scoped(with_refs, **kinds, **slots)
