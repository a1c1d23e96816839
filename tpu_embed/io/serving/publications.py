"""One place that a trainer publishes to and servers follow: whole models, and deltas between them.

    00000000-full     a whole model
    00000001-delta    what has changed since
    00000002-delta    what has changed since 00000001
    00000003-full     the model of 00000002 once more: servers may begin with it
    00000004-full     another run, which does not go on from 00000003: all have to begin anew

The names are numbers and kinds, and their list is all that there is to know: a delta goes on from
what was published before it. On a disk each is a directory, in a bucket each has a commit.

Input: a state that is trained, and the record of what was touched. Output: publications; their
list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from tpu_embed._checks import check_int, message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.core.state import TableState
from tpu_embed.io.commits import committer, find
from tpu_embed.io.delta import delta_files, export_delta
from tpu_embed.io.serving import model_files
from tpu_embed.io.store import Place, place_of
from tpu_embed.processes import gather_from_all, raise_on_all
from tpu_embed.touched import TouchedRows, Version, check_record

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

    def planned() -> tuple[Version, Any]:
        version = touched.version(state)
        plan = _plan(root, touched, version, deltas) if jax.process_index() == 0 else None
        return version, plan

    version, plan = raise_on_all("publish", root, planned)
    number, since, full = gather_from_all("publish", plan)[0]
    if since is not None:
        since = Version(*since)
        if since == version:
            return version
        export_delta(f"{root / Publication(number, 'delta').name}", engine, state, touched, since)
        number += 1
    if full:
        _export(root, Publication(number, "full"), export, version)
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


def _export(
    root: Place, one: Publication, export: Callable[[str, Version], Any], version: Version
) -> None:
    """Have a whole model written, and check that it is one of the version."""
    path = root / one.name

    def exported() -> None:
        export(f"{path}", version)
        if jax.process_index() == 0 and (got := version_of(root, one)) != version:
            committer(path).remove()
            remedy = "give export_model the version that export gets"
            expected = f"a model of {version}"
            raise ValueError(message("export", expected=expected, got=f"{got}", remedy=remedy))

    raise_on_all("publish: export", path, exported)


def _remove_old(root: Place, keep: int | None) -> None:
    """Remove what was published before the whole models that are kept."""
    there = publications(root) if jax.process_index() == 0 else []
    models = [one for one in there if one.is_full]
    if keep is not None and len(models) > keep:
        for one in there:
            if one < models[-keep]:
                committer(root / one.name).remove()
