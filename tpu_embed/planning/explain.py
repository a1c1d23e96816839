"""Print a plan for people: a list of tables, costs per device, and bars of memory use.

Input: a `Plan`. Output: text.
"""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from tpu_embed.planning.sizes import readable

__all__ = ["explained"]

_WIDTH, _BAR, _DEVICES = 120, 40, 8
_WORDS = ("table", "dtype", "placement", "why")
_FIGURES = ("rows", "dim", "rows/device", "padding", "table", "slots")


def explained(plan: Any) -> str:
    """Return the plan as text.

    Args:
      plan: a `Plan`.
    """
    console = _console()
    console.print(
        f"{plan.target}: {plan.devices} device(s), global batch {plan.batch:,}, "
        f"{len(plan.tables)} table(s) in {plan.stacks} stack(s)\n"
    )
    console.print(_tables(plan))
    console.print(_parts(plan))
    _print_bars(plan, console)
    console.print(_verdict(plan))
    return console.file.getvalue()  # type: ignore[attr-defined]


def _console() -> Console:
    """Return a console that writes plain text, also in a notebook, and takes no name for markup."""
    return Console(
        file=io.StringIO(),
        width=_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
    )


def _tables(plan: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in _WORDS:
        table.add_column(name, overflow="fold")
    for name in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    for one in plan.tables:
        words = (one.name, one.dtype, one.placement, one.why)
        counts = (one.vocabulary_size, one.dim, one.rows, one.padding)
        sizes = (one.table_bytes, one.slot_bytes)
        table.add_row(*words, *(f"{n:,}" for n in counts), *map(readable, sizes))
    return table


def _parts(plan: Any) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("\na device", "\nholds or needs", "\nsends a step", "\nmoves a step"):
        table.add_column(name, justify="left" if "device" in name else "right")
    columns = (plan.held | plan.passing, plan.sent, plan.moved)
    for name in dict.fromkeys(name for column in columns for name in column):
        figures = [readable(column[name]) if name in column else "" for column in columns]
        table.add_row(name, *figures)
    table.add_row("all", *(readable(sum(column.values())) for column in columns))
    return table


def _print_bars(plan: Any, console: Console) -> None:
    whole = plan.memory or plan.bytes_per_device or 1
    held = min(_BAR, round(_BAR * sum(plan.held.values()) / whole))
    more = min(_BAR, round(_BAR * plan.bytes_per_device / whole)) - held
    # 40 characters stand for the memory of a device: used all the time, during a step, free.
    bar = "█" * held + "▒" * more + "·" * (_BAR - held - more)
    console.print("\n█ tables and slots  ▒ during a step  · free")
    for device in range(min(plan.devices, _DEVICES)):
        console.print(f"device {device:<4d} {bar} {readable(plan.bytes_per_device)}")
    if plan.devices > _DEVICES:
        console.print(f"… and {plan.devices - _DEVICES} more like them")


def _verdict(plan: Any) -> str:
    if plan.memory is None:
        return "\nmemory of a device: not known"
    word = "fits" if plan.fits else "does NOT fit"
    return f"\n{word}: {readable(plan.bytes_per_device)} of {readable(plan.memory)} a device"
