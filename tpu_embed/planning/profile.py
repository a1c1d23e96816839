"""What a compiled step costs: the bytes that it moves, and the cycles of its operations.

Bytes are read from the text of the program, for the rows that an operation touches and not for its
whole table. (The compiler's own "bytes accessed" counts the whole table every time something
indexes it.) Values passed between operations inside a fusion are never in memory, so they are not
counted.

Cycles are what libtpu's compiler expects of every operation on a TensorCore, gathers, scatters and
sorts included. Waits for memory, for other chips and for SparseCores are not among them: they say
which operations a step is made of, and never how long it takes. libtpu writes them while it
compiles, if flags that it reads when it is loaded ask for it, and it may abort afterwards. So a
process of its own compiles the step for them, and what it had written counts.

Input: optimised HLO text; a command that compiles the same step. Output: bytes by operation;
operations with cycles.
"""

from __future__ import annotations

import collections
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_embed._checks import refuse

COLLECTIVES = (
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)
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
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\](?P<layout>\{[^}]*\})?")
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
      stored: bytes of its result that are in the device's memory, not in that of a core, if it is
        not inside a fusion.
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
        self._callers = {
            one.fusion: one for one in self.instructions.values() if one.fusion
        }
        self._inside: dict[str, list[Instruction]] = collections.defaultdict(list)
        for one in self.instructions.values():
            self._inside[one.computation].append(one)

    def in_memory(self, one: Instruction) -> bool:
        """Return whether the result of an instruction is ever in memory.

        Inside a fusion only the root is, and a parameter whose argument is.
        """
        caller = self._callers.get(one.computation)
        if caller is None:
            return one.stored == one.size
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
        indexed = sum(self._origin(one).opcode in ("gather", *WRITING) for one in parts)
        return total + fusion.stored * (len(parts) - indexed) // len(parts)

    def _read_of(self, value: Instruction) -> int:
        """Return the bytes that a fusion reads of one of its parameters, or of a view of it."""
        if value.opcode == "parameter" and not self.in_memory(value):
            return 0
        users = [
            one for one in self._inside[value.computation] if value.name in one.operands
        ]
        # What is passed on to a view, or to a fusion inside this one, is read there.
        passed = [one for one in users if one.opcode in VIEWS]
        for user in users:
            inside = self._inside[user.fusion] if user.fusion else ()
            own = [one for one in inside if one.opcode == "parameter"]
            passed += [one for one in own if user.operands[one.number] == value.name]
        users = [one for one in users if one.opcode not in (*VIEWS, "fusion")]
        # Those that only touch rows which are counted where they are gathered or scattered.
        indexing = (
            one.opcode in WRITING
            or (one.opcode == "gather" and one.operands[0] == value.name)
            for one in users
        )
        if not passed and all(indexing):
            return 0
        direct = value.size if users else 0
        if all(user.opcode in SLICING for user in users):
            direct = sum(user.size for user in users)
        return min(value.size, direct + sum(self._read_of(one) for one in passed))

    def _origin(self, one: Instruction) -> Instruction:
        """Return the instruction of which a result is a view."""
        while one.opcode in VIEWS or one.opcode == "fusion":
            inside = self._inside[one.fusion]
            roots = [part for part in inside if part.root]
            one = roots[0] if roots else self.instructions[one.operands[0]]
        return one

    def loaded(self, names: Sequence[str]) -> int:
        """Return the bytes of those of some operands that are read from memory."""
        known = map(self.instructions.get, names)
        return sum(one.size for one in known if one is not None and self.in_memory(one))


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
        accessed = _ACCESSED.search(line) if kernel else None
        shapes = list(_SHAPE.finditer(match["type"]))
        yield Instruction(
            name=match["name"],
            opcode=match["name"].split(".")[0] if kernel else match["opcode"],
            size=_bytes(shapes),
            operands=tuple(_OPERAND.findall(arguments)),
            computation=computation,
            root=bool(match["root"]),
            fusion=calls[1] if calls else "",
            number=int(arguments) if match["opcode"] == "parameter" else -1,
            stored=_bytes(
                one for one in shapes if not _ON_CHIP.search(one["layout"] or "")
            ),
            is_kernel=kernel,
            accessed=int(accessed[1]) if accessed else None,
        )


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
        opcode, read = one.opcode.removesuffix("-start"), program.loaded(one.operands)
        if one.is_kernel:
            size = read + one.stored if one.accessed is None else one.accessed
        elif opcode == "gather":
            size = one.size * (1 + program.in_memory(one))
        elif opcode in WRITING:
            written = sum(program.instructions[name].size for name in one.operands[1:])
            size = written + program.loaded(one.operands[1:])
        elif opcode in ("sort", *COLLECTIVES):
            size = 2 * read
        elif program.is_fused(one):
            continue
        elif opcode == "fusion":
            size = program.passed(one)
        elif opcode == "copy":
            size = read if one.stored < one.size else 2 * read
        elif opcode in FILLING:
            size = one.stored
        elif opcode in COPYING:
            size = read + one.stored
        else:
            continue
        total[opcode] += size
    return dict(total)


