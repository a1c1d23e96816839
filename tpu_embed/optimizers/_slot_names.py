"""Names of the slots of an optax state: what a user sees, and what a checkpoint is keyed by."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jax.tree_util import KeyPath, SequenceKey


def name_slots(paths: Sequence[KeyPath]) -> list[str]:
    """Return one unique name per leaf of an optax state.

    The name is the field's; where several leaves have it, the positions in the chain come before
    it; where that does not tell them apart either, the whole path does.

    Args:
      paths: key paths of the leaves.

    Returns:
      The names, in the order of `paths`.

    Example:
      >>> import jax, optax
      >>> state = optax.adam(lambda count: 0.1).init(1.0)
      >>> name_slots([path for path, _ in jax.tree_util.tree_leaves_with_path(state)])
      ['0_count', 'mu', 'nu', '1_count']

    Reference:
      The fields of optax's states.
    """
    candidates = [_candidates(path) for path in paths]
    level = [0] * len(paths)
    for deeper in (1, 2):
        names = [options[i] for options, i in zip(candidates, level, strict=True)]
        uses = collections.Counter(names)
        level = [deeper if uses[name] > 1 else i for name, i in zip(names, level, strict=True)]
    return [options[i] for options, i in zip(candidates, level, strict=True)]


def _candidates(path: KeyPath) -> tuple[str, str, str]:
    """Return the field's name, that with the chain positions before it, and the whole path."""
    keys = [(_word(key), isinstance(key, SequenceKey)) for key in path]
    field = next((word for word, is_position in reversed(keys) if not is_position), "state")
    positions = [word for word, is_position in keys if is_position]
    return field, "_".join([*positions, field]), "_".join([word for word, _ in keys] or [field])


def _word(key: Any) -> str:
    """Return a path's key as text: the field, the dict's key or the position."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
