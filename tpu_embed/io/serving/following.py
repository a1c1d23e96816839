"""A served model that answers while deltas are applied to it, in time that depends on the delta.

There are two copies of the tables. One answers; a delta is written into the other, in place, and
then they change roles. What the first copy has missed it gets before the next delta:

    answers      copy 1, step 100         copy 2, step 150         copy 1, step 200
    is written   copy 2, 100 -> 150       copy 1, 100 -> 150 -> 200

A call keeps the copy that it began with, which is not written before the call has ended. So an
answer is wholly from before a delta, or wholly from after it. Ctrl-C may come between any two
lines: a copy that is being written is nobody's until it is whole, and the end of a call is noted
twice, and once more when nothing refers to the call.

Input: a loaded model, deltas, requests of any thread. Output: answers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np

from tpu_embed._changes import Changes
from tpu_embed._types import PyTree
from tpu_embed.io.serving.served import ServedModel
from tpu_embed.io.serving.served_tables import Prepared
from tpu_embed.touched import Version


class _Copy:
    """One of the two copies.

    Attributes:
      model: a model whose tables are its own.
      calls: the calls that are using it now.
      missed: what the other copy has got since, and this one has not; or None.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.calls: set[weakref.ref[_Call]] = set()
        self.missed: Prepared | None = None


class _Call:
    """Stands for a call."""


@final
class FollowingModel:
    """A model that follows a training run by deltas, and answers meanwhile, from any thread.

    It takes the memory of the tables twice, from the beginning. `apply` writes the rows of this
    delta and of the one before, so its time does not depend on the size of the tables. It is longer
    once, when a table with keys grows beyond its room: that table is copied then, and the next call
    compiles the program anew.

    Args:
      model: what `load_model` returned. It stays as it is.
    """

    def __init__(self, model: ServedModel) -> None:
        first, second = (_Copy(model.with_own_tables()) for _ in range(2))
        # The copy that answers, and the other one; None while that is written, or was not to the
        # end. Both at once, so that there is nothing between two assignments.
        self._copies: tuple[_Copy, _Copy | None] = first, second
        self._applying, self._changed = threading.Lock(), Changes()

    @property
    def version(self) -> Version | None:
        """The version of the tables that answer now."""
        return self._copies[0].model.version

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The contents of `metadata.json`, with the version of now."""
        return self._copies[0].model.metadata

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table whose vocabulary lives, and their rows; see `ServedModel`.

        Returns:
          The keys, uint64 `[n]`, ascending; and their rows, int32 `[n]`.

        Raises:
          ValueError: the ids of the table are row numbers, or there is no such table.
        """
        return self._answer(lambda model: model.keys(name))

    def __call__(self, features: PyTree, *inputs: PyTree, weights: PyTree | None = None) -> PyTree:
        """Return the outputs of the model; see `ServedModel`."""
        return self._answer(lambda model: model(features, *inputs, weights=weights))

    def apply(self, path: str | os.PathLike[str]) -> Version | None:
        """Apply a delta; calls that begin after this has returned have its rows.

        Several threads may call this; they take turns.

        Args:
          path: what `export_delta` wrote.

        Returns:
          The version of the tables that answer now.

        Raises:
          FileNotFoundError, ValueError: as for `ServedModel.apply`; nothing has changed then.
        """
        with self._applying:
            # The spare copy will have the same rows for the same keys as the answering one.
            answering, spare = self._copies
            prepared = answering.model.prepare(path)
            if prepared is None:  # an older delta, of tables by row number
                return self.version
            spare = spare or _Copy(answering.model.with_own_tables())
            self._changed.wait_for(lambda: not spare.calls)
            self._copies = answering, None
            if spare.missed is not None:
                spare.model, spare.missed = spare.model.with_prepared(spare.missed), None
            spare.model = spare.model.with_prepared(prepared)
            answering.missed = prepared
            with self._changed.lock:
                self._copies = spare, answering
            return self.version

    def _answer(self, ask: Callable[[ServedModel], Any]) -> Any:
        """Return what the model that answers now is asked for; it stays as it is meanwhile."""
        call = _Call()
        ended = weakref.ref(call)
        try:
            return ask(self._begin(call))
        finally:
            try:
                self._end(ended)
            finally:
                self._end(ended)  # for Ctrl-C that came before the first one had its effect

    def _begin(self, call: _Call) -> ServedModel:
        """Return the model that answers a call; it stays as it is until the call has ended."""
        with self._changed.lock:
            copy = self._copies[0]
            copy.calls.add(weakref.ref(call, self._end))
            return copy.model

    def _end(self, call: weakref.ref[_Call]) -> None:
        """End a call, unless that has been done."""
        with self._changed.lock:
            for copy in self._copies:
                if copy is not None:
                    copy.calls.discard(call)
            self._changed.notify_all()
