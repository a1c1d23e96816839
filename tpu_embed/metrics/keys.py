"""How the living vocabularies of an engine fare: figures for people, and scalars to plot.

Input: an engine. Output: dicts of numbers.
"""

from __future__ import annotations

from typing import Any

from tpu_embed._checks import check_int, message
from tpu_embed.core.engine import EmbeddingEngine
from tpu_embed.vocabulary import Vocabularies, describe_keys


def vocabulary_scalars(engine: EmbeddingEngine) -> dict[str, float]:
    """Return numbers to plot of every living vocabulary, by tag; it costs no pass over the keys.

    Args:
      engine: the engine.

    Returns:
      Under `vocabularies/<table>/`: `keys` and `occupancy`, as `counters` has them; totals of keys
      `admitted`, `evicted`, `expired`, `unseen` and `forgotten` in the batches that were admitted;
      and under `vocabularies/<table>/last/` how many were `admitted`, `evicted`, `expired` and
      `unseen` in the last of them. Of a table on the host with row numbers, the keys are the ids
      that the devices hold.

    Raises:
      ValueError: the engine has no living vocabulary, and no table on the host.

    Example:
      >>> import jax, tpu_embed
      >>> words = tpu_embed.DynamicVocabulary()
      >>> table = tpu_embed.TableConfig(8, 2, name="word", vocabulary=words)
      >>> engine = EmbeddingEngine(tpu_embed.FeatureConfig(table))
      >>> state = engine.init(jax.random.key(0))
      >>> state = engine.set_rows(state, "word", keys=["red"], values=[[1, 2]])
      >>> vocabulary_scalars(engine)["vocabularies/word/occupancy"]
      0.125
    """
    maps, found = _maps(engine), {}
    last = maps.last
    for name, totals in maps.admitted_counters.items():
        numbers: dict[str, float] = {"occupancy": totals["keys"] / maps.capacity(name), **totals}
        if name in last:
            numbers |= {f"last/{what}": n for what, n in last[name].counts().items()}
        found |= {f"vocabularies/{name}/{what}": number for what, number in numbers.items()}
    return found


def vocabulary_statistics(
    engine: EmbeddingEngine, *, hottest: int = 10
) -> dict[str, dict[str, Any]]:
    """Return how full each living vocabulary is, how old its keys are, and which ones are busy.

    It takes time in proportion to the tables' capacities. `python -m tpu_embed vocabulary` prints
    the same figures of a checkpoint.

    Args:
      engine: the engine.
      hottest: how many keys to list in each order.

    Returns:
      One dict per table, as of the batches that were admitted: `step`; `capacity`, `keys` and
      `occupancy`; `waiting`, the keys that are counted and have no row; `ages`, by share of the
      keys, how many steps ago that many of them had been seen; `totals` and `per_step` of keys
      "admitted", "evicted", "expired", "unseen" and "forgotten"; `most_batches` and `seen_last`,
      the keys that the most batches had and that were seen last, as dicts of `key`, `row`,
      `batches_seen` and `last_seen`; and `waiting_most`, dicts of `key` and `count`.

    Raises:
      ValueError: the engine has no living vocabulary, and no table on the host; `hottest` is not an
        integer of at least 0.
    """
    most, maps, found = check_int("hottest", hottest, minimum=0), _maps(engine), {}
    for name, counted in maps.admitted_counters.items():
        totals = {what: count for what, count in counted.items() if what != "keys"}
        found[name] = describe_keys(maps.scores(name), maps.capacity(name), totals, most)
    return found


def _maps(engine: EmbeddingEngine) -> Vocabularies:
    if engine.vocabularies is None:
        expected, got = "a table with vocabulary=DynamicVocabulary(…)", "none"
        raise ValueError(message("engine", expected=expected, got=got))
    return engine.vocabularies
