"""Names of stacks: a name says what the stack's rows are, so that layouts can't be confused.

The name is the key of the stack's arrays in a `TableState`. Keys survive pickle, orbax and
`jax.tree`; static fields of a pytree do not, because orbax takes the template's. For example

    items+2@mod8x250#0f3a9c1e55d2

is the stack of "items" and two more tables, placed by MOD on 8 shards of 250 rows each. After "#"
comes a digest of the tables in order (names and vocabulary sizes), of their dim and dtype, of how
rows are packed, and of the names of tables with a living vocabulary. Optimizers are not part of it,
because their hyperparameters may change between runs.

Input: the tables of a stack and how they are laid out. Output: the name; or, for two names, what
differs between their stacks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

_LABEL_LENGTH = 32
"""How many characters of the first table's name a stack's name shows."""
# Example: items+2@mod8x250#0f3a9c1e55d2
_FORM = re.compile(
    r"(?P<label>[^@]*)@(?P<placement>[a-z]+)(?P<shards>\d+)x(?P<rows>\d+)#(?P<digest>\w+)"
)


def stack_name(
    tables: Sequence[tuple[str, int]], *, placement: str, shards: int, rows: int, kind: Any
) -> str:
    """Return the name of a stack.

    Args:
      tables: (name, vocabulary size) of its tables, in the order of their rows.
      placement: "mod", "div" or "replicated".
      shards: S.
      rows: R, the rows of one shard.
      kind: whatever else decides how the rows are stored; its `repr` goes into the digest.

    Example:
      >>> stack_name([("items", 2000)], placement="mod", shards=8, rows=250, kind=(64, "float32"))
      'items@mod8x250#a49d2e99fd13'
    """
    # Replace what could be confused with a separator (@, #, +) or a part of a file path.
    label = re.sub(r"[^\w-]", "_", tables[0][0], flags=re.ASCII)[:_LABEL_LENGTH]
    if len(tables) > 1:
        label += f"+{len(tables) - 1}"
    described = repr((list(tables), kind)).encode()
    digest = hashlib.blake2b(described, digest_size=6).hexdigest()
    return f"{label}@{placement}{shards}x{rows}#{digest}"


def differences(expected: str, got: str) -> str:
    """Return in words how the stack named `got` differs from the stack named `expected`.

    Example:
      >>> differences("items@mod8x250#0f3a", "items@mod1x2000#0f3a")
      'the same tables in 1 shard of 2000 rows (mod), not in 8 shards of 250 rows (mod)'
    """
    ours, theirs = _FORM.fullmatch(expected), _FORM.fullmatch(got)
    if ours is None or theirs is None:
        return "a name that is not the name of a stack"
    if ours["digest"] == theirs["digest"]:
        return f"the same tables in {_shards(theirs)}, not in {_shards(ours)}"
    return "other tables, or tables of another vocabulary size, dim or dtype, or packed differently"


def _shards(name: re.Match[str]) -> str:
    plural = "" if name["shards"] == "1" else "s"
    return f"{name['shards']} shard{plural} of {name['rows']} rows ({name['placement']})"
