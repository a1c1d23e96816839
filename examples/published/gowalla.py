"""Check-ins of Gowalla, as LightGCN has split them, and measures over all unseen places.

A line of a file is a user and the places where the user has been, in no order. The files
`train.txt`, `valid.txt` and `test.txt` are in the folder `data/gowalla` of
github.com/geon0325/LightGCNpp. Models are fit on train and valid; `--validate` fits on train alone
and measures on valid, to choose a config by.

A pair of a user and a place is an example. The wrong places of a batch are drawn at random, the
same for all its users, and scores are cosines, divided by a temperature. Cosines find it hard to
say that a place is popular. In training a part of that is taken off the scores, as if popular
places were drawn more often, so that the vectors learn it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import settings
from flax import nnx
from histories import batches_in, padded, rank, read

from tpu_embed import EmbeddingEngine, fit, retrieval

SHA256 = {"train.txt": "d47e01d06062", "valid.txt": "ddc22c1cd9a7", "test.txt": "099a2a73924e"}
TOP = 20  # places ranked first that count
USERS_AT_ONCE = 1024  # of a call of `top_k`


@dataclass(frozen=True)
class Visits:
    """Who has been where.

    Attributes:
      user, item: int32 [N], pairs to train on, sorted by user.
      begin: int64 [users + 1], where the pairs of each user begin.
      wanted: int32 [users, most], the places to be found; padded with -1.
      items: how many places there are.
    """

    user: np.ndarray
    item: np.ndarray
    begin: np.ndarray
    wanted: np.ndarray
    items: int

    @property
    def users(self) -> int:
        return len(self.wanted)

    def of(self, users: np.ndarray) -> list[Any]:
        """Return the places of some users, an array for each."""
        return [self.item[self.begin[u] : self.begin[u + 1]] for u in users]


def load(folder: str | Path, *, validate: bool = False) -> Visits:
    """Return the pairs to train on, and the places to be found."""
    train, valid, test = parts = [rows_of(Path(folder) / name) for name in SHA256]
    users = 1 + max(max(rows) for rows in parts)
    items = 1 + max(int(row.max()) for rows in parts for row in rows.values() if len(row))
    learned, held_out = ([train], valid) if validate else ([train, valid], test)
    none = np.zeros(0, np.int32)
    rows = [np.concatenate([part.get(u, none) for part in learned]) for u in range(users)]
    lengths = [len(row) for row in rows]
    user = np.repeat(np.arange(users, dtype=np.int32), lengths)
    wanted = padded([held_out.get(u, none) for u in range(users)])
    return Visits(user, np.concatenate(rows), np.cumsum([0, *lengths]), wanted, items)


def rows_of(path: Path) -> dict[int, np.ndarray]:
    """Return the places of each user of a file."""
    rows = [np.array(line.split(), np.int32) for line in read(path, SHA256).splitlines()]
    return {int(row[0]): row[1:] for row in rows if len(row)}


def batches(config, visits: Visits, user_features: Callable) -> Iterator[tuple[dict, dict]]:
    """Yield, for all epochs, features, and ids with what is taken off their scores.

    Args:
      config: the numbers of a file in `configs/published`.
      visits: to train on.
      user_features: `(pairs, rng)` returns the features of the users of pairs, int64 [B].
    """
    rng, size = np.random.default_rng(config.seed), config.batch_size
    visited = np.bincount(visits.item, minlength=visits.items)
    log_q = (config.popularity * np.log(1 + visited)).astype(np.float32)
    for _ in range(config.epochs):
        order = rng.permutation(len(visits.item))
        for start in range(0, len(order) - size + 1, size):
            pairs = order[start : start + size]
            drawn = rng.integers(visits.items, size=config.drawn).astype(np.int32)
            ids = {"item": visits.item[pairs], "drawn": drawn}
            taken_off = {f"{name}_log_q": log_q[one] for name, one in ids.items()}
            yield ids | user_features(pairs, rng), ids | taken_off


def learning_rate(config, visits: Visits) -> optax.Schedule:
    """Return a rate that falls to 0 along a cosine, over all steps."""
    steps = config.epochs * batches_in(len(visits.item), config.batch_size)
    return optax.cosine_decay_schedule(config.learning_rate, steps)


def loss_of(config, vectors: jax.Array, found: dict, ids: dict) -> jax.Array:
    """Return the mean -log softmax of the place of each pair among itself and the drawn ones.

    Args:
      config: the numbers of a file in `configs/published`.
      vectors: of the users, `[B, D]`.
      found: rows "item" `[B, D]` and "drawn" `[K, D]`.
      ids: of both, and "item_log_q" and "drawn_log_q".
    """
    names = {"positive_ids": ids["item"], "negative_ids": ids["drawn"]}
    names |= {"positive_log_q": ids["item_log_q"], "negative_log_q": ids["drawn_log_q"]}
    scores = {"score": "cosine", "temperature": config.temperature}
    losses = retrieval.sampled_softmax(vectors, found["item"], found["drawn"], **names, **scores)
    return losses.mean()


def make_measure(
    engine: EmbeddingEngine, visits: Visits, features_of: Callable, vectors_of: Callable
) -> Callable:
    """Return a function of a report: recall@20 and NDCG@20, means over the users with a test.

    Args:
      engine: has a table "items".
      visits: whose `wanted` are to be found, among the places that a user has not been to.
      features_of: `(users)` returns the features of some users.
      vectors_of: `(model, found)` returns their vectors `[USERS_AT_ONCE, D]`.
    """

    @nnx.jit
    def queries_of(model, state, batch):
        return vectors_of(model, engine.lookup(state, batch))

    def parts_of(report) -> Iterator[tuple[jax.Array, np.ndarray]]:
        for start in range(0, visits.users, USERS_AT_ONCE):
            users = np.minimum(np.arange(start, start + USERS_AT_ONCE), visits.users - 1)
            batch = engine.place(features_of(users), training=False)
            yield queries_of(report.model, report.state, batch), padded(visits.of(users))

    def measure(report) -> dict[str, float]:
        parts = parts_of(report)
        recall, ndcg = rank(engine, report.state, parts, visits.wanted, TOP, score="cosine")
        return {f"recall@{TOP}": recall, f"NDCG@{TOP}": ndcg}

    return measure


def main(description: str | None, name: str, prepare: Callable) -> None:
    """Train for the epochs of the config, then measure.

    How many epochs these are is chosen with --validate, since the test is not to choose it.

    Args:
      description: of the program.
      name: a file of `configs/published`.
      prepare: `(config, visits)` returns the engine, a model or None, the loss, a source, and the
        last two arguments of `make_measure`.
    """
    options = settings.parser(description, f"published/{name}")
    options.add_argument("--data", required=True, help="the folder of the three files")
    options.add_argument("--epochs", type=int, help="instead of the config's")
    validate = "fit on train.txt alone and measure on valid.txt, every few epochs"
    options.add_argument("--validate", action="store_true", help=validate)
    args, config = settings.read(options)
    visits = load(args.data, validate=args.validate)
    engine, model, loss, source, *of_users = prepare(config, visits)
    epoch = batches_in(len(visits.item), config.batch_size)
    begin = time.perf_counter()
    report = fit(
        engine,
        loss,
        source,
        model=model,
        optimizer=None if model is None else optax.adam(learning_rate(config, visits)),
        seed=config.seed,
        measure=make_measure(engine, visits, *of_users),
        evaluate_every=epoch * config.evaluate_every if args.validate else None,
        report_every=epoch,
    )
    minutes = (time.perf_counter() - begin) / 60
    found = report.evaluation or {}
    numbers = (f"{key} {value:.4f}" for key, value in found.items())
    print(f"{'validation' if args.validate else 'test'}:", *numbers, f"{minutes:.1f} minutes")
