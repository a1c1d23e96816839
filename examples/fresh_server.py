"""The server of `fresh.py`: it shows items in windows, and follows the trainer."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from fresh_trainer import digest
from stream_data import Stream

from tpu_embed import hash_ids, io
from tpu_embed.metrics import auc


def step_of(model: io.FollowingModel) -> int:
    """Return the step that a model serves."""
    assert model.version is not None, "what is published has versions"
    return model.version.step


def latest(place: Path, step: int) -> io.FollowingModel:
    """Return the model of a place, once it has that of a step."""
    while True:
        try:
            model = io.follow(place)
            while step_of(model) < step:
                time.sleep(0.005)
                model.poll()
            return model
        except FileNotFoundError:  # the trainer has published nothing yet
            time.sleep(0.005)


def serve(config, work: Path) -> None:
    """Score every window by the deltas, and by the full exports alone; note what was shown."""
    stream, shown = Stream(config), work / "shown"
    shown.mkdir(parents=True, exist_ok=True)
    fresh = latest(work / "published", 0)
    stale, full = latest(work / "full", 0), 0
    for begin in range(0, config.batches, config.every):
        path = shown / f"{begin:06d}.npz"
        if path.exists():  # shown before this process was started again
            continue
        while step_of(fresh) < begin:
            time.sleep(0.005)
            fresh.poll()
        keys, served = fresh.keys("items")[0], time.time()
        if digest(keys) != (work / "known" / f"{begin:06d}").read_text():
            raise AssertionError(f"the keys of step {begin} are not the trainer's")
        if full < begin - begin % config.full:
            full = begin - begin % config.full
            while step_of(stale) < full:
                stale.poll()
        found: dict[str, list] = {"click": [], "items": [], "fresh": [], "stale": []}
        for number in range(begin, min(begin + config.every, config.batches)):
            batch = stream.batch(number)
            asked = {"user": batch.user, "item": hash_ids(batch.item, None)}
            found["click"].append(batch.click)
            found["items"].append(np.unique(asked["item"]))
            for name, model in (("fresh", fresh), ("stale", stale)):
                found[name].append(np.asarray(model(asked)))
        hidden = path.with_suffix(".new.npz")
        arrays: dict = {name: np.concatenate(parts) for name, parts in found.items()}
        np.savez(hidden, keys=keys, served=served, shown=time.time(), **arrays)
        hidden.rename(path)


def report(work: Path, first: int) -> tuple[float, float]:
    """Print and return the AUC of both servers, and print the lags.

    Args:
      work: the folder that trainer and server have shared.
      first: the batch from which scores count. Before the first full export of a trained model, the
        server of full exports knows nothing.
    """
    paths = sorted((work / "shown").glob("*.npz"))
    windows = {int(path.stem): dict(np.load(path)) for path in paths}
    times: dict[int, float] = {}  # by item, when it was first shown
    lags, rows = [], set()
    for one in windows.values():
        new = set(one["keys"].tolist()) - rows
        lags += [float(one["served"]) - times[key] for key in new]
        rows |= new
        for key in one["items"].tolist():
            times.setdefault(key, float(one["shown"]))
    click, fresh, stale = (
        np.concatenate([one[name] for begin, one in windows.items() if begin >= first])
        for name in ("click", "fresh", "stale")
    )
    found = float(auc(fresh, click)), float(auc(stale, click))
    print(f"AUC from batch {first} on: {found[0]:.5f} by deltas, {found[1]:.5f} by full exports")
    middle, most = np.percentile(lags, [50, 95])
    print(f"{len(lags)} items, half of them served with a row {middle:.2f} s after they were seen,")
    print(f"95 % after {most:.2f} s; {len(windows)} times with the trainer's keys")
    return found
