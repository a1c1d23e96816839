"""Amazon's reviews, as S3-Rec has prepared them: the next item of each user, of all items.

A line of a file is a user and the items that the user has reviewed, in order of time. The files are
`Beauty.txt` and `Toys_and_Games.txt` in the folder `data` of github.com/RUCAIBox/CIKM2020-S3Rec;
they come from Amazon's reviews of 2014, users and items with at least five events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import next_item
import numpy as np
import settings
from flax import nnx
from histories import Histories, read

from tpu_embed.loop import Best

SHA256 = {"Beauty.txt": "226cce9c3105", "Toys_and_Games.txt": "176c680c688d"}


def load(path: str | Path) -> Histories:
    """Return the histories of a file; users with fewer than three items are left out.

    Raises:
      ValueError: an item is below 1.
    """
    lines = read(path, SHA256).splitlines()
    rows = [np.array(line.split()[1:], np.int32) - 1 for line in lines]
    rows = [row for row in rows if len(row) > 2]  # one to train on, to validate, and to test
    if min(row.min() for row in rows) < 0:
        raise ValueError(f"{path}: items: expected numbers from 1 on, got 0")
    return Histories(rows, 1 + max(int(row.max()) for row in rows))


def main(description: str | None, name: str, network: Callable[..., nnx.Module]) -> None:
    """Train until the validation is no longer better, and measure the best model on the test."""
    options = settings.parser(description, f"published/{name}")
    options.add_argument("--data", required=True, help="the file")
    directory = "of the checkpoints, from which a run goes on; with other numbers, name another one"
    options.add_argument("--directory", default="build/published", help=directory)
    args, config = settings.read(options)
    histories, begin = load(args.data), time.perf_counter()
    trained = histories.without(2)
    task = next_item.NextItem(config, next_item.make_engine(config, trained))
    epoch = next_item.epoch_of(config, trained)
    run = f"{Path(args.config).stem}-{Path(args.data).stem}-{config.seed}"
    report = next_item.train(
        task,
        trained,
        network(config, nnx.Rngs(config.seed)),
        measure=task.measure(histories, 2),
        evaluate_every=epoch * config.evaluate_every,
        report_every=epoch * config.evaluate_every,
        save_every=epoch * config.epochs,
        best=Best(f"NDCG@{next_item.TOP}", "max", patience=config.patience),
        directory=Path(args.directory) / run,
    )
    found = {"validation": report.evaluation or {}, "test": task.measure(histories, 1)(report)}
    for part, numbers in found.items():
        print(f"{part}, step {report.step}:", *(f"{k} {v:.4f}" for k, v in numbers.items()))
    print(f"{(time.perf_counter() - begin) / 60:.1f} minutes")
