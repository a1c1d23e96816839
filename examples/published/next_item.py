"""Train a model of the next item by sampled softmax, and rank all items after each history.

A batch is some whole histories, jagged, and items that are drawn at random. At each place of a
history, the right item is the next one of the history, whose row has been looked up already; the
wrong ones are the drawn items, the same for all places. Nothing is padded.

Measured is the rank of one item among all that the user has not seen: HR@10 is whether it is among
the first ten, the mean over users, and NDCG@10 is 1 / log2(1 + its rank), or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from events import Events, drop
from flax import nnx
from histories import Histories, batches_in, padded, rank

import tpu_embed
from tpu_embed import (
    EmbeddingEngine,
    FeatureConfig,
    Jagged,
    RaggedIds,
    TableConfig,
    fit,
    retrieval,
)
from tpu_embed.data import EventValues, place_values
from tpu_embed.loop import Report
from tpu_embed.nn import on_each_replica

TOP = 10  # items ranked first that count
USERS_AT_ONCE = 1024  # of a call of `top_k`


def epoch_of(config, histories: Histories) -> int:
    """Return how many steps an epoch has; histories of one event have nothing to predict."""
    return batches_in(sum(len(row) > 1 for row in histories.rows), config.batch_size)


def learning_rate(config, histories: Histories) -> optax.Schedule | float:
    """Return the rate; with `config.decay` it falls to 0 along a cosine, over all steps."""
    if not config.decay:
        return config.learning_rate
    steps = config.epochs * epoch_of(config, histories)
    return optax.cosine_decay_schedule(config.learning_rate, steps)


def make_engine(config, histories: Histories, mesh=None) -> EmbeddingEngine:
    """Return an engine of one table. A history may have an event that is only predicted."""
    normal, items = jax.nn.initializers.normal(config.init_scale), histories.items
    table = TableConfig(items, config.dim, initializer=normal, name="items")
    history = FeatureConfig(table, jagged=True, max_sequence_length=config.longest + 1, keep="last")
    rate = learning_rate(config, histories)
    adam = tpu_embed.optimizers.Adam(rate, beta_2=config.beta_2)
    return EmbeddingEngine({"history": history, "drawn": FeatureConfig(table)}, adam, mesh=mesh)


def known_of(histories: Histories, users: np.ndarray, longest: int) -> tuple[RaggedIds, dict]:
    """Return the newest events of some histories, and what is known of each of them by name."""
    ids = RaggedIds.from_lists([histories.rows[u][-longest:] for u in users])
    lists = {"times": histories.times, "next_times": histories.next_times}
    known = {
        name: np.concatenate([rows[u][-longest:] for u in users])
        for name, rows in lists.items()
        if rows is not None
    }
    return ids, {"items": ids.values, **known}


def batches(config, histories: Histories) -> Iterator[tuple[dict, dict]]:
    """Yield, for all epochs, features and what is known beside them."""
    rng, size = np.random.default_rng(config.seed), config.batch_size
    trained = np.flatnonzero([len(row) > 1 for row in histories.rows])
    for _ in range(config.epochs):
        order = rng.permutation(trained)
        for start in range(0, len(order) - size + 1, size):
            users = order[start : start + size]
            ids, known = known_of(histories, users, config.longest + 1)
            drawn = rng.integers(histories.items, size=config.drawn).astype(np.int32)
            of_events = {name: EventValues("history", one) for name, one in known.items()}
            yield {"history": ids, "drawn": drawn}, {"drawn": drawn, **of_events}


class NextItem:
    """The loss of a network that predicts the next item, and how good it is.

    Args:
      config: the numbers of a file in `configs/published`.
      engine: that of `make_engine`.
    """

    def __init__(self, config, engine: EmbeddingEngine) -> None:
        self.config, self.engine = config, engine
        cosine = {"score": "cosine", "temperature": config.temperature}
        self.scores = cosine if config.temperature else {}

    def vectors(self, network, history: Jagged, known: dict, rng=None) -> jax.Array:
        """Return what the network makes of each event, `[S, C, D]`.

        Args:
          network: maps the `Events` of one replica to vectors.
          history: values float [S, C, D].
          known: `Jagged` values of events, int32 [S, C]; "times" and "next_times", or neither.
          rng: a PRNG key; None: nothing is dropped.
        """
        graph, params = nnx.split(network)
        times = {name: known[name].values for name in ("times", "next_times") if name in known}

        def of_replica(shared, history, times, replica):
            params, rng = shared
            # An event's label is the same on any number of devices, so what is dropped is, too.
            example = replica * len(history.lengths) + history.segment_ids
            labels = example * (self.config.longest + 1) + history.positions
            return nnx.merge(graph, params)(Events(history, labels, rng, **times))

        replicas = jnp.arange(len(history.row_splits), dtype=jnp.int32)
        each = on_each_replica(self.engine, of_replica)
        return each((params, rng), history, times, replicas)

    def loss(self, network, found: dict, known: dict, *, rng) -> jax.Array:
        """Return -log softmax of the next item, the mean over all places that have one."""
        history, items, drawn = found["history"], known["items"].values, known["drawn"]
        of_vectors, of_items = (None, None) if rng is None else jax.random.split(rng)
        rate = self.config.item_dropout  # the same entries of an item, wherever it stands
        rows = drop(history.values, rate, of_items, items)
        wrong = drop(found["drawn"], rate, of_items, drawn)
        vectors = self.vectors(network, history.with_values(rows), known, of_vectors)
        # What comes after place c of a history is at place c + 1, unless the history ends there.
        follows = history.positions[:, 1:] > 0  # 0 beyond the last history, too
        wanted = jnp.where(follows, items[:, 1:], -1)
        ids = {"positive_ids": wanted, "negative_ids": drawn}
        losses = retrieval.sampled_softmax(
            vectors[:, :-1], rows[:, 1:], wrong, **ids, **self.scores
        )
        return losses.sum() / jnp.maximum((wanted >= 0).sum(), 1)

    def measure(self, whole: Histories, last: int) -> Callable[[Any], dict[str, float]]:
        """Return a function of a report: HR and NDCG of the first of the last events left out.

        The users' histories are placed here, once.

        Args:
          whole: the histories.
          last: how many events of each are left out.
        """
        before, wanted = whole.without(last), np.array([[row[-last]] for row in whole.rows])
        parts = []
        for start in range(0, len(wanted), USERS_AT_ONCE):
            users = np.minimum(np.arange(start, start + USERS_AT_ONCE), len(wanted) - 1)
            ids, known = known_of(before, users, self.config.longest)
            batch = self.engine.place({"history": ids}, training=False)
            of_events = {
                name: place_values(self.engine, batch, "history", values, ids.row_splits)
                for name, values in known.items()
            }
            parts.append((batch, of_events, padded([before.rows[u] for u in users])))

        @nnx.jit
        def newest(network, state, batch, known):
            history = self.engine.lookup(state, batch)["history"]
            return history.with_values(self.vectors(network, history, known)).last()

        def measure(report) -> dict[str, float]:
            model, state = report.model, report.state
            queries = ((newest(model, state, *placed), seen) for *placed, seen in parts)
            recall, ndcg = rank(self.engine, state, queries, wanted, TOP, **self.scores)
            return {f"HR@{TOP}": recall, f"NDCG@{TOP}": ndcg}

        return measure


def train(task: NextItem, histories: Histories, network: nnx.Module, **options: Any) -> Report:
    """Train on histories; `options` are those of `fit`."""
    config = task.config
    adam = optax.adam(learning_rate(config, histories), b2=config.beta_2)
    source = batches(config, histories)
    return fit(
        task.engine, task.loss, source, model=network, optimizer=adam, seed=config.seed, **options
    )
