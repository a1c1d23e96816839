"""Read a compiled program's text: which operations it has, and how many bytes they move.

Enters: optimised HLO text. Leaves: counts and bytes by operation. Called by `compiled.py`.

What is moved follows the rows that an operation touches, never its whole table: the compiler's own
"bytes accessed" counts a table as often as something indexes it. What passes from one operation to
the next inside a fusion never is in memory, and is not counted.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["COLLECTIVES", "Instruction", "Program", "moved"]

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
READING = ("gather", "gather_rows")
WRITING = ("scatter", "dynamic-update-slice", "set_rows")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "token": 0, "opaque": 0}

_LINE = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) "
    r"(?P<opcode>[\w\-]+)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_ON_CHIP = re.compile(r"S\([1-9]")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      name: unique in the program.
      opcode: `gather`, `all-to-all-start`, …; of a Pallas kernel, its name.
      size: bytes of its result.
      operands: names of instructions.
      computation: the one it is in.
      root: whether its result is that of its computation.
      fusion: the computation that it calls as a fusion, or "".
      number: of a parameter.
      on_chip: whether its result is in a core's own memory.
    """

    name: str
    opcode: str
    size: int
    operands: tuple[str, ...]
    computation: str
    root: bool
    fusion: str
    number: int
    on_chip: bool


class Program:
    """A program's instructions, those inside fusions too.

    Args:
      text: `compiled.as_text()`.

    Example:
      >>> text = '''
      ... ENTRY %main (t: f32[100,8], i: s32[5,1]) -> f32[5,8] {
      ...   %t = f32[100,8]{1,0} parameter(0)
      ...   %i = s32[5,1]{1,0} parameter(1)
      ...   ROOT %g = f32[5,8]{1,0} gather(%t, %i), offset_dims={1}
      ... }'''
      >>> moved(Program(text))
      {'gather': 320}
    """

    def __init__(self, text: str) -> None:
        self.instructions = {one.name: one for one in _read(text)}
        self._callers = {one.fusion: one for one in self.instructions.values() if one.fusion}

    def in_memory(self, one: Instruction) -> bool:
        """Tell whether the result of an instruction is ever in memory."""
        caller = self._callers.get(one.computation)
        if caller is None:
            return True
        if one.opcode == "parameter":
            return self.in_memory(self.instructions[caller.operands[one.number]])
        return one.root and self.in_memory(caller)

    def loaded(self, one: Instruction, operands: slice) -> int:
        """Return the bytes of some operands that come from memory."""
        known = [self.instructions.get(name) for name in one.operands[operands]]
        return sum(operand.size for operand in known if operand and self.in_memory(operand))


def _read(text: str) -> Iterator[Instruction]:
    computation = ""
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            head = _COMPUTATION.match(line)
            computation = head["name"] if head else computation
            continue
        kernel = 'custom_call_target="tpu_custom_call"' in line
        arguments, rest = match["rest"].split(")", 1)
        calls = _CALLS.search(rest) if match["opcode"] == "fusion" else None
        yield Instruction(
            name=match["name"],
            opcode=match["name"].split(".")[0] if kernel else match["opcode"],
            size=_bytes(match["type"]),
            operands=tuple(_OPERAND.findall(arguments)),
            computation=computation,
            root=bool(match["root"]),
            fusion=calls[1] if calls else "",
            number=int(arguments) if match["opcode"] == "parameter" else -1,
            on_chip=bool(_ON_CHIP.search(match["type"])),
        )


def moved(program: Program) -> dict[str, int]:
    """Return the bytes that a program moves in memory and between devices, by operation.

    A gather reads and writes its result; a scatter or a slice written in place reads the update and
    writes it; a sort, a copy and a collective read and write what they are given; a copy into a
    core's own memory only reads. `gather_rows` and `set_rows`, the SparseCores' kernels, are a
    gather and a scatter. What is in a loop counts once.

    Args:
      program: the program.
    """
    total: collections.Counter[str] = collections.Counter()
    for one in program.instructions.values():
        opcode = one.opcode.removesuffix("-start")
        if opcode in READING:
            total[opcode] += one.size * (1 + program.in_memory(one))
        elif opcode in WRITING:
            written = sum(program.instructions[name].size for name in one.operands[1:])
            total[opcode] += written + program.loaded(one, slice(1, None))
        elif opcode == "copy":
            total[opcode] += program.loaded(one, slice(None)) * (1 if one.on_chip else 2)
        elif opcode in ("sort", *COLLECTIVES):
            total[opcode] += 2 * program.loaded(one, slice(None))
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
