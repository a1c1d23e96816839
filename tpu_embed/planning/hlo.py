"""Read a compiled program's text: which operations it has, and how many bytes they move.

Enters: optimised HLO text. Leaves: counts and bytes by operation. Called by `compiled.py`.

What is moved follows the rows that an operation touches, never its whole table: the compiler's own
"bytes accessed" counts a table as often as something indexes it.
"""

from __future__ import annotations

import collections
import re
from typing import NamedTuple

__all__ = ["COLLECTIVES", "Instruction", "instructions", "moved"]

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_MOVING = ("gather", "scatter", "sort", "copy", "dynamic-update-slice")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0, "opaque": 0}

_LINE = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      opcode: `gather`, `all-to-all-start`, …
      result: bytes of its result.
      operands: bytes of each operand.
    """

    opcode: str
    result: int
    operands: tuple[int, ...]


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of all computations, those inside fusions too.

    Args:
      text: `compiled.as_text()`.

    Example:
      >>> text = '''
      ...   %t = f32[100,8]{1,0} parameter(0)
      ...   %i = s32[5,1]{1,0} parameter(1)
      ...   ROOT %g = f32[5,8]{1,0} gather(%t, %i), offset_dims={1}
      ... '''
      >>> instructions(text)[-1]
      Instruction(opcode='gather', result=160, operands=(3200, 20))
    """
    sizes: dict[str, int] = {}
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        size = _bytes(match["type"])
        sizes[match["name"]] = size
        operands = _OPERAND.findall(match["rest"].split(")", 1)[0])
        known = tuple(sizes.get(name, 0) for name in operands)
        found.append(Instruction(match["opcode"], size, known))
    return found


def moved(text: str) -> dict[str, int]:
    """Return the bytes that a program moves in memory and between devices, by operation.

    A gather reads and writes its result; a scatter or a slice written in place reads the update and
    writes it; a sort, a copy and a collective read and write what they are given. What is in a loop
    counts once.

    Args:
      text: `compiled.as_text()`.
    """
    total: collections.Counter[str] = collections.Counter()
    for one in instructions(text):
        opcode = one.opcode.removesuffix("-start")
        if opcode in ("scatter", "dynamic-update-slice"):
            total[opcode] += 2 * sum(one.operands[1:])
        elif opcode in ("sort", *COLLECTIVES):
            total[opcode] += 2 * sum(one.operands)
        elif opcode in _MOVING:
            total[opcode] += 2 * one.result
    return dict(total)


def _bytes(kind: str) -> int:
    """Return the bytes of a type, all parts of a tuple together."""
    total = 0
    for match in _SHAPE.finditer(kind):
        bits = _BITS.get(match["dtype"]) or int(
            re.sub(r"\D", "", match["dtype"].split("e")[0]) or 0
        )
        count = 1
        for size in filter(None, match["sizes"].split(",")):
            count *= int(size)
        total += -(-count * bits // 8)
    return total