def _bytes(shapes: Iterable[re.Match[str]]) -> int:
    """Return the bytes of types such as `f32[5,8]{1,0}`; of a tuple, those of all its parts."""
    total = 0
    for shape in shapes:
        # The digits of a dtype are its bits: f32, s8; f8e4m3 only up to the "e".
        digits = re.sub(r"\D", "", shape["dtype"].split("e")[0])
        bits = _BITS.get(shape["dtype"]) or int(digits or 0)
        total += -(
            -math.prod(map(int, filter(None, shape["sizes"].split(",")))) * bits // 8
        )
    return total


_FLAG = "--xla_jf_dump_static_llo_profile_to"
_ESTIMATE = re.compile(
    r"^hlo_op_estimate \{\n(?P<fields>.*?)^\}", re.DOTALL | re.MULTILINE
)
_FIELD = re.compile(r'^  (?P<name>\w+): "?(?P<value>[^"\n]*)"?$', re.MULTILINE)
_ON_SPARSE_CORE = re.compile(r'execution_thread="sparsecore", \w+=%?([\w.\-]+)')
_COSTLY = ("fusion", "sort", "gather", "scatter")
"""Operations that must have an estimate if the profile is whole."""


class Operation(NamedTuple):
    """One operation of a compiled program.

    Attributes:
      name: as the compiled program has it.
      cycles: of one run of it.
      count: operations that are equal to it, itself included.
    """

    name: str
    cycles: int
    count: int

    @property
    def total(self) -> int:
        """The cycles of all that are equal to it."""
        return self.cycles * self.count


class Profile(NamedTuple):
    """What libtpu wrote about a step.

    Attributes:
      operations: those of the TensorCore, the most expensive first.
      missing: how many operations of the TensorCore have no estimate: libtpu aborted before.
    """

    operations: list[Operation]
    missing: int

    @property
    def cycles(self) -> int:
        """The cycles of all operations that have an estimate; libtpu lists equal ones once."""
        return sum(one.total for one in self.operations)


def profile_step(command: Sequence[str], text: str) -> Profile:
    """Return what libtpu writes about a step that a command compiles.

    Args:
      command: a program and its arguments; it compiles the step, in the environment of this process
        and what libtpu needs beside it. It may fail: libtpu may abort.
      text: the same step compiled without a profile; `Compiled.text`.

    Returns:
      The operations that libtpu wrote, and how many operations it did not come to.

    Raises:
      RuntimeError: libtpu wrote nothing; the message ends with the last line of the command.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAG}={folder}"
        environment = (
            os.environ
            | {
                "LIBTPU_INIT_ARGS": flags.strip(),
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_COMPILATION_CACHE": "false",  # a step from the cache is not compiled
                "TPU_LOG_DIR": "disabled",  # an abort logs the program, gigabytes of it
            }
        )
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        written = [
            path.read_text()
            for path in Path(folder).glob("*_static_llo_profile.textproto")
        ]
    found = []
    for estimate in _ESTIMATE.finditer("".join(written)):
        fields = dict(_FIELD.findall(estimate["fields"]))
        cycles, count = fields["estimated_cycles"], fields.get("num_equivalent_hlos", 1)
        found.append(Operation(fields["hlo_op_name"], int(cycles), int(count)))
    if not found:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[
            -1
        ]
        refuse(
            "profile of the TensorCore",
            expected="estimates by libtpu",
            got=f"none: {last}",
            error=RuntimeError,
        )
    # What a TensorCore runs, and costs cycles.
    program, elsewhere = Program(text), _ON_SPARSE_CORE.findall(text)
    costly = {
        one.name
        for one in program.instructions.values()
        if one.opcode in _COSTLY
        and not program.is_fused(one)
        and one.computation not in elsewhere
    }
    missing = len(costly) - sum(one.count for one in found if one.name in costly)
    return Profile(sorted(found, key=lambda one: (-one.total, one.name)), missing)
