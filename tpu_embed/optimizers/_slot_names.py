"""Names for the slots of an optax state, as users see them and as checkpoints store them.

Input: the key paths of the leaves of an optax state.
Output: one unique name per leaf.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from jax.tree_util import KeyPath, SequenceKey


def name_slots(paths: Sequence[KeyPath]) -> list[str]:
    """Return one unique name per leaf of an optax state.

    The name is that of the leaf's field. If several leaves share it, their positions in the chain
    are put before it. If that is not unique either, the name is the whole path.

    Args:
      paths: the key paths of the leaves.

    Returns:
      the names, in the order of `paths`.

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
    # Level 0: count, mu, nu, count. The counts clash and go to level 1: 0_count and 1_count.
    for deeper in (1, 2):
        names = [options[i] for options, i in zip(candidates, level, strict=True)]
        uses = collections.Counter(names)
        level = [deeper if uses[name] > 1 else i for name, i in zip(names, level, strict=True)]
    return [options[i] for options, i in zip(candidates, level, strict=True)]


def _candidates(path: KeyPath) -> tuple[str, str, str]:
    """Return three names: the field, the field after its chain positions, and the whole path."""
    keys = [(_word(key), isinstance(key, SequenceKey)) for key in path]
    field = next((word for word, is_position in reversed(keys) if not is_position), "state")
    positions = [word for word, is_position in keys if is_position]
    return field, "_".join([*positions, field]), "_".join([word for word, _ in keys] or [field])


def _word(key: Any) -> str:
    """Return one key of a path as text: the name of a field, a dictionary's key, or a position."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
