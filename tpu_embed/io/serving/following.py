"""A served model that answers while deltas are applied to it, in time that depends on the delta.

There are two copies of the tables. One answers; a delta is written into the other, in place, and
then they change roles. What the first copy has missed it gets before the next delta:

    answers      copy 1, step 100         copy 2, step 150         copy 1, step 200
    is written   copy 2, 100 -> 150       copy 1, 100 -> 150 -> 200

A call keeps the copy that it began with, which is not written before the call has ended. So an
answer is wholly from before a delta, or wholly from after it.

Input: a loaded model, deltas, requests of any thread. Output: answers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from tpu_embed._types import PyTree
from tpu_embed.io.delta import delta_files
from tpu_embed.io.serving.served import ServedModel
from tpu_embed.io.serving.written import Prepared
from tpu_embed.touched import Version


class _Copy:
    """One of the two copies.

    Attributes:
      model: a model whose tables are its own.
      calls: how many calls are using it now.
      missed: what the other copy has got since, and this one has not; or None.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model, self.calls = model, 0
        self.missed: Prepared | None = None


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
        self._answering, self._spare = (
            _Copy(model.with_own_tables()),
            _Copy(model.with_own_tables()),
        )
        self._applying, self._changed = threading.Lock(), threading.Condition()

    @property
    def version(self) -> Version | None:
        """The version of the tables that answer now."""
        return self._answering.model.version

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The contents of `metadata.json`, with the version of now."""
        return self._answering.model.metadata

    def keys(self, name: str) -> np.ndarray:
        """Return the keys of a table whose vocabulary lives, uint64 `[n]`, ascending.

        Raises:
          ValueError: the ids of the table are row numbers, or there is no such table.
        """
        copy = self._begin()
        try:
            return copy.model.keys(name)[0]
        finally:
            self._end(copy)

    def __call__(self, features: PyTree, *inputs: PyTree, weights: PyTree | None = None) -> PyTree:
        """Return the outputs of the model; see `ServedModel`."""
        copy = self._begin()
        try:
            return copy.model(features, *inputs, weights=weights)
        finally:
            self._end(copy)

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
            delta, spare = delta_files.read(Path(path)), self._spare
            prepared = self._answering.model.prepare(delta, Path(path))
            if prepared is None:  # an older delta, of tables by row number
                return self.version
            with self._changed:
                self._changed.wait_for(lambda: not spare.calls)
            try:
                if spare.missed is not None:
                    spare.model, spare.missed = spare.model.with_prepared(spare.missed), None
                spare.model = spare.model.with_prepared(prepared)
            except BaseException:
                # Rows may have been written in part: begin this copy anew from the other one.
                self._spare = _Copy(self._answering.model.with_own_tables())
                raise
            with self._changed:
                self._answering, self._spare = spare, self._answering
                self._spare.missed = prepared
            return self.version

    def _begin(self) -> _Copy:
        with self._changed:
            self._answering.calls += 1
            return self._answering

    def _end(self, copy: _Copy) -> None:
        with self._changed:
            copy.calls -= 1
            if not copy.calls:
                self._changed.notify_all()
