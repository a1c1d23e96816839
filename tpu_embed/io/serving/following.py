"""One place that a trainer publishes to and servers follow: whole models, and deltas between them.

    00000000-full     a whole model
    00000001-delta    what has changed since
    00000002-delta    what has changed since 00000001
    00000003-full     the model of 00000002 once more: servers may begin with it
    00000004-full     another run, which does not go on from 00000003: all have to begin anew

The names are numbers and kinds, and their list is all that there is to know: a delta goes on from
what was published before it. On a disk each is a directory, in a bucket each has a commit.

A served model answers while deltas are applied to it, in time that depends on the delta. There are
two copies of the tables. One answers; a delta is written into the other, in place, and then they
change roles. What the first copy has missed it gets before the next delta:

    answers      copy 1, step 100         copy 2, step 150         copy 1, step 200
    is written   copy 2, 100 -> 150       copy 1, 100 -> 150 -> 200

A call keeps the copy that it began with, which is not written before the call has ended. So an
answer is wholly from before a delta, or wholly from after it. Ctrl-C may come between any two
lines: a copy that is being written is nobody's until it is whole, and the end of a call is noted
twice, and once more when nothing refers to the call.

Input: a state that is trained, and the record of what was touched; a loaded model, or a place; and
requests of any thread. Output: publications; answers.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import jax
import numpy as np

from tpu_embed._checks import check_int, refuse
from tpu_embed._types import PyTree
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.io.commits import committer, find
from tpu_embed.io.delta import delta_files, export_delta
from tpu_embed.io.serving import model_files
from tpu_embed.io.serving.served import ServedModel, load_model
from tpu_embed.io.serving.served_tables import Prepared
from tpu_embed.io.store import Place, place_of
from tpu_embed.processes import gather_from_all, raise_on_all
from tpu_embed.touched import TouchedRows, Version, check_record

_T = TypeVar("_T")
_LOOK_SECONDS = 0.001
"""How often `apply` looks whether the calls that use a copy have ended."""
_NAME = re.compile("([0-9]{8})-(delta|full)")


class Publication(NamedTuple):
    """What was published in one call; of two with one number, the delta comes first.

    Attributes:
      number: those that come later have greater ones.
      kind: "delta" or "full".
    """

    number: int
    kind: str

    @property
    def name(self) -> str:
        """Its name in the place."""
        return f"{self.number:08d}-{self.kind}"

    @property
    def is_full(self) -> bool:
        """Whether it is a whole model."""
        return self.kind == "full"


def publications(place: Place) -> list[Publication]:
    """Return what was published in a place, the first one first."""
    found = map(_NAME.fullmatch, committer(place).names())
    return sorted(Publication(int(one[1]), one[2]) for one in found if one)


def version_of(place: Place, one: Publication) -> Version | None:
    """Return the version of tables that have a publication.

    Raises:
      FileNotFoundError: it is not there any more.
      ValueError: it is damaged.
    """
    files = model_files if one.is_full else delta_files
    said = files.read_metadata(find(place / one.name))["version"]
    return None if said is None else Version(**said)


def publish(
    place: str | os.PathLike[str],
    engine: EmbeddingEngine,
    state: TableState,
    touched: TouchedRows,
    export: Callable[[str, Version], Any],
    *,
    deltas: int = 100,
    keep: int | None = 2,
) -> Version:
    """Publish a state in one place, where `follow` finds it: as a delta if that will do.

    A delta goes on from what was published last. Where the run does not, because it began anew or
    was restored from a step before, a whole model is exported instead. It is also exported after
    every so many deltas, so that servers that start have little to catch up with.

    One process at a time may publish in a place. With several processes, all call this.

    Args:
      place: a directory, or a URL of `gs://` or `s3://`; it need not exist.
      engine: the engine that made the state.
      state: the tables.
      touched: the record of this engine, with all updates up to the state.
      export: called with a path and a version; has `export_model` write a whole model of the state
        there, with this `version=`. With several processes it is called in all of them, so that
        they can read tables together, and process 0 writes.
      deltas: how many there are before the next whole model; 0: there are whole models only.
      keep: how many whole models stay, with the deltas after the first of them; None: all.

    Returns:
      The version that is published now.

    Raises:
      ValueError: the place is a bad URL; whatever `export_delta` refuses; what was exported has
        another version.
      FileNotFoundError: nothing was exported.
      FileExistsError: another process has published meanwhile.
      Exception: what `export` raises. An error in another process.

    Example:
      >>> import tempfile, jax, numpy as np, tpu_embed
      >>> from tpu_embed import io
      >>> config = tpu_embed.FeatureConfig(tpu_embed.TableConfig(8, 2, name="item"))
      >>> engine = EmbeddingEngine(config, tpu_embed.optimizers.SGD(0.1))
      >>> state, touched = engine.init(jax.random.key(0)), TouchedRows(engine)
      >>> def export(path, version):
      ...     model, tables = (lambda rows: rows.sum(-1)), engine.tables(state)
      ...     io.export_model(path, model, tables, config, np.arange(8), version=version)
      >>> with tempfile.TemporaryDirectory() as place:
      ...     _ = publish(place, engine, state, touched, export)
      ...     served = io.follow(place)
      ...     touched.record(batch := engine.place(np.full(jax.device_count(), 5)), 1)
      ...     state = engine.update(state, batch, engine.lookup(state, batch))
      ...     _ = publish(place, engine, state, touched, export)
      ...     served.poll().step, len(publications(place_of(place)))
      (1, 2)
    """
    check_record(engine, touched)
    check_int("deltas", deltas, minimum=0)
    keep = None if keep is None else check_int("keep", keep, minimum=1)
    root = place_of(place, "place")

    def planned():
        version = touched.version(state)
        plan = (
            _plan(root, touched, version, deltas) if jax.process_index() == 0 else None
        )
        return version, plan

    version, plan = raise_on_all("publish", root, planned)
    number, since, full = gather_from_all("publish", plan)[0]
    if since is not None:
        since = Version(*since)
        if since == version:
            return version
        export_delta(
            f"{root / Publication(number, 'delta').name}", engine, state, touched, since
        )
        number += 1
    if full:
        one = Publication(number, "full")

        def exported():
            export(f"{root / one.name}", version)
            if jax.process_index() == 0 and (got := version_of(root, one)) != version:
                committer(root / one.name).remove()
                refuse(
                    "export",
                    expected=f"a model of {version}",
                    got=f"{got}",
                    remedy="give export_model the version that export gets",
                )

        raise_on_all("publish: export", root / one.name, exported)
        raise_on_all("remove", root, lambda: _remove_old(root, keep))
    return version


def _plan(
    root: Place, touched: TouchedRows, version: Version, deltas: int
) -> tuple[int, Version | None, bool]:
    """Return the next number, the version that a delta begins from, and whether a model is due.

    The version is None if a delta will not do. If it is that of the state, nothing is due.
    """
    there = publications(root)
    number = there[-1].number + 1 if there else 0
    for kind in ("delta", "full"):  # what a killed process has left
        committer(root).sweep(Publication(number, kind).name)
    models = [at for at, one in enumerate(there) if one.is_full]
    since = version_of(root, there[-1]) if models else None
    if since is None or not (deltas or since == version) or not _has(touched, since):
        return number, None, True
    return number, since, len(there) - models[-1] >= deltas


def _has(touched: TouchedRows, version: Version) -> bool:
    """Return whether it is known what has changed since a version."""
    try:
        touched.known(version)
    except ValueError:
        return False
    return True


def _remove_old(root: Place, keep: int | None) -> None:
    """Remove what was published before the whole models that are kept."""
    there = publications(root) if jax.process_index() == 0 else []
    models = [one for one in there if one.is_full]
    if keep is not None and len(models) > keep:
        for one in there:
            if one < models[-keep]:
                committer(root / one.name).remove()


# -- following -----------------------------------------------------------------------------------


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
            refuse(
                f"{self.place}",
                expected="a whole model",
                got="none",
                remedy="let the trainer call io.publish first",
                error=FileNotFoundError,
            )
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

    def load(there):
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
        self._applying = threading.Lock()
        # A finalizer may need it in the thread that has it.
        self._lock = threading.RLock()

    @property
    def version(self) -> Version | None:
        """The version of the tables that answer now."""
        return self._copies[0].model.version

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The contents of `metadata.json`, with the version of now."""
        return self._copies[0].model.metadata

    def keys(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table with a dynamic vocabulary, and their rows; see `ServedModel`.

        Returns:
          The keys, uint64 `[n]`, ascending; and their rows, int32 `[n]`.

        Raises:
          ValueError: the ids of the table are row numbers, or there is no such table.
        """
        return self._answer(lambda model: model.keys(name))

    def __call__(
        self, features: PyTree, *inputs: PyTree, weights: PyTree | None = None
    ) -> PyTree:
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
            while spare.calls:
                time.sleep(_LOOK_SECONDS)
            self._copies = answering, None
            if spare.missed is not None:
                spare.model, spare.missed = (
                    spare.model.with_prepared(spare.missed),
                    None,
                )
            spare.model = spare.model.with_prepared(prepared)
            answering.missed = prepared
            with self._lock:
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
                refuse(
                    "poll",
                    expected="a model of io.follow",
                    got="one that was loaded from a path",
                    remedy="apply(path) applies a delta",
                )
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
            with self._lock:
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
                # For Ctrl-C that came before the first one had its effect.
                self._end(ended)

    def _begin(self, call: _Call) -> ServedModel:
        """Return the model that answers a call; it stays as it is until the call has ended."""
        with self._lock:
            copy = self._copies[0]
            copy.calls.add(weakref.ref(call, self._end))
            return copy.model

    def _end(self, call: weakref.ref[_Call]) -> None:
        """End a call, unless that has been done."""
        with self._lock:
            for copy in self._copies:
                if copy is not None:
                    copy.calls.discard(call)
