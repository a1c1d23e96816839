"""A served model that answers while deltas are applied to it, in time that depends on the delta.

There are two copies of the tables. One answers; a delta is written into the other, in place, and
then they change roles. What the first copy has missed it gets before the next delta:

    answers      copy 1, step 100         copy 2, step 150         copy 1, step 200
    is written   copy 2, 100 -> 150       copy 1, 100 -> 150 -> 200

A call keeps the copy that it began with, which is not written before the call has ended. So an
answer is wholly from before a delta, or wholly from after it. Ctrl-C may come between any two
lines: a copy that is being written is nobody's until it is whole, and the end of a call is noted
twice, and once more when nothing refers to the call.

Input: a loaded model, deltas, or a place where they are published; requests of any thread. Output:
answers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from tpu_embed._changes import Changes
from tpu_embed._checks import message
from tpu_embed._types import PyTree
from tpu_embed.io.serving.publications import Publication, publications, version_of
from tpu_embed.io.serving.served import ServedModel, load_model
from tpu_embed.io.serving.served_tables import Prepared
from tpu_embed.io.store import Place, place_of
from tpu_embed.touched import Version

_T = TypeVar("_T")


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


class _Followed(NamedTuple):
    """A place that is followed.

    Attributes:
      place: of the publications.
      cache: a folder, for models in a bucket.
      at: the publication that the model has.
    """

    place: Place
    cache: str | os.PathLike[str] | None
    at: Publication

    def load(self, there: Sequence[Publication]) -> tuple[ServedModel, _Followed]:
        """Return the newest whole model of the place, and that it was loaded.

        Raises:
          FileNotFoundError: there is none.
          ValueError: whatever `load_model` refuses.
        """
        models = [one for one in there if one.is_full]
        if not models:
            expected, remedy = "a whole model", "let the trainer call io.publish first"
            text = message(f"{self.place}", expected=expected, got="none", remedy=remedy)
            raise FileNotFoundError(text)
        path: Any = self.place / models[-1].name
        return load_model(path, cache=self.cache), self._replace(at=models[-1])


def follow(
    place: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None
) -> FollowingModel:
    """Return the newest model that `publish` has published in a place; its `poll` looks again.

    Args:
      place: a directory, or a URL.
      cache: as for `load_model`: a folder for whole models of a bucket. Each one that is downloaded
        stays there; remove those that no server has loaded.

    Raises:
      FileNotFoundError: nothing was published there yet.
      ValueError: whatever `load_model` and `FollowingModel.apply` refuse.
    """
    followed = _Followed(place_of(place, "place"), cache, Publication(-1, "delta"))

    def load(there: Sequence[Publication]) -> FollowingModel:
        model, loaded = followed.load(there)
        return FollowingModel(model, loaded)

    found = _looked(followed.place, load)
    found.poll()
    return found


def _looked(place: Place, use: Callable[[Sequence[Publication]], _T]) -> _T:
    """Return what a function makes of the list of a place, which may change meanwhile."""
    there = publications(place)
    while True:
        try:
            return use(there)
        except FileNotFoundError:
            before, there = there, publications(place)
            if before == there:
                raise


@final
class FollowingModel:
    """A model that follows a training run by deltas, and answers meanwhile, from any thread.

    It takes the memory of the tables twice, from the beginning. `apply` writes the rows of this
    delta and of the one before, so its time does not depend on the size of the tables. It is longer
    once, when a table with keys grows beyond its room: that table is copied then, and the next call
    compiles the program anew.

    Args:
      model: what `load_model` returned. It stays as it is.
      _followed: where `follow` has found it.
    """

    def __init__(self, model: ServedModel, _followed: _Followed | None = None) -> None:
        self._followed, self._polling = _followed, threading.Lock()
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

    def poll(self) -> Version | None:
        """Apply what has been published since; calls that begin after this has returned have it.

        If nothing is new, this takes one look at the list of the place. Where the trainer has begun
        anew, or so much has been published that the next delta is gone, the newest whole model is
        loaded: while that is copied, there are three copies of the tables. Several threads may call
        this; they take turns.

        Returns:
          The version of the tables that answer now.

        Raises:
          ValueError: `follow` has not returned this; a file is damaged.
          OSError: no answer of a bucket. The model answers as before then, as far as it has got.
        """
        with self._polling:
            followed = self._followed
            if followed is None:
                expected, remedy = "a model of io.follow", "apply(path) applies a delta"
                got = "one that was loaded from a path"
                raise ValueError(message("poll", expected=expected, got=got, remedy=remedy))
            _looked(followed.place, self._go_on)
            return self.version

    def _go_on(self, there: Sequence[Publication]) -> None:
        """Bring the model to what was published last."""
        followed = self._followed
        assert followed is not None
        new = [one for one in there if one > followed.at]
        if new and new[0].number > followed.at.number + 1:  # what follows was removed
            followed = self._begin_anew(there)
        for one in new:
            path: Any = followed.place / one.name
            if one <= followed.at:
                continue
            if not one.is_full:
                self.apply(path)
            elif version_of(followed.place, one) != self.version:
                followed = self._begin_anew(there)
                continue
            self._followed = followed = followed._replace(at=one)

    def _begin_anew(self, there: Sequence[Publication]) -> _Followed:
        """Take the newest whole model in place of this one; return that."""
        assert self._followed is not None
        model, followed = self._followed.load(there)
        with self._applying:
            self._copies = self._copies[0], None  # the memory of the other one is free
            first, second = (_Copy(model.with_own_tables()) for _ in range(2))
            with self._changed.lock:
                self._copies = first, second
            self._followed = followed
        return followed

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
