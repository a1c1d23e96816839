"""What a placed batch says of the maps from keys to rows: its step, and what the host knows of it.

Input: steps, and what maps did with a batch. Output: which states the batch belongs to.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tpu_embed._checks import refuse
from tpu_embed.kernels.vocabulary_reference import MapState, Taken, empty_state
from tpu_embed.processes import agree_on
from tpu_embed.storage import Incoming
from tpu_embed.vocabulary.config import LivingTable


class MapStates(NamedTuple):
    """All maps after one step, as `Vocabularies.state` returns them.

    Attributes:
      history: the number of the history that the step belongs to, see `ValidSteps`.
      maps: the state of each map to rows on the devices, by table.
      ids: the state of each map from keys to ids, by table on the host with a dynamic vocabulary.
    """

    history: int
    maps: dict[str, MapState]
    ids: Mapping[str, MapState] = types.MappingProxyType({})


class NewOwners(NamedTuple):
    """Which ids of a table on the host with a dynamic vocabulary got new keys in one step.

    Attributes:
      taken: what the map from keys to ids did; its rows are ids.
      rows: int64 `[a]`, the rows on the devices of the ids of its new keys; -1 for an id that is
        at home alone, which only a step without a batch has (`Vocabularies.take_keys`).
    """

    taken: Taken
    rows: np.ndarray


class ValidSteps(NamedTuple):
    """The states that a batch may be looked up in: those of steps in [first, last].

    Attributes:
      first: the step of the map that the batch was, or whose rows it has.
      last: the last step at which every row of the batch is certain to belong to its key still.
      history: a number that changes when maps are loaded; a step means something in one history.
        No other maps have it (`new_history`), unless they were loaded from the state of these.
    """

    first: int
    last: int
    history: int


_counted = itertools.count()


def new_history() -> int:
    """Return a number, below 2³¹, that no history of any maps has had, in this run or another.

    All processes get the same numbers if they make and load their maps in the same order.
    """
    return _first_number() + next(_counted)


@functools.cache
def _first_number() -> int:
    # Random, so that a state that was written by another run does not pass for one of these maps.
    return int(agree_on("histories", str(1 + secrets.randbelow(2**30))))


def states_to_load(
    tables: Iterable[LivingTable], of_keys: Mapping[str, MapState], step: int
) -> MapStates:
    """Return what maps go on from, as a history of its own, if no row from home is on the devices.

    Args:
      tables: those of the maps.
      of_keys: by table whose ids are keys, the state of the map that knows them.
      step: of these states.
    """
    every = [*tables]
    # What knows the rows on the devices of a table on the host is empty.
    maps = {
        t.name: empty_state(step) if t.is_on_host else of_keys[t.name] for t in every
    }
    ids = {t.name: of_keys[t.name] for t in every if t.key_table is not None}
    return MapStates(new_history(), maps, ids)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyedRows:
    """The keys of one table that a batch has, and their rows.

    Attributes:
      rows: int32 arrays, the rows of the distinct keys of each feature, or of those of all
        processes; -1 for none.
      taken: what the map did with the training batch; None if it is only looked up.
      incoming: of a table on the host, the rows from home that the training batch brings.
      visits: whether keys without a row on the devices have brought theirs along.
      owners: of a table on the host with a dynamic vocabulary, which ids the training batch gave to
        new keys; their rows on the devices are made new.
    """

    rows: tuple[np.ndarray, ...]
    taken: Taken | None
    incoming: Incoming | None = None
    visits: bool = False
    owners: NewOwners | None = None


@dataclasses.dataclass(eq=False, repr=False)
class BatchKeys:
    """What only the host knows of a placed batch, until it is admitted.

    It is a static field of a `Batch`. All of these are equal, because programs do not depend on it.

    Args:
      tables: by table with a dynamic vocabulary; None: nothing is known any more.
      steps: of a training batch, the states that it may be looked up in once it is admitted. None:
        it was admitted, or is only looked up.
      make_visits: of a batch that brings rows of tables on the host along, returns them once the
        batches before it are admitted.
      arrivals: of a training batch, by stack of tables on the host, the rows that come to the
        devices (`core/layout/arrivals.py`).
      agreed: of a training batch, by stack of tables on the host, what the processes agree on of
        these rows; None: there is one process.
    """

    tables: Mapping[str, KeyedRows] | None = None
    steps: ValidSteps | None = None
    make_visits: Callable[[], Any] | None = None
    arrivals: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    agreed: Mapping[str, Any] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchKeys)

    def __hash__(self) -> int:
        return 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: not the rows at home, from which rows might still be read."""
        return {**vars(self), "make_visits": None}

    @property
    def is_training(self) -> bool:
        """Whether the batch moves the maps, and was not admitted yet."""
        return self.steps is not None

    @property
    def incoming(self) -> dict[str, Incoming]:
        """The rows from home that a training batch brings, by table on the host."""
        return self._known("incoming")

    @property
    def taken(self) -> dict[str, Taken]:
        """What the maps did with the batch, by table."""
        return self._known("taken")

    @property
    def owners(self) -> dict[str, NewOwners]:
        """Which ids the batch gave to new keys, by table on the host with a dynamic vocabulary."""
        return self._known("owners")

    def _known(self, field: str) -> dict[str, Any]:
        found = {name: getattr(one, field) for name, one in (self.tables or {}).items()}
        return {name: one for name, one in found.items() if one is not None}


def map_version(state: Any) -> tuple[int, int]:
    """Return step and history of a state; waits until they are computed."""
    step, history, *_ = np.asarray(check_vocabulary(state)["map_version"]).tolist()
    return step, history


def check_vocabulary(state: Any) -> Any:
    """Return the `vocabulary` of a state.

    Raises:
      ValueError: it has none.
    """
    if getattr(state, "vocabulary", None) is None:
        refuse(
            "state",
            expected="a state of an engine with dynamic vocabularies",
            got="another one",
        )
    return state.vocabulary
