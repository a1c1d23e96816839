"""The right answers: lookups and updates as float64 loops over bags, as the definitions have them.

Nothing here calls the rest of the package, so a mistake there cannot be repeated here.

Input: tables and slots as NumPy arrays, and the bags of each feature. Output: activations, and the
tables and slots after a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tpu_embed.check.formulas import Slots, Updated

Rule = Callable[[np.ndarray, Slots, np.ndarray, int], Updated]
"""(row [D], its slots, the row's gradient [D], t) -> (row, slots)."""


class Bags(NamedTuple):
    """What a feature looks up in one batch.

    Attributes:
      bags: the (row, weight) pairs of each bag.
      combiner: "sum", "mean" or "sqrtn"; None where a bag is at most one row times its weight.
      shape: the shape of the activation without D; its product is the number of bags.
    """

    bags: list[list[tuple[int, float]]]
    combiner: str | None
    shape: tuple[int, ...]


def gains(bag: list[tuple[int, float]], combiner: str | None) -> list[float]:
    """Return the factor of each row of a bag."""
    weights = [weight for _, weight in bag]
    if combiner == "mean":
        divisor = math.fsum(weights)
    elif combiner == "sqrtn":
        divisor = math.sqrt(math.fsum(weight * weight for weight in weights))
    else:
        return weights
    return [weight / divisor if divisor else 0.0 for weight in weights]


def lookup(table: np.ndarray, feature: Bags) -> np.ndarray:
    """Return the activation of a feature, float64 `[B, …, D]`, from a table `[V, D]`."""
    found = np.zeros((len(feature.bags), table.shape[1]))
    for b, bag in enumerate(feature.bags):
        for (row, _), gain in zip(bag, gains(bag, feature.combiner), strict=True):
            found[b] += gain * table[row]
    return found.reshape(*feature.shape, table.shape[1])


def occurrences(feature: Bags, gradient: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
    """Yield each row that a feature looks up, in batch order, with its gradient `[D]`."""
    flat = np.asarray(gradient, np.float64).reshape(len(feature.bags), -1)
    for bag, of_bag in zip(feature.bags, flat, strict=True):
        for (row, _), gain in zip(bag, gains(bag, feature.combiner), strict=True):
            yield row, gain * of_bag


def summed(found: Iterable[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """Return each row once, with the sum of its gradients."""
    sums: dict[int, np.ndarray] = {}
    for row, gradient in found:
        sums[row] = sums.get(row, 0.0) + gradient
    return list(sums.items())


def update(
    table: np.ndarray,
    slots: Mapping[str, np.ndarray],
    gradients: Iterable[tuple[int, np.ndarray]],
    rule: Rule,
    step: int,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the table `[V, D]` and its slots `[V, …]` after the rule was applied to some rows.

    Args:
      table: the table before.
      slots: its slots before.
      gradients: rows with their gradients; a row that comes twice is updated twice.
      rule: the rule.
      step: t, which is 1 for the first step.
    """
    table = np.array(table, np.float64)
    new = {name: np.array(slot, np.float64) for name, slot in slots.items()}
    for row, gradient in gradients:
        own = {name: slot[row] for name, slot in new.items()}
        table[row], changed = rule(table[row], own, gradient, step)
        for name, value in changed.items():
            new[name][row] = value
    return table, new
