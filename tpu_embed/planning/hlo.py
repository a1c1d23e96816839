"""Read the text of a compiled program: which operations it has, and how many bytes they move.

Bytes are counted for the rows that an operation touches, not for its whole table. (The compiler's
own "bytes accessed" counts the whole table every time something indexes it.) Values passed between
operations inside a fusion are never in memory, so they are not counted.

Input: optimised HLO text. Output: counts and bytes by operation.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["COLLECTIVES", "Instruction", "Program", "moved"]

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
READING = ("gather", "gather_rows")
SUMMING = "gather_sum"
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
      name: its name, unique in the program.
      opcode: `gather`, `all-to-all-start`, …; for a Pallas kernel, the name of the kernel.
      size: bytes of its result.
      operands: the names of the instructions that it reads.
      computation: the computation that contains it.
      root: whether its result is the result of that computation.
      fusion: the computation that it calls as a fusion, or "".
      number: the number of a parameter; -1 for other instructions.
      on_chip: whether its result is in a core's own memory.
      length: the length of its result's first axis; 1 for a single number, 0 for a tuple.
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
    length: int


class Program:
    """The instructions of a program, including those inside fusions.

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
        """Return whether the result of an instruction is ever in memory.

        Inside a fusion only the root is, and a parameter whose argument is.
        """
        caller = self._callers.get(one.computation)
        if caller is None:
            return True
        if one.opcode == "parameter":
            return self.in_memory(self.instructions[caller.operands[one.number]])
        return one.root and self.in_memory(caller)

    def loaded(self, one: Instruction, operands: slice) -> int:
        """Return the bytes of those of some operands that are read from memory."""
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
        # `%gather_rows.3 = … custom-call(…), custom_call_target="tpu_custom_call"` is a Pallas
        # kernel: its opcode here is gather_rows.
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
            length=_length(match["type"]),
        )


def moved(program: Program) -> dict[str, int]:
    """Return the bytes that a program moves in memory and between devices, by operation.

    A gather reads and writes as many bytes as its result has. A scatter or an in-place slice reads
    and writes its update. A sort, a copy and a collective read and write their operands; a copy
    into a core's own memory only reads. The SparseCore kernels `gather_rows` and `set_rows` count
    as a gather and a scatter; `gather_sum` reads a row per entry, the entries, and writes the sums.
    The body of a loop counts once.

    Args:
      program: the program.
    """
    total: collections.Counter[str] = collections.Counter()
    for one in program.instructions.values():
        opcode = one.opcode.removesuffix("-start")
        if opcode in READING:
            total[opcode] += one.size * (1 + program.in_memory(one))
        elif opcode == SUMMING:
            # Of the operands (source, bounds, row numbers, segments, …, sums) of the kernel.
            source, _, numbers, *rest = (program.instructions[name] for name in one.operands)
            entries = numbers.size + sum(operand.size for operand in rest[:-1])
            total[opcode] += numbers.length * (source.size // source.length) + entries + one.size
        elif opcode in WRITING:
            written = sum(program.instructions[name].size for name in one.operands[1:])
            total[opcode] += written + program.loaded(one, slice(1, None))
        elif opcode == "copy":
            total[opcode] += program.loaded(one, slice(None)) * (1 if one.on_chip else 2)
        elif opcode in ("sort", *COLLECTIVES):
            total[opcode] += 2 * program.loaded(one, slice(None))
    return dict(total)


def _length(kind: str) -> int:
    """Return the length of the first axis of a type; 1 if it has none, 0 for a tuple."""
    shape = None if kind.startswith("(") else _SHAPE.match(kind)
    return 0 if shape is None else int(shape["sizes"].partition(",")[0] or 1)


def _bytes(kind: str) -> int:
    """Return the bytes of a type such as `f32[5,8]{1,0}`; of a tuple, those of all its parts."""
    total = 0
    for match in _SHAPE.finditer(kind):
        # The digits of a dtype are its bits: f32, s8; f8e4m3 only up to the "e".
        bits = _BITS.get(match["dtype"]) or int(
            re.sub(r"\D", "", match["dtype"].split("e")[0]) or 0
        )
        count = 1
        for size in filter(None, match["sizes"].split(",")):
            count *= int(size)
        total += -(-count * bits // 8)
    return total
