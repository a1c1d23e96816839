"""Which implementation of a kernel runs on which platform, decided when a program is lowered.

One traced program lowers for CPU, GPU and TPU. The core imports its kernels from here and knows no
platform.
"""

from __future__ import annotations

import functools

import jax

from tpu_embed._types import Array
from tpu_embed.kernels import reference
from tpu_embed.kernels.reference import gather_rows, set_rows, sort_rows

__all__ = ["gather_rows", "segment_sum", "set_rows", "sort_rows"]


def segment_sum(values: Array, segments: Array, num_segments: int) -> Array:
    """Sum runs of entries; see `reference.segment_sum`. On GPU, the repeatable scan."""
    scan = functools.partial(reference.segment_sum_scan, num_segments=num_segments)
    return jax.lax.platform_dependent(
        values,
        segments,
        cuda=scan,
        rocm=scan,
        default=functools.partial(reference.segment_sum, num_segments=num_segments),
    )
