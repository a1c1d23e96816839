"""The calls of `sanitize.py`: every kernel on random operands, some of them invalid.

Input: the library and the number of seeds. Output: the number of calls, or an error.
"""

import functools
import itertools
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from facade_cases import mesh
from host_cases import check_host_kernels
from jax.sharding import PartitionSpec
from kernel_cases import stored as stored_rows
from kernel_cases import sums_of, update_of, widened
from random_rows import FIELDS, check_random_rows
from update_cases import sums_in_order
from vocabulary_cases import check_random_keys, check_random_map

from tpu_embed.kernels import cpu, host_native, reference
from tpu_embed.kernels.stochastic import Draws, Rounding, RowPlaces
from tpu_embed.optimizers import FTRL, SGD, Adagrad, Adam, Momentum, RowWiseAdagrad
from tpu_embed.storage import HostRows

DEVICES = 8
CONTENTS = 4  # drawn for every shape that is compiled
COUNTS = [(1,), (0, 1), (2,), (1, 3), (0, 2, 1), (3, 0), (0,)]  # bags of every feature
done = Counter()


# -- operands, valid and invalid -------------------------------------------------------------------

RULES = [
    SGD,
    Momentum,
    functools.partial(Momentum, use_nesterov=True),
    Adagrad,
    RowWiseAdagrad,
    Adam,
    functools.partial(Adam, sum_inside_sqrt=False),
    functools.partial(FTRL, l1_regularization_strength=0.1, l2_regularization_strength=0.1),
]
OPTIONS = [
    {},
    {"clipvalue": (-0.5, None)},
    {"clip_weight_min": -1.0, "clip_weight_max": 0.5, "weight_decay_factor": 0.01},
]


def draw_size(rng):
    """Return a number of ids: mostly few, now and then enough for a parallel sort."""
    return int(rng.integers(16_385, 40_000) if rng.random() < 0.15 else rng.integers(1, 400))


def draw_ids(rng, n, rows, dtype):
    """Return ids in and around [0, rows), a fifth of them far outside."""
    limits = np.iinfo(dtype)
    wild = rng.choice(np.array([limits.min, limits.max, limits.min + 1, -rows, rows], dtype), n)
    return np.where(rng.random(n) < 0.2, wild, rng.integers(-1, rows + 1, n).astype(dtype))


def draw_numbers(rng, shape, *, tame, zeros=0.0):
    """Return float32 numbers; unless tame, with infinities and NaN among them."""
    numbers = rng.normal(size=shape).astype(np.float32)
    numbers[rng.random(shape) < zeros] = 0
    if not tame:
        wild = np.array([np.inf, -np.inf, np.nan, 3e38, 1e-45], np.float32)
        numbers = np.where(rng.random(shape) < 0.2, rng.choice(wild, shape), numbers)
    return numbers


def draw_bags(rng, n, bags, *, tame):
    """Return bags in ascending order; unless tame, in any order and far outside."""
    drawn = rng.integers(0, bags + 1, n) if tame else draw_ids(rng, n, bags, np.int32)
    return (np.sort(drawn) if tame or rng.random() < 0.5 else drawn).astype(np.int32)


def draw_places(rng, rows):
    """Return which rows of one to three tables the local rows are, by any steps."""
    count = int(rng.integers(1, min(4, rows + 1)))
    firsts = (0, *np.sort(rng.choice(np.arange(1, rows), count - 1, replace=False)).tolist())
    steps = rng.integers(-(2**40), 2**40, count + 1).tolist()
    return RowPlaces(firsts, tuple(steps[1:]), steps[0])


def draw_draws(rng, places, rows, *, numbered):
    """Return what random bits depend on, the shard as `[1]`; `numbered`: a number of each row."""
    tables, shard = (rng.integers(0, 2**32, n, np.uint32) for n in (len(places.firsts), 1))
    numbers = rng.integers(0, 2**32, rows, np.uint32) if numbered else None
    return Draws(tables, shard, numbers)


# -- judges of results -----------------------------------------------------------------------------


def same_as(meaning):
    """Return a judge: the bits of `meaning`, where operands are valid."""
    meaning = jax.jit(meaning)

    def judge(found, operands, valid):
        if valid:
            for got, wanted in zip(found, jax.tree.leaves(meaning(*operands)), strict=True):
                np.testing.assert_array_equal(got, wanted)

    return judge


def gradient_sums(rows, ids, bags, weights, gradients, options):
    """Return the sums `[rows, D]`, by blocks of bags in ascending order, and which are touched."""
    _, starts, rounds = options.values()
    bags = np.arange(len(ids)) if bags is None else bags
    kept = (ids >= 0) & (ids < rows) & (bags >= 0) & (bags < sum(map(len, gradients)))
    given = ids[kept], bags[kept], None if weights is None else weights[kept], gradients
    totals, touched = np.zeros((rows, gradients[0].shape[1]), np.float32), np.zeros(rows, bool)
    for row, total in sums_in_order(given, starts, rounds, size=rows).items():
        totals[row], touched[row] = total, True
    return totals, touched


