"""Operands for the compiled update kernel, and what it has to return, by a float32 NumPy loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optimizer_cases
from kernel_cases import magnitudes, row_numbers, stored, update_of, widened

from tpu_embed import optimizers as o

ALL = optimizer_cases.ALL | {"clipvalue": (-40.0, None)}
BY_RATE = {"multiply_linear_by_learning_rate": True}
RULES = {
    "sgd": o.SGD(0.1),
    "sgd, all options": o.SGD(0.1, **ALL),
    "momentum": o.Momentum(0.1, momentum=0.5, weight_decay_factor=0.03),
    "nesterov": o.Momentum(0.1, momentum=0.5, use_nesterov=True, **ALL),
    "adagrad": o.Adagrad(0.1),
    "adagrad, all options": o.Adagrad(0.1, epsilon=0.1, **ALL),
    "rowwise": o.RowWiseAdagrad(0.1),
    "rowwise, all options": o.RowWiseAdagrad(0.1, epsilon=0.25, **ALL),
    "adam": o.Adam(0.1),
    "adam, outside": o.Adam(0.1, epsilon=0.1, sum_inside_sqrt=False, **ALL),
    "ftrl": o.FTRL(0.1, l1_regularization_strength=3.0, l2_regularization_strength=0.2, beta=0.3),
    "ftrl, times the rate": o.FTRL(0.1, l1_regularization_strength=9.0, **BY_RATE, **ALL),
    "ftrl, no rate": o.FTRL(0.0, **ALL),
}
R = 60
COUNTS = (100, 50)
UPDATE_BAGS = sum(COUNTS)
STARTS = (tuple(range(7, 100, 7)), tuple(range(103, 145, 3)))
"""Bags of two features, and the first bags of all blocks but the first."""


def sgd(w, g, lr):
    return (w - lr * g,)


def momentum(w, m, g, lr, mu, *, flag):
    m = mu * m + g
    return w - lr * (g + mu * m if flag else m), m


def adagrad(w, a, g, lr, epsilon):
    a = a + g * g
    return w - lr * g / (np.sqrt(a) + epsilon), a


def rowwise_adagrad(w, a, g, lr, epsilon):
    squares = np.zeros(1 << (g.size - 1).bit_length(), np.float32)
    squares[: g.size] = g * g
    while squares.size > 1:
        squares = squares[: squares.size // 2] + squares[squares.size // 2 :]
    a = a + squares[0] * np.float32(1 / g.size)
    return w - g * (lr / (np.sqrt(a) + epsilon)), a


def adam(w, m, v, g, alpha, epsilon, keep_m, take_m, keep_v, take_v, *, flag):
    m, v = keep_m * m + take_m * g, keep_v * v + take_v * (g * g)
    return w - alpha * m / (np.sqrt(v + epsilon) if flag else np.sqrt(v) + epsilon), m, v


def ftrl(w, a, z, g, take, inverse, l1, twice_l2, beta, still):
    if still:
        return w, a, z
    total = a + g * g
    z = z + take * g - (np.sqrt(total) - np.sqrt(a)) * w * inverse
    new = (l1 * np.sign(z) - z) / ((np.sqrt(total) + beta) * inverse + twice_l2)
    return np.where(np.abs(z) <= l1, np.float32(0), new), total, z


STEPS = {f.__name__: f for f in (sgd, momentum, adagrad, rowwise_adagrad, adam, ftrl)}


def to_bfloat16(x):
    """Return float32 numbers rounded to bfloat16."""
    return widened(stored(x, "bfloat16"))


def sums_in_order(given, blocks, rounds=False, size=R):
    """Return row -> gradient: within a block, feature after feature, then over the blocks.

    With `rounds` the sum of each block is rounded to bfloat16 before these are added up.
    """
    rows, bags, weights, gradients = given
    joined, ends = np.concatenate(gradients), np.cumsum([len(g) for g in gradients])
    found, zero = {}, np.zeros(joined.shape[1], np.float32)
    for i in np.flatnonzero((rows >= 0) & (rows < size)):
        bag = i if bags is None else bags[i]
        gradient = joined[bag]
        if weights is not None:
            gradient = gradient * weights[i] if weights[i] else zero
        feature = int(np.searchsorted(ends, bag, side="right"))
        block = sum(bag >= start for start in blocks[feature]) if blocks else 0
        of_row = found.setdefault(int(rows[i]), {})
        of_row[block] = of_row.get(block, zero) + gradient
    added = to_bfloat16 if rounds else np.asarray
    return {row: sum((added(of[b]) for b in sorted(of)), zero) for row, of in found.items()}


def expected_update(table, slots, given, rule, blocks, rounds=False):
    """Return table and slots after the rule, row by row."""
    keep, low, high, least, most, *numbers = np.asarray(rule.operand())
    options = {"flag": rule.flag} if rule.kind in ("momentum", "adam") else {}
    table, slots = table.copy(), [slot.copy() for slot in slots]
    for row, gradient in sums_in_order(given, blocks, rounds).items():
        w, gradient = widened(table[row]) * keep, np.clip(gradient, low, high)
        held = [slot[row] for slot in slots]
        w, *held = STEPS[rule.kind](w, *held, gradient, *numbers, **options)
        dtype = "float32" if table.dtype == np.float32 else "bfloat16"
        table[row] = stored(np.clip(w, least, most), dtype)
        for slot, value in zip(slots, held, strict=True):
            slot[row] = value
    return table, *slots


def compiled(optimizer, step=3):
    return optimizer.compiled_rule(jnp.int32(step), jnp.float32(optimizer.learning_rate))


def draw_update(rng, optimizer, dim, dtype, *, n=2000, alone=False, row_type=np.int32):
    """Return table, slots and gradients; one row has almost half of the ids."""
    table = stored(rng.normal(size=(R, dim)).astype(np.float32), dtype)
    shapes = optimizer.slot_shapes(dim, jnp.float32).values()
    slots = [rng.uniform(0.1, 2, (R, *slot.shape)).astype(np.float32) for slot in shapes]
    rows = row_numbers(rng, R - 5, n, row_type)  # some rows have no gradient at all
    rows = np.where((rows == R - 5) | (rows == R - 4), -1, rows)
    rows = np.where(rng.random(n) < 0.4, 7, rows).astype(row_type)
    if alone:  # partial sums: one gradient an id
        return table, slots, (rows, None, None, (magnitudes(rng, (n, dim)),))
    bags = np.sort(rng.integers(0, UPDATE_BAGS, n)).astype(np.int32)
    weights = magnitudes(rng, n)
    gradients = tuple(magnitudes(rng, (count, dim)) for count in COUNTS)
    return table, slots, (rows, bags, weights, gradients)


def updated(table, slots, given, rule, blocks, rounds=False):
    """Return table and slots after the compiled kernel, which works in place."""
    counts = tuple(len(gradient) for gradient in given[-1])

    @functools.partial(jax.jit, donate_argnums=0)
    def run(held, given):
        options = {"bags": counts, "blocks": blocks, "rounds": rounds}
        return update_of(held[0], held[1:], *given, rule=rule, **options)

    held = tuple(jnp.array(array) for array in (table, *slots))
    places = [array.unsafe_buffer_pointer() for array in held]
    new = run(held, given)
    assert [array.unsafe_buffer_pointer() for array in new] == places
    return new
