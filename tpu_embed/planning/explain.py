"""Print a plan for people: a list of tables, costs per device, and bars of memory use.

Input: a `Plan`. Output: text.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tpu_embed.planning.costs import readable

_WIDTH, _BAR = 120, 40
_WORDS = ("table", "dtype", "placement", "why")
_FIGURES = ("rows", "dim", "rows/device", "padding")
_AT_HOME = ("on devices", "touched", "a row", "at home", "a batch", "hits", "in", "out")
_SIZES = (("table", "table_bytes"), ("slots", "slot_bytes"))
_WASTED = (("tile padding", "wasted_bytes"),)
"""Columns of bytes, and the fields of `TablePlan` that they show."""


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
    console.print(_verdict(plan))
    _print_bars(plan, console)
    console.print(_parts(plan))
    console.print(_tables(plan))
    if any(one.host for one in plan.tables):
        console.print(_host_tables(plan))
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
    """Return all tables together, then each, those of most bytes first."""
    table = Table(box=None, pad_edge=False)
    for name in _WORDS:
        table.add_column(f"\n{name}", overflow="fold")
    sizes = (*_SIZES, *_WASTED) if any(plan.wasted.values()) else _SIZES
    for name in (*_FIGURES, *(name for name, _ in sizes)):
        table.add_column(f"\n{name}", justify="right", no_wrap=True)
    rows = sum(one.vocabulary_size for one in plan.tables)
    everywhere, padding = (
        sum(getattr(t, name) for t in plan.tables) for name in ("rows", "padding")
    )
    counts = f"{rows:,}", "", f"{everywhere:,}", f"{padding:,}"
    table.add_row("all", "", "", "", *counts, *_sizes(sizes, *plan.tables))
    for alike in _alike(plan.tables):
        one, others = alike[0], len(alike) - 1
        name = f"{one.name} and {others} like it" if others else one.name
        counts = (one.vocabulary_size, one.dim, one.rows, one.padding)
        words = (name, one.dtype, one.placement, one.why)
        table.add_row(*words, *(f"{n:,}" for n in counts), *_sizes(sizes, *alike))
    return table


def _alike(tables: Sequence[Any]) -> list[list[Any]]:
    """Return tables that differ in nothing but their names together, those of most bytes first."""
    found: dict[Any, list[Any]] = {}
    for one in sorted(tables, key=lambda one: -one.table_bytes - one.slot_bytes):
        found.setdefault(dataclasses.replace(one, name=""), []).append(one)
    return list(found.values())


def _sizes(columns: Sequence[tuple[str, str]], *tables: Any) -> list[str]:
    """Return the bytes of tables by column, readable."""
    return [readable(sum(getattr(one, field) for one in tables)) for _, field in columns]


def _parts(plan: Any) -> Table:
    """Return the costs of a device, in all and by what they are for, those of most bytes first."""
    table = Table(box=None, pad_edge=False)
    costs = {"holds or needs": plan.held | plan.passing, "tile padding": plan.wasted}
    costs |= {"sends a step": plan.sent, "moves a step": plan.moved}
    if not any(plan.wasted.values()):
        del costs["tile padding"]
    table.add_column("\na device")
    for name in costs:
        table.add_column(f"\n{name}", justify="right")
    columns = list(costs.values())
    most = {name: max(column.get(name, 0) for column in columns) for c in columns for name in c}
    table.add_row("all", *(readable(sum(column.values())) for column in columns))
    for name in sorted(most, key=lambda name: -most[name]):
        figures = [readable(column[name]) if name in column else "" for column in columns]
        table.add_row(name, *figures)
    return table


def _print_bars(plan: Any, console: Console) -> None:
    whole = plan.memory or plan.bytes_per_device or 1
    held = min(_BAR, round(_BAR * sum(plan.held.values()) / whole))
    more = min(_BAR, round(_BAR * plan.bytes_per_device / whole)) - held
    # 40 characters stand for the memory of a device: used all the time, during a step, free.
    bar = "█" * held + "▒" * more + "·" * (_BAR - held - more)
    console.print("█ tables and slots  ▒ during a step  · free")
    many = f"{plan.devices:,} devices, each" if plan.devices > 1 else "1 device"
    console.print(f"{many} {bar} {readable(plan.bytes_per_device)}")
    if plan.host_bytes:
        console.print(f"{readable(plan.host_bytes)} on each host: {_on_host(plan)}")
    if plan.file_bytes:
        console.print(f"{readable(plan.file_bytes)} in files of each host: rows at home")
    if any(one.host for one in plan.tables):
        console.print(_misses(plan))
    for one in plan.tables:
        if plan.lookahead and one.lookahead_rows is not None:
            _print_room(plan, one, console)


def _print_room(plan: Any, table: Any, console: Console) -> None:
    """Print what to do if the batches of a lookahead may have more rows than have room."""
    held = table.vocabulary_size if table.host is None else table.host.device_rows
    if table.lookahead_rows > held:
        rows = f"{table.lookahead_rows:_}"
        if table.host is None:
            then = f"the other keys are unseen; a capacity of {rows} has room for all"
        else:
            then = "batches that share too few are refused; "
            then += f"HostStorage(device_rows={rows}) has room for all"
        what = f"{table.name}: {plan.lookahead + 1} batches may have {table.lookahead_rows:,} rows"
        console.print(f"{what}, and {held:,} have room: {then}")


def _on_host(plan: Any) -> str:
    """Return what each host's memory is for."""
    if plan.on_host.keys() == {"maps"}:
        return "maps of living vocabularies"
    return ", ".join(f"{readable(size)} {what}" for what, size in plan.on_host.items() if size)


def _misses(plan: Any) -> str:
    """Return what moves in a step because it is not on the devices, as far as it is known."""
    unknown = [one.name for one in plan.tables if one.host and one.host.hit_rate is None]
    counted = ""
    if plan.missed is not None:
        sizes = (readable(plan.missed[way]) for way in ("in", "out"))
        counted = "misses, each step and host: {} to its devices, {} home".format(*sizes)
    if not unknown:
        return counted
    names = f" of {', '.join(unknown)}" if counted else ""
    remedy = "give their hit_rates, or count_hits of a sample"
    return f"{counted}{'; ' if counted else ''}misses{names} are not counted: {remedy}"


def _host_tables(plan: Any) -> Table:
    """Return what each table on the host has there, and what it moves in a step."""
    table = Table(box=None, pad_edge=False)
    table.add_column("\non the host", overflow="fold")
    for name in _AT_HOME:
        table.add_column(f"\n{name}", justify="right", no_wrap=True)
    for one in plan.tables:
        host = one.host
        if host is not None:
            known = "?" if host.hit_rate is None else f"{host.hit_rate:.1%}"
            moved = ("?" if n is None else readable(n) for n in (host.bytes_in, host.bytes_out))
            at_home = readable(host.row_store_bytes + host.index_bytes)
            counts = (host.device_rows, host.touched_rows)
            figures = (*(f"{n:,}" for n in counts), readable(host.row_bytes), at_home)
            more = (f"{host.batch_rows:,}", known, *moved)
            table.add_row(f"{one.name} ({host.evict})", *figures, *more)
    return table


def _verdict(plan: Any) -> str:
    if plan.memory is None:
        return f"{readable(plan.bytes_per_device)} a device, whose memory is not known"
    word = "fits" if plan.fits else "does NOT fit"
    verdict = f"{word}: {readable(plan.bytes_per_device)} of {readable(plan.memory)} a device"
    return "\n  ".join([verdict, *plan.remedies])
