"""HSTU on MovieLens-1M, as the authors' code trains it: the next film of each user, of all.

The file is `ratings.dat` of ml-1m.zip from grouplens.org/datasets/movielens/1m: lines of user,
film, rating and time, separated by two colons. All but the last event of each user is trained on,
for as many epochs as the config says, and films that the user has rated are left out of the
ranking. The network knows when each event was, and for when the next one is asked for.

The authors' code (github.com/meta-recsys/generative-recommenders) orders events of one time by
chance. Here they stay in the order of the file.
"""

from __future__ import annotations

import time
from pathlib import Path

import beside  # noqa: F401, finds the modules that examples share
import next_item
import numpy as np
import settings
from flax import nnx
from histories import Histories, read
from hstu_network import HSTU


def load(path: str | Path) -> Histories:
    """Return the histories of all users; films that nobody has rated have no id."""
    lines = read(path, {}).decode("latin-1").replace("::", " ").split()
    user, film, _, when = np.array(lines, np.int64).reshape(-1, 4).T
    films, item = np.unique(film, return_inverse=True)
    order = np.lexsort((when, user))  # a stable sort
    ends = np.flatnonzero(np.diff(user[order])) + 1
    rows, times = (np.split(column[order].astype(np.int32), ends) for column in (item, when))
    next_times = [np.append(row[1:], row[-1:]) for row in times]
    return Histories(rows, len(films), times, next_times)


def main() -> None:
    options = settings.parser(__doc__, "published/hstu_ml1m.py")
    options.add_argument("--data", required=True, help="ratings.dat")
    options.add_argument("--epochs", type=int, help="instead of the config's")
    args, config = settings.read(options)
    histories, begin = load(args.data), time.perf_counter()
    trained = histories.without(1)
    task = next_item.NextItem(config, next_item.make_engine(config, trained))
    report = next_item.train(
        task,
        trained,
        HSTU(config, nnx.Rngs(config.seed)),
        measure=task.measure(histories, 1),
        report_every=next_item.epoch_of(config, trained),
    )
    found = report.evaluation or {}
    print("test:", *(f"{name} {value:.4f}" for name, value in found.items()))
    print(f"{(time.perf_counter() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