def update_judge(optimizer, options):
    """Return a judge of updates: untouched rows to the bit, others where operands are valid."""
    rule = jax.jit(optimizer.update_rows)

    def judge(found, operands, valid):
        draws, table, slots, *given = operands
        if len(given) > 4:  # routed, by numbers without a meaning: only the sanitizers judge
            return
        with np.errstate(all="ignore"):
            sums, touched = gradient_sums(len(table), *given, options)
        names = optimizer.compiled_rule(jnp.int32(3), jnp.float32(0.1)).slots
        for got, was in zip(found, [table, *(slots[name] for name in names)], strict=True):
            np.testing.assert_array_equal(got[~touched], was[~touched])
        if valid:
            rows, new = rule(widened(table), slots, sums, jnp.int32(3), jnp.float32(0.1))
            for got, wanted in zip(found, [rows, *(new[name] for name in names)], strict=True):
                # bfloat16 has 8 bits, and at random either neighbour is right; XLA may round once
                # where the kernel rounds twice.
                close = 1e-4 if got.dtype == np.float32 else 2.0**-7 if draws is None else 2.0**-6
                got, wanted = widened(got)[touched], wanted[touched]
                np.testing.assert_allclose(got, wanted, rtol=close, atol=1e-5)

    return judge


# -- kernels ---------------------------------------------------------------------------------------


def on_all_devices(call):
    """Return `call` on operands that every device gets at once, and one device's results."""
    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec("d"), "check_vma": False}
    mapped = jax.jit(jax.shard_map(call, mesh=mesh(DEVICES), **specs))

    def run(*operands):
        results = mapped(*jax.tree.map(lambda x: np.concatenate([x] * DEVICES), operands))
        parts = [np.split(np.asarray(x), DEVICES) for x in jax.tree.leaves(results)]
        for part in parts:
            np.testing.assert_array_equal(part, [part[0]] * DEVICES)
        return [part[0] for part in parts]

    return run


