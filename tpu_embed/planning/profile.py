"""What libtpu's compiler estimates a step to cost on a TensorCore, operation by operation.

While libtpu compiles, it can write the cycles that it expects of every operation, gathers, scatters
and sorts included. Waits for memory, for other chips and for SparseCores are not among them. This
is an estimate: it says which operations a step is made of, and never how long the step takes.

libtpu reads the flags that ask for this when it is loaded, and it may abort once the estimates are
written. So a process of its own compiles the step for them, and what it had written counts.

Input: a command that compiles a step, and the compiled program. Output: operations, with cycles
and the stage of the step that they belong to; the programs of SparseCores.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu_embed._checks import message
from tpu_embed.planning import hlo

FLAG = "--xla_jf_dump_static_llo_profile_to"
"""What `LIBTPU_INIT_ARGS` must have, with `=DIRECTORY`, before JAX first uses libtpu."""

_KERNELS_FLAG = "--xla_sc_dump_bundles_to"
"""The same for the programs of SparseCores."""

_ESTIMATE = re.compile(r"^hlo_op_estimate \{\n(?P<fields>.*?)^\}", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r'^  (?P<name>\w+): "?(?P<value>[^"\n]*)"?$', re.MULTILINE)
_NAMED = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*?op_name=\"(?P<scope>[^\"]*)\"", re.M)
_ON_SPARSE_CORE = re.compile(r'execution_thread="sparsecore", \w+=%?([\w.\-]+)')
_COSTLY = ("fusion", "sort", "gather", "scatter")
"""Operations that must have an estimate if the profile is whole."""

_SECTION = re.compile(r"^tec\n(.*?)(?=^[a-z]+\n|\Z)", re.DOTALL | re.MULTILINE)
_LABEL = re.compile(r"^(?P<label>\.LBB\w+):")
_BUNDLE = re.compile(r"^0x[0-9a-f]+: \{")
_BRANCH = re.compile(r"\bsbr\.rel .*?(?P<label>\.LBB\w+)-")
_DELAY = 2
"""Bundles after a branch that run before it is taken."""


class Operation(NamedTuple):
    """One operation of a compiled program.

    Attributes:
      name: as the compiled program has it.
      cycles: of one run of it.
      count: operations that are equal to it, itself included.
      scope: the named scope it stands in, such as `…/update/items/dedup`; "" if it is not known.
    """

    name: str
    cycles: int
    count: int
    scope: str

    @property
    def total(self) -> int:
        """The cycles of all that are equal to it."""
        return self.cycles * self.count


class Kernel(NamedTuple):
    """The program that a kernel runs on each vector subcore of the SparseCores.

    A bundle is what a subcore starts in one cycle. How often a loop runs, and how long a bundle
    waits for a DMA, is not in the program.

    Attributes:
      scope: the named scope of the kernel, which ends with its name and that of its body.
      bundles: how many the program has.
      loops: how many are in each of its loops that contain no other loop.
    """

    scope: str
    bundles: int
    loops: tuple[int, ...]


class Profile(NamedTuple):
    """What libtpu wrote about a step.

    Attributes:
      operations: those of the TensorCore, the most expensive first.
      kernels: those of the SparseCores.
      missing: how many operations of the TensorCore have no estimate: libtpu aborted before.
    """

    operations: list[Operation]
    kernels: list[Kernel]
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
      The operations and kernels that libtpu wrote, and how many operations it did not come to.

    Raises:
      RuntimeError: libtpu wrote nothing; the message ends with the last line of the command.
    """
    with tempfile.TemporaryDirectory() as folder:
        estimates, kernels = Path(folder, "estimates"), Path(folder, "kernels")
        for directory in (estimates, kernels):
            directory.mkdir()
        flags = [
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"{FLAG}={estimates}",
            f"{_KERNELS_FLAG}={kernels}",
        ]
        environment = os.environ | {
            "LIBTPU_INIT_ARGS": " ".join(flags).strip(),
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # a step from the cache is not compiled
            "TPU_LOG_DIR": "disabled",  # when libtpu aborts, it logs the program, gigabytes of it
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        try:
            operations = read_profile(estimates, text)
        except ValueError as error:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            expected = "estimates by libtpu"
            what = "profile of the TensorCore"
            raise RuntimeError(message(what, expected=expected, got=f"none: {last}")) from error
        return Profile(operations, read_kernels(kernels, text), _missing(operations, text))


def read_profile(directory: str | Path, text: str = "") -> list[Operation]:
    """Return the operations of a program, the most expensive first.

    Args:
      directory: what `FLAG` named while the program was compiled.
      text: the compiled program, for the scopes; `Compiled.text`.

    Raises:
      ValueError: libtpu has written no profile there.
    """
    scopes = _scopes(text)
    found = []
    for path in sorted(Path(directory).glob("*_static_llo_profile.textproto")):
        for estimate in _ESTIMATE.finditer(path.read_text()):
            fields = {one["name"]: one["value"] for one in _FIELD.finditer(estimate["fields"])}
            name = fields["hlo_op_name"]
            count = int(fields.get("num_equivalent_hlos", 1))
            cycles = int(fields["estimated_cycles"])
            found.append(Operation(name, cycles, count, scopes.get(name, "")))
    if not found:
        remedy = f"set LIBTPU_INIT_ARGS={FLAG}={directory} before JAX starts"
        expected = "profiles that libtpu wrote"
        raise ValueError(message(f"{directory}", expected=expected, got="none", remedy=remedy))
    return sorted(found, key=lambda one: -one.total)


def read_kernels(directory: str | Path, text: str = "") -> list[Kernel]:
    """Return the programs of vector subcores, in the order of their names.

    Args:
      directory: where libtpu wrote the bundles of SparseCores.
      text: the compiled program, for the scopes; `Compiled.text`.
    """
    scopes = _scopes(text)
    found = []
    for path in sorted(Path(directory).glob("*_bundles.txt")):
        # NAME_MICROSECONDS_bundles.txt. A file without a section `tec` has no vector program.
        section = _SECTION.search(path.read_text())
        if section:
            bundles, loops = _program(section[1])
            name = path.name.rsplit("_", 2)[0]
            found.append(Kernel(scopes.get(name, ""), bundles, tuple(loops)))
    return found


def _program(section: str) -> tuple[int, list[int]]:
    """Return how many bundles a program has, and each of its innermost loops.

    `.LBB0_1:`, bundle, bundle with a branch to `.LBB0_1`, two bundles that run before it is taken:
    a loop of four bundles.
    """
    count, starts, loops = 0, {}, []
    for line in section.splitlines():
        label, branch = _LABEL.match(line), _BRANCH.search(line)
        if label:
            starts[label["label"]] = count
        count += bool(_BUNDLE.match(line))
        if branch and branch["label"] in starts:  # its bundle is the last one counted
            loops.append((starts[branch["label"]], count + _DELAY))
    return count, [last - first for first, last in loops if not _contains(first, last, loops)]


def _contains(first: int, last: int, loops: list[tuple[int, int]]) -> bool:
    """Return whether a loop contains another."""
    return any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)


def _scopes(text: str) -> dict[str, str]:
    """Return name -> named scope of the instructions of a program."""
    return {match["name"]: match["scope"] for match in _NAMED.finditer(text)}


def _missing(operations: list[Operation], text: str) -> int:
    """Return how many costly operations of the TensorCore have no estimate."""
    expected = {one.name for one in _costly(text)}
    return len(expected) - sum(one.count for one in operations if one.name in expected)


def _costly(text: str) -> Iterator[hlo.Instruction]:
    """Yield the operations of a program that a TensorCore runs and that cost cycles."""
    program, elsewhere = hlo.Program(text), set(_ON_SPARSE_CORE.findall(text))
    for one in program.instructions.values():
        if one.opcode in _COSTLY and not program.is_fused(one) and one.computation not in elsewhere:
            yield one
