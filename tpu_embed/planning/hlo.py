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

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
READING = ("gather",)
WRITING = ("scatter", "dynamic-update-slice")
SLICING = ("slice", "dynamic-slice")
FILLING = ("broadcast", "iota")
COPYING = ("concatenate", "pad", "reshape", "transpose")
"""Operations that XLA's TPU compiler leaves unfused now and then; a `reshape` that moves nothing is
a `bitcast` there."""
VIEWS = ("bitcast", "get-tuple-element")
"""Operations that have no memory of their own."""
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
_ACCESSED = re.compile(r'"bytes_accessed":"?(\d+)')


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
      on_chip: whether its result (of a tuple, some part) is in a core's own memory.
      stored: bytes of its result that are in the device's memory, if it is not inside a fusion.
      is_kernel: whether it is a Pallas kernel.
      accessed: the bytes that the kernel says it reads and writes; None if it says nothing.
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
    stored: int
    is_kernel: bool
    accessed: int | None


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
        self._inside: dict[str, list[Instruction]] = collections.defaultdict(list)
        for one in self.instructions.values():
            self._inside[one.computation].append(one)

    def in_memory(self, one: Instruction) -> bool:
        """Return whether the result of an instruction is ever in memory.

        Inside a fusion only the root is, and a parameter whose argument is.
        """
        caller = self._callers.get(one.computation)
        if caller is None:
            return not one.on_chip
        if one.opcode == "parameter":
            return self.in_memory(self.instructions[caller.operands[one.number]])
        return one.root and self.in_memory(caller)

    def is_fused(self, one: Instruction) -> bool:
        """Return whether an instruction is inside a fusion."""
        return one.computation in self._callers

    def passed(self, fusion: Instruction) -> int:
        """Return the bytes that a fusion reads and writes besides its gathers and scatters.

        An operand of which only slices are taken counts as much as the slices.
        """
        inside = self._inside[fusion.fusion]
        total = sum(self._read_of(one) for one in inside if one.opcode == "parameter")
        root = next(one for one in inside if one.root)
        results = [self.instructions[name] for name in root.operands]
        parts = results if root.opcode == "tuple" else [root]
        # Rows that the fusion gathers or scatters are counted where these operations are.
        indexed = sum(self._origin(one).opcode in (*READING, *WRITING) for one in parts)
        return total + fusion.stored * (len(parts) - indexed) // len(parts)

    def _read_of(self, value: Instruction) -> int:
        """Return the bytes that a fusion reads of one of its parameters, or of a view of it."""
        if value.opcode == "parameter" and not self.in_memory(value):
            return 0
        users = [one for one in self._inside[value.computation] if value.name in one.operands]
        # What is passed on to a view, or to a fusion inside this one, is read there.
        passed = [one for one in users if one.opcode in VIEWS] + [
            self._parameter(one, number)
            for one in users
            if one.opcode == "fusion"
            for number, name in enumerate(one.operands)
            if name == value.name
        ]
        users = [one for one in users if one.opcode not in (*VIEWS, "fusion")]
        if not passed and all(self._indexes(user, value) for user in users):
            return 0
        direct = value.size if users else 0
        if all(user.opcode in SLICING for user in users):
            direct = sum(user.size for user in users)
        return min(value.size, direct + sum(self._read_of(one) for one in passed))

    def _parameter(self, fusion: Instruction, number: int) -> Instruction:
        """Return a parameter of the computation that a fusion calls."""
        inside = self._inside[fusion.fusion]
        return next(one for one in inside if one.number == number)

    def _indexes(self, user: Instruction, operand: Instruction) -> bool:
        """Return whether an operation only touches those rows of an operand that it counts."""
        first = user.operands[0] == operand.name
        return user.opcode in WRITING or (user.opcode in READING and first)

    def _origin(self, one: Instruction) -> Instruction:
        """Return the instruction of which a result is a view."""
        while one.opcode in VIEWS or one.opcode == "fusion":
            inside = self._inside[one.fusion]
            roots = [part for part in inside if part.root]
            one = roots[0] if roots else self.instructions[one.operands[0]]
        return one

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
            stored=_stored(match["type"]),
            is_kernel=kernel,
            accessed=_accessed(line) if kernel else None,
        )


def _stored(kind: str) -> int:
    """Return the bytes of those parts of a type that are in the device's memory."""
    parts = re.findall(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", kind)
    return sum(_bytes(part) for part in parts if not _ON_CHIP.search(part))


def _accessed(line: str) -> int | None:
    """Return the bytes that a Pallas kernel says it reads and writes, if it does."""
    found = _ACCESSED.search(line)
    return int(found[1]) if found else None


def moved(program: Program) -> dict[str, int]:
    """Return the bytes that a program moves in memory and between devices, by operation.

    A gather reads and writes as many bytes as its result has. A scatter or an in-place slice reads
    and writes its update. A sort, a copy and a collective read and write their operands; a copy
    into a core's own memory only reads. A fill with a number writes its result; other operations
    that rearrange numbers outside of fusions read their operands and write their results. A Pallas
    kernel reads and writes what it says in its cost estimate; one that says nothing, its operands
    and results. A fusion reads its other operands and writes its other results, as far as they are
    in memory. The body of a loop counts once.

    Args:
      program: the program.
    """
    total: collections.Counter[str] = collections.Counter()
    for one in program.instructions.values():
        opcode = one.opcode.removesuffix("-start")
        if one.is_kernel:
            total[opcode] += _all_of(program, one) if one.accessed is None else one.accessed
        elif opcode in READING:
            total[opcode] += one.size * (1 + program.in_memory(one))
        elif opcode in WRITING:
            written = sum(program.instructions[name].size for name in one.operands[1:])
            total[opcode] += written + program.loaded(one, slice(1, None))
        elif opcode == "fusion" and not program.is_fused(one):
            total[opcode] += program.passed(one)
        elif opcode == "copy" and not program.is_fused(one):
            total[opcode] += program.loaded(one, slice(None)) * (1 if one.on_chip else 2)
        elif opcode in FILLING and not program.is_fused(one):
            total[opcode] += one.stored
        elif opcode in COPYING and not program.is_fused(one):
            total[opcode] += _all_of(program, one)
        elif opcode in ("sort", *COLLECTIVES):
            total[opcode] += 2 * program.loaded(one, slice(None))
    return dict(total)


def _all_of(program: Program, one: Instruction) -> int:
    """Return the bytes of the operands and results of an instruction that are in memory."""
    return program.loaded(one, slice(None)) + one.stored


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
