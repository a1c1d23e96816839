"""What libtpu's compiler estimates a step to cost on a TensorCore, operation by operation.

While libtpu compiles, it can write the cycles that it expects of every operation, gathers, scatters
and sorts included. Waits for memory, for other chips and for SparseCores are not among them. This
is an estimate: it says which operations a step is made of, and never how long the step takes.

Input: the directory that libtpu wrote, and the compiled program. Output: operations, with cycles
and the stage of the step that they belong to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tpu_embed._checks import message

__all__ = ["FLAG", "Operation", "read_profile"]

FLAG = "--xla_jf_dump_static_llo_profile_to"
"""What `LIBTPU_INIT_ARGS` must have, with `=DIRECTORY`, before JAX first uses libtpu."""

_ESTIMATE = re.compile(r"^hlo_op_estimate \{\n(?P<fields>.*?)^\}", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r'^  (?P<name>\w+): "?(?P<value>[^"\n]*)"?$', re.MULTILINE)
_NAMED = re.compile(r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .*?op_name=\"(?P<scope>[^\"]*)\"", re.M)


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


def read_profile(directory: str | Path, text: str = "") -> list[Operation]:
    """Return the operations of a program, the most expensive first.

    Args:
      directory: what `FLAG` named while the program was compiled.
      text: the compiled program, for the scopes; `Compiled.text`.

    Raises:
      ValueError: libtpu has written no profile there.
    """
    scopes = {match["name"]: match["scope"] for match in _NAMED.finditer(text)}
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
