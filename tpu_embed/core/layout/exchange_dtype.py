"""Which numbers are rounded to bfloat16 where devices exchange them, and in which format they go.

Rows travel from their owner shard to the devices that look them up, and partial sums of gradients
travel back. With `exchange_dtype="bfloat16"` both are rounded to bfloat16 on their way, so they
take half the bytes. They are rounded on one device, too, where nothing travels: so tables have the
same bits on every number of devices. What is stored, and every sum, stays float32.

Input: stacks, and the option of an engine. Output: stacks that know their dtype, and the formats of
what is sent.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from tpu_embed._checks import check_choice, message
from tpu_embed.core.layout.stacks import Stack
from tpu_embed.kernels.formats import RowFormat

ExchangeDtype = Literal["float32", "bfloat16"]


def with_exchange_dtype(
    stacks: tuple[Stack, ...], exchange_dtype: ExchangeDtype | None
) -> tuple[Stack, ...]:
    """Return the stacks, those that are sharded with the dtype of their exchange.

    Args:
      stacks: the stacks. Replicated ones exchange no rows and keep whole sums: nothing is rounded.
      exchange_dtype: the option of the engine; None means "float32", which rounds nothing.

    Raises:
      ValueError: another dtype; a sharded table is float64, or its optimizer does not accumulate
        gradients, and they are to be rounded.
    """
    if exchange_dtype is None:
        return stacks
    check_choice("exchange_dtype", exchange_dtype, get_args(ExchangeDtype))
    if exchange_dtype == "float32":
        return stacks
    return tuple(_rounded(stack) if stack.placement != "replicated" else stack for stack in stacks)


def _rounded(stack: Stack) -> Stack:
    """Return a sharded stack whose rows and partial sums are rounded to bfloat16."""
    what, name = "exchange_dtype", stack.tables[0].name
    if stack.compute_dtype != np.float32:
        expected = "tables of float32 or bfloat16 with exchange_dtype='bfloat16'"
        got, remedy = f"table {name!r} of {stack.dtype}", "leave exchange_dtype out"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    # Without accumulation there are no partial sums: each occurrence is applied by itself.
    if stack.optimizer is not None and not stack.optimizer.use_gradient_accumulation:
        expected = "optimizers that accumulate gradients with exchange_dtype='bfloat16'"
        got = f"use_gradient_accumulation=False for table {name!r}"
        remedy = "leave exchange_dtype out, or accumulate"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return dataclasses.replace(stack, exchange_dtype="bfloat16")


def sent_rows_format(stack: Stack) -> RowFormat:
    """Return the format in which rows are sent between devices."""
    return _format(stack, stack.exchange_dtype or stack.dtype)


def sent_sums_format(stack: Stack) -> RowFormat:
    """Return the format in which partial sums of the rows' gradients are sent."""
    return _format(stack, stack.exchange_dtype or stack.compute_dtype)


def _format(stack: Stack, dtype: str | np.dtype) -> RowFormat:
    return RowFormat((stack.dim,), jnp.dtype(dtype), stack.packing)