def check(rng, name, native, draw, judge):
    """Call `native` on operands that `draw(tame)` returns, with whether they are valid."""
    many = rng.random() < 0.3
    run = on_all_devices(native) if many else jax.jit(native)
    for content in range(CONTENTS):
        operands, valid = draw(content < CONTENTS // 2)
        found = [np.asarray(x) for x in jax.tree.leaves(run(*operands))]
        done[name] += DEVICES if many else 1
        judge(found, operands, valid)


def gather_and_set(rng, dtype):
    rows, n = int(rng.integers(1, 300)), draw_size(rng)
    trailing = tuple(rng.integers(1, 141, rng.integers(0, 2))) if n < 16_384 else ()
    kind = rng.choice([np.float32, np.uint16, np.int32, np.uint8])

    def table(length):
        return rng.integers(0, 100, (length, *trailing)).astype(kind)

    def draw_set(tame):
        ids = draw_ids(rng, n, rows, dtype)
        present = (ids >= 0) & (ids < rows)
        first = np.zeros(n, bool)
        first[np.unique(ids, return_index=True)[1]] = True
        return (table(rows), np.where(first | ~present, ids, dtype(-1)), table(n)), True

    def draw_gather(tame):
        return (table(rows), draw_ids(rng, n, rows, dtype)), True

    check(rng, "gather_rows", cpu.gather_rows, draw_gather, same_as(reference.gather_rows))
    check(rng, "set_rows", cpu.set_rows, draw_set, same_as(reference.set_rows))


def zeros(rng, dtype):
    """Shapes of no element, of part of a page, and of a large page and parts around it."""
    sizes = [0, 1, int(rng.integers(2, 5000)), int(rng.integers(400_000, 1_500_000))]
    shape = (int(rng.choice(sizes)), *rng.integers(1, 4, rng.integers(0, 2)))
    found = np.asarray(jax.jit(lambda: cpu.zeros(shape, dtype))())
    done["zeros"] += 1
    np.testing.assert_array_equal(found, np.zeros(shape, dtype))


def sort(rng, dtype):
    n, rows = draw_size(rng), int(10 ** rng.uniform(0, 9))

    def draw(tame):
        ids = rng.integers(0, rows, n).astype(dtype) if tame else draw_ids(rng, n, rows, dtype)
        return (ids,), True

    check(rng, "sort_rows", cpu.sort_rows, draw, same_as(reference.sort_rows))


def gather_sum(rng, dtype):
    n, rows, periods = draw_size(rng), int(rng.integers(1, 300)), int(rng.integers(1, 40))
    dim = int(rng.integers(1, 141 if n < 16_384 else 9))
    bags = tuple(periods * count for count in COUNTS[rng.integers(len(COUNTS))])
    stored, has_weights = rng.choice(["float32", "bfloat16"]), rng.random() < 0.5
    options = {"bags": bags}

    def draw(tame):
        segments = draw_bags(rng, n, sum(bags), tame=tame)
        weights = draw_numbers(rng, n, tame=tame, zeros=0.1) if has_weights else None
        source = stored_rows(draw_numbers(rng, (rows, dim), tame=tame), stored)
        operands = source, draw_ids(rng, n, rows, dtype), segments, weights
        return operands, bool((np.diff(segments) >= 0).all())

    meaning = same_as(functools.partial(sums_of, reference.gather_sum, **options))
    check(rng, "gather_sum", functools.partial(sums_of, cpu.gather_sum, **options), draw, meaning)


def update(rng, dtype):
    rows, stored = int(rng.integers(1, 300)), rng.choice(["float32", "bfloat16"])
    counts = tuple(rng.integers(0, 60, rng.integers(1, 5)).tolist())
    has_bags, has_weights = rng.random(2) < 0.6
    n = draw_size(rng) if has_bags else int(rng.integers(0, sum(counts) + 1))
    dim = int(rng.integers(1, 141 if n < 16_384 else 9))
    optimizer = RULES[rng.integers(len(RULES))](0.1, **OPTIONS[rng.integers(len(OPTIONS))])
    slots = optimizer.slot_shapes(dim, np.float32)
    later, starts = int(rng.integers(0, 5)), np.cumsum((0, *counts))
    of_features = [np.sort(rng.integers(a, b + 1, later)) for a, b in itertools.pairwise(starts)]
    blocks = tuple(tuple(one.tolist()) for one in of_features) if later else ()
    options = {"bags": counts, "blocks": blocks, "rounds": bool(rng.random() < 0.5)}
    # New rows are rounded at random, by what the seed and the rows' places or numbers say.
    at_random, numbered = stored == "bfloat16" and rng.random() < 0.5, rng.random() < 0.5
    row_places = draw_places(rng, rows) if at_random else None
    # Routed: the numbers of sums are positions in other operands, of other lengths.
    is_routed, whole, partial = n and rng.random() < 0.5, draw_size(rng), draw_size(rng)

    def native(draws, table, slots, *given):
        rounding = None
        if draws is not None:
            rounding = Rounding(draws._replace(shard=draws.shard[0]), row_places)
        rule = optimizer.compiled_rule(jnp.int32(3), jnp.float32(0.1))
        ordered = [slots[name] for name in rule.slots]
        return update_of(table, ordered, *given, rule=rule, rounding=rounding, **options)

    def draw(tame):
        numbers = functools.partial(draw_numbers, rng, tame=tame)
        held = {k: np.abs(numbers((rows, *s.shape))) + np.float32(0.1) for k, s in slots.items()}
        table = stored_rows(numbers((rows, dim)), stored)
        ids, routes = draw_ids(rng, whole if is_routed else n, rows, dtype), ()
        if is_routed:
            routes = (draw_bags(rng, n, partial, tame=False),)
            routes += (draw_bags(rng, partial, whole, tame=False) if rng.random() < 0.5 else None,)
        own = draw_bags(rng, n, sum(counts), tame=tame) if has_bags else None
        weights = numbers(n, zeros=0.2) if has_weights else None
        gradients = [numbers((count, dim)) for count in counts]
        draws = draw_draws(rng, row_places, rows, numbered=numbered) if at_random else None
        given = ids, own, weights, gradients, *routes
        return (draws, table, held, *given), tame and not routes

    check(rng, "update", native, draw, update_judge(optimizer, options))


def host(rng, dtype):
    """The kernels of the host, on one to five threads."""
    host_native.cores = lambda: int(rng.integers(1, 6))
    host_native.IDS_PER_THREAD = int(rng.choice([10, 20_000]))
    done["host"] += check_host_kernels(rng, dtype, [draw_size(rng) for _ in range(4)])


def vocabulary(rng, dtype):
    """The map from keys to rows, on a stream with all kinds of calls, and the keys of batches."""
    check_random_keys(rng)
    done["vocabulary"] += check_random_map(rng)[-1].step


def storage(rng, dtype):
    """The store of rows, in memory and in a scratch file."""
    path = None if rng.random() < 0.5 else tempfile.gettempdir()
    done["storage"] += check_random_rows(rng, HostRows(FIELDS, path), calls=20)


KERNELS = zeros, gather_and_set, sort, gather_sum, update, host, vocabulary, storage


def main(library, seeds):
    cpu.find = lambda: library
    assert cpu.load().path == library, cpu.load().why_not
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        dtype = [np.int32, np.int64][seed % 2]
        print(f"seed {seed}", end="\r", flush=True)
        with jax.enable_x64(dtype is np.int64):
            for kernel in KERNELS:
                kernel(rng, dtype)
    print(f"{done.total()} calls:", ", ".join(f"{name} {n}" for name, n in sorted(done.items())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
