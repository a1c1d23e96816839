"""Print a plan for people: a list of tables, costs per device, and bars of memory use.

Input: a `Plan`. Output: text.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tpu_embed.planning.costs import readable

_WIDTH, _BAR = 120, 40


def explained(plan: Any) -> str:
    """Return the plan as text.

    Args:
      plan: a `Plan`.
    """
    out = io.StringIO()
    # Plain text, also in a notebook, that takes no name for markup.
    plain: Any = dict.fromkeys(
        ("highlight", "markup", "emoji", "force_terminal"), False
    )
    console = Console(
        file=out, width=_WIDTH, color_system=None, force_jupyter=False, **plain
    )
    for part in (*_summary(plan), _parts(plan), _tables(plan)):
        console.print(part)
    if any(one.host for one in plan.tables):
        console.print(_host_tables(plan))
    return out.getvalue()


def _summary(plan: Any) -> Iterator[str]:
    """Yield whether it fits, a bar of memory use, and what is on each host."""
    yield (
        f"{plan.target}: {plan.devices} device(s), global batch {plan.batch:,}, "
        f"{len(plan.tables)} table(s) in {plan.stacks} stack(s)\n"
    )
    needed = readable(plan.bytes_per_device)
    if plan.memory is None:
        yield f"{needed} a device, whose memory is not known"
    else:
        word = "fits" if plan.fits else "does NOT fit"
        verdict = f"{word}: {needed} of {readable(plan.memory)} a device"
        yield "\n  ".join([verdict, *plan.remedies])
    # 40 characters stand for the memory of a device: used all the time, during a step, free.
    whole = plan.memory or plan.bytes_per_device or 1
    held = min(_BAR, round(_BAR * sum(plan.held.values()) / whole))
    more = min(_BAR, round(_BAR * plan.bytes_per_device / whole)) - held
    bar = "█" * held + "▒" * more + "·" * (_BAR - held - more)
    yield "█ tables and slots  ▒ during a step  · free"
    many = f"{plan.devices:,} devices, each" if plan.devices > 1 else "1 device"
    yield f"{many} {bar} {needed}"
    if plan.host_bytes:
        parts = ", ".join(
            f"{readable(size)} {what}" for what, size in plan.on_host.items() if size
        )
        what = (
            "maps of dynamic vocabularies" if plan.on_host.keys() == {"maps"} else parts
        )
        yield f"{readable(plan.host_bytes)} on each host: {what}"
    if plan.file_bytes:
        yield f"{readable(plan.file_bytes)} in files of each host: rows at home"
    if plan.missed is not None:
        came, left = readable(plan.missed["in"]), readable(plan.missed["out"])
        yield f"misses, each step and host: {came} to its devices, {left} home"
    if unknown := [
        one.name for one in plan.tables if one.host and one.host.hit_rate is None
    ]:
        remedy = "give their hit_rates, or count_hits of a sample"
        yield f"misses of {', '.join(unknown)} are not counted: {remedy}"
    for one in plan.tables if plan.lookahead else ():
        held = one.host.device_rows if one.host else one.vocabulary_size
        if (one.lookahead_rows or 0) > held:
            rows = f"{one.lookahead_rows:_}"
            then = f"the other keys are unseen; a capacity of {rows} has room for all"
            if one.host:
                then = "batches that share too few are refused; "
                then += f"HostStorage(device_rows={rows}) has room for all"
            what = f"{one.name}: {plan.lookahead + 1} batches may have {one.lookahead_rows:,} rows"
            yield f"{what}, and {held:,} have room: {then}"


def _columns(words: Sequence[str], figures: Sequence[str]) -> Table:
    """Return a table without rows."""
    table = Table(box=None, pad_edge=False)
    for name in words:
        table.add_column(f"\n{name}", overflow="fold")
    for name in figures:
        table.add_column(f"\n{name}", justify="right", no_wrap=True)
    return table


def _parts(plan: Any) -> Table:
    """Return the costs of a device, in all and by what they are for, those of most bytes first."""
    costs = {"holds or needs": plan.held | plan.passing, "tile padding": plan.wasted}
    costs |= {"sends a step": plan.sent, "moves a step": plan.moved}
    if not any(plan.wasted.values()):
        del costs["tile padding"]
    table, columns = _columns(["a device"], [*costs]), list(costs.values())
    most = {
        name: max(column.get(name, 0) for column in columns)
        for c in columns
        for name in c
    }
    table.add_row("all", *(readable(sum(column.values())) for column in columns))
    for name in sorted(most, key=lambda name: -most[name]):
        figures = [
            readable(column[name]) if name in column else "" for column in columns
        ]
        table.add_row(name, *figures)
    return table


def _tables(plan: Any) -> Table:
    """Return all tables together, then each, those of most bytes first."""
    sizes = {"table": "table_bytes", "slots": "slot_bytes"}
    if any(plan.wasted.values()):
        sizes["tile padding"] = "wasted_bytes"
    counts = {
        "rows": "vocabulary_size",
        "dim": "dim",
        "rows/device": "rows",
        "padding": "padding",
    }
    table = _columns(("table", "dtype", "placement", "why"), [*counts, *sizes])

    def figures(tables):
        return [
            readable(sum(getattr(one, f) for one in tables)) for f in sizes.values()
        ]

    whole = {f: f"{sum(getattr(t, f) for t in plan.tables):,}" for f in counts.values()}
    whole["dim"] = ""
    table.add_row("all", "", "", "", *whole.values(), *figures(plan.tables))
    alike: dict[Any, list[Any]] = {}  # tables that differ in nothing but their names
    for one in sorted(plan.tables, key=lambda one: -one.table_bytes - one.slot_bytes):
        alike.setdefault(dataclasses.replace(one, name=""), []).append(one)
    for one, *others in alike.values():
        name = f"{one.name} and {len(others)} like it" if others else one.name
        own = (f"{getattr(one, field):,}" for field in counts.values())
        words = one.dtype, one.placement, one.why
        table.add_row(name, *words, *own, *figures([one, *others]))
    return table


def _host_tables(plan: Any) -> Table:
    """Return what each table on the host has there, and what it moves in a step."""
    heads = (
        "on devices",
        "touched",
        "a row",
        "at home",
        "a batch",
        "hits",
        "in",
        "out",
    )
    table = _columns(["on the host"], heads)
    for one in plan.tables:
        host = one.host
        if host is not None:
            table.add_row(
                f"{one.name} ({host.evict})",
                f"{host.device_rows:,}",
                f"{host.touched_rows:,}",
                readable(host.row_bytes),
                readable(host.row_store_bytes + host.index_bytes),
                f"{host.batch_rows:,}",
                "?" if host.hit_rate is None else f"{host.hit_rate:.1%}",
                *(
                    "?" if n is None else readable(n)
                    for n in (host.bytes_in, host.bytes_out)
                ),
            )
    return table
