"""Batches of a day's requests, in the order of the clock, for the ranker.

In a batch, requests are put in an order in which the G blocks of the batch, whose sums of gradients
are added one after the other, have about as many events each. The order does not depend on the
number of devices, so neither does any bit of the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from drifting_log import DAY, Day, Log

from tpu_embed import EmbeddingEngine, RaggedIds
from tpu_embed.data import balance_replicas, place_values

BLOCKS = 8  # G, which `EmbeddingEngine(sum_blocks=)` changes


class Chosen(NamedTuple):
    """The requests of a batch, B of them."""

    day: Day
    order: np.ndarray  # int64 [B], their numbers in the day
    events: np.ndarray  # int64, the events of their histories, one history after the other
    splits: np.ndarray  # int64 [B + 1], where each history begins


def batches(config, log: Log, day: Day) -> Iterator[tuple[dict, Chosen]]:
    """Yield ids by feature, and the requests that they are of.

    Args:
      config: the numbers of `configs/days.py`.
      log: the whole log.
      day: one of its days. Requests at its end that make no whole batch are left out.
    """
    size, lengths = config.batch_size, np.diff(day.splits)
    for start in range(0, len(day.user) - size + 1, size):
        order = start + balance_replicas(lengths[start : start + size], BLOCKS)
        parts = [day.history[day.splits[r] : day.splits[r + 1]] for r in order]
        splits = np.cumsum([0, *map(len, parts)])
        chosen = Chosen(day, order, np.concatenate(parts), splits)
        yield features(log, chosen), chosen


def features(log: Log, chosen: Chosen) -> dict:
    """Return the ids of a batch by feature."""
    day, order, ids = chosen.day, chosen.order, {}
    seen, shown = log.item[chosen.events], day.item[order]
    for name, of_track in (("artist", log.artist), ("album", log.album)):
        ids[f"{name}_history"] = RaggedIds(of_track[seen], chosen.splits)
        ids[name] = of_track[shown]
    ids |= {"item_history": RaggedIds(seen, chosen.splits), "item": shown}
    return ids | {"user": day.user[order], "hour": day.asked[order] % DAY // 3_600}


def known(engine: EmbeddingEngine, batch, log: Log, chosen: Chosen) -> dict:
    """Return what else the ranker needs of a placed batch, on the devices."""
    day, order = chosen.day, chosen.order
    labels, axes = day.listened[order], engine.layout.axes

    def of_events(values):
        return place_values(engine, batch, "item_history", values[chosen.events], chosen.splits)

    of_shown = np.arange(len(order) + 1) * labels.shape[1]
    asked = day.asked[order].reshape(axes.replicas, -1)
    return {
        "actions": of_events(log.action),
        "times": of_events(log.time),
        "labels": place_values(engine, batch, "item", labels.reshape(-1), of_shown),
        "asked": jax.device_put(asked, axes.sharding(axes.batch_axes)),
    }
