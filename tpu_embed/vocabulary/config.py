"""Declaration of a dynamic vocabulary: when a key gets a row, and which key loses its row for it.

Input: what the user writes. Output: a frozen, validated object.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol, get_args

from tpu_embed._checks import check_choice, check_int, refuse
from tpu_embed.kernels.vocabulary_reference import Options

Evict = Literal["lru", "lfu", "none"]
Unseen = Literal["zero", "shared"]

_WAITING_PER_ROW = 4
_MAX_ROWS = 2**31 - 1
# With the room that their order needs, still numbers of 32 bits.
_MAX_WAITING = 3 * 2**30
_MAX_LOOKAHEAD = 2**16  # steps are numbers of 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicVocabulary:
    """Let the rows of a table belong to the keys that training batches have.

    The ids of the table's features are keys of 64 bits. A map on the host gives them rows when a
    training batch is placed. Each training batch is one step of the map: scores of known keys move,
    rows whose `ttl` has passed become free, unknown keys are counted once each, and those that
    `admit_after` batches have had are admitted in batch order, each into the lowest free row, else
    into the row of the key with the lowest score, which is evicted.

    Args:
      admit_after: a key gets a row when this many training batches have had it. 1: at once. A
        larger number keeps out keys that come once or twice.
      evict: the key that is evicted when no row is free. "lru": the one that was seen longest ago;
        "lfu": the one that the fewest training batches have had since its admission, and of those
        the one that was seen longest ago; "none": no key is evicted, and new ones stay unseen while
        no row is free. Of equals, the one in the lower row is evicted.
      ttl: a row becomes free, and its key is forgotten, if none of the last `ttl` training batches
        before the present one had the key, nor has the present one. None: never.
      unseen: what a key without a row stands for. "zero": it is left out of its bag, and is a zero
        row in a sequence; "shared": all such keys share the table's last row, which is trained and
        belongs to no key.
      waiting: how many keys may be counted before they have a row. If there are more, those first
        counted longest ago are forgotten. None: 4 times the table's capacity.

    Raises:
      ValueError: an argument is outside its range.

    Example:
      >>> DynamicVocabulary(admit_after=3, evict="lfu").ttl is None
      True
    """

    admit_after: int = 1
    evict: Evict = "lru"
    ttl: int | None = None
    unseen: Unseen = "zero"
    waiting: int | None = None

    def __post_init__(self) -> None:
        self._set_int("admit_after", minimum=1)
        check_choice("DynamicVocabulary.evict", self.evict, get_args(Evict))
        check_choice("DynamicVocabulary.unseen", self.unseen, get_args(Unseen))
        if self.ttl is not None:
            self._set_int("ttl", minimum=1)
        if self.waiting is not None:
            # Without a place to wait in, no key could reach a count of more than 1.
            self._set_int("waiting", minimum=min(self.admit_after - 1, 1))

    def _set_int(self, field: str, *, minimum: int) -> None:
        value = check_int(
            f"DynamicVocabulary.{field}", getattr(self, field), minimum=minimum
        )
        object.__setattr__(self, field, value)

    def shared_row(self, capacity: int) -> int | None:
        """Return the row, of so many, that unseen keys share; None if they share none."""
        return capacity - 1 if self.unseen == "shared" else None

    def options(self, capacity: int, lookahead: int) -> Options:
        """Return the options of a map for a table.

        Args:
          capacity: V, the rows of the table; the last one is nobody's if `unseen` is "shared".
          lookahead: the batches whose rows are protected, besides the present one.

        Raises:
          ValueError: an argument is outside its range, or leaves no row for a key.
        """
        shared = self.unseen == "shared"
        rows = check_int("capacity", capacity, minimum=1 + shared)
        waiting = _WAITING_PER_ROW * rows if self.waiting is None else self.waiting
        for what, value, most in (
            ("capacity", rows, _MAX_ROWS),
            ("DynamicVocabulary.waiting", waiting, _MAX_WAITING),
        ):
            if value > most:
                refuse(
                    what,
                    expected=f"at most {most}",
                    got=value,
                    remedy="give `waiting`"
                    if self.waiting is None and what != "capacity"
                    else "",
                )
        return Options(
            num_rows=rows - shared,
            admit_after=self.admit_after,
            evict=self.evict,
            ttl=self.ttl,
            waiting=waiting,
            lookahead=check_lookahead(lookahead),
        )


def check_lookahead(lookahead: Any) -> int:
    """Return how many batches may wait for their update, as an int.

    Raises:
      ValueError: it is no integer from 0 to 2¹⁶.
    """
    found = check_int("lookahead", lookahead, minimum=0)
    if found > _MAX_LOOKAHEAD:
        refuse(
            "lookahead",
            expected=f"at most {_MAX_LOOKAHEAD}",
            got=f"{found}",
            remedy="so many batches' rows are kept; pipelining needs 1",
        )
    return found


class KeyTable(NamedTuple):
    """The part at home of a table on the host with a dynamic vocabulary: keys get ids there.

    Attributes:
      vocabulary_size: V, how many keys can have an id, and so a row at home.
      vocabulary: how they get it.
    """

    vocabulary_size: int
    vocabulary: DynamicVocabulary


class LivingTable(Protocol):
    """A table whose rows belong to keys: its name, its rows, and how keys get them."""

    @property
    def name(self) -> str:
        """The table's name."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """V, its logical rows."""
        ...

    @property
    def vocabulary(self) -> DynamicVocabulary | None:
        """How keys get rows; never None here, whatever the type says."""
        ...

    @property
    def is_on_host(self) -> bool:
        """Whether its rows are at home on the host, so that every key must get a row."""
        ...

    @property
    def key_table(self) -> KeyTable | None:
        """How its keys get ids, which are then the keys of its rows; None: there are no ids."""
        ...
