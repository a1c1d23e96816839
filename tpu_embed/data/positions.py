"""A position in the data as a JSON value, which a checkpoint can hold.

    {"batches": 12}                                              a source without states
    {"batches": 12, "sources": [{"json": …}, {"bytes": "e30="}]}   one state per process

The first process writes a checkpoint for all, so a position holds the states of all processes.

Input: the number of batches, and the state of this process's source. Output: JSON; and back.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from tpu_embed._checks import is_int, message
from tpu_embed.processes import gather_from_all, who


def encode(batches: int, source_state: Any, *, stateful: bool) -> dict[str, Any]:
    """Return a position.

    Args:
      batches: how many were taken.
      source_state: the state of this process's source; None if it has no states.
      stateful: whether the source has states. If so, all processes must call this.
    """
    if not stateful:
        return {"batches": batches}
    if isinstance(source_state, bytes):
        one = {"bytes": base64.b64encode(source_state).decode()}
    else:
        one = {"json": source_state}
    return {"batches": batches, "sources": gather_from_all("Prefetcher.get_state", one)}


def decode(position: Any, *, stateful: bool) -> tuple[int, Any]:
    """Return the number of batches and the state of this process's source.

    Raises:
      ValueError: it is no position, or one of a source of another kind or of other processes.
    """
    what, remedy = "Prefetcher.set_state", "give what get_state returned"
    known = isinstance(position, dict) and is_int(position.get("batches"))
    if not known or not 0 <= position["batches"] < 2**63:
        raise ValueError(message(what, expected="a position", got=repr(position), remedy=remedy))
    if not stateful:
        if "sources" in position:
            expected, got = "a source with get_state and set_state", "one without them"
            remedy = "give a source of the same kind as when the position was saved"
            raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
        return position["batches"], None
    sources, (here, processes) = position.get("sources"), who()
    if not isinstance(sources, list) or len(sources) != processes:
        count = len(sources) if isinstance(sources, list) else "no"
        expected, got = f"one state per process, {processes} in all", f"{count} states"
        remedy = "continue with as many processes, and a source of the same kind"
        raise ValueError(message(what, expected=expected, got=got, remedy=remedy))
    return position["batches"], _state(what, sources[here])


def _state(what: str, one: Any) -> Any:
    """Return the state of a source from its JSON value."""
    match one:
        case {"json": state, **rest} if not rest:
            return state
        case {"bytes": str(text), **rest} if not rest and _BASE64.fullmatch(text):
            return base64.b64decode(text)
    expected, remedy = "a source's state", "give what get_state returned"
    raise ValueError(message(what, expected=expected, got=repr(one), remedy=remedy))


_BASE64 = re.compile("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
