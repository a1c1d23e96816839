"""The compiled update against a float32 NumPy loop, in the documented order of its sums."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import mesh
from jax.sharding import PartitionSpec
from kernel_cases import (
    BAGS,
    DIMS,
    PERIODS,
    REFERENCE_SUMS,
    assert_same_bits,
    draw_sums,
    magnitudes,
    row_numbers,
    stored,
    widened,
)
from pairs import parametrize_pairs

from tpu_embed import optimizers as o
from tpu_embed.kernels import cpu, reference

if cpu.load().path is None:
    pytest.skip(f"compiled library: {cpu.load().why_not}", allow_module_level=True)

ALL = {
    "weight_decay_factor": 0.3,
    "multiply_weight_decay_factor_by_learning_rate": True,
    "clipvalue": (-40.0, None),
    "clip_weight_min": -0.8,
    "clip_weight_max": 0.9,
}
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
    "ftrl, times the rate": o.FTRL(
        0.1, l1_regularization_strength=9.0, multiply_linear_by_learning_rate=True, **ALL
    ),
    "ftrl, no rate": o.FTRL(0.0, **ALL),
}
R = 60
COLUMNS, UPDATE_PERIODS = (2, 1), 50
UPDATE_BAGS = UPDATE_PERIODS * sum(COLUMNS)
STARTS = tuple(range(7, UPDATE_BAGS, 7))


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


def sums_in_order(given, blocks):
    """Return row -> gradient: within a block of bags in the order of ids, then over blocks."""
    rows, bags, weights, factors, gradients = given
    dim = gradients[0].shape[1]
    by_period = [
        g.reshape(-1, n, dim) for g, n in zip(gradients, given_columns(given), strict=True)
    ]
    joined = np.concatenate(by_period, axis=1).reshape(-1, dim)
    found = {}
    for i in range(len(rows)):
        if not 0 <= rows[i] < R:
            continue
        bag = i if bags is None else bags[i]
        gradient, zero = joined[bag], np.zeros(dim, np.float32)
        if factors is not None:
            gradient = gradient * factors[bag] if factors[bag] else zero
        if weights is not None:
            gradient = gradient * weights[i]
        of_row = found.setdefault(int(rows[i]), {})
        block = sum(bag >= start for start in blocks)
        of_row[block] = of_row.get(block, zero) + gradient
    return {row: functools.reduce(np.add, of.values(), zero) for row, of in found.items()}


def given_columns(given):
    return COLUMNS if len(given[-1]) > 1 else (1,)


def expected_update(table, slots, given, rule, blocks):
    """Return table and slots after the rule, row by row."""
    keep, low, high, least, most, *numbers = np.asarray(rule.operand())
    options = {"flag": rule.flag} if rule.kind in ("momentum", "adam") else {}
    table, slots = table.copy(), [slot.copy() for slot in slots]
    for row, gradient in sums_in_order(given, blocks).items():
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
        return table, slots, (rows, None, None, None, (magnitudes(rng, (n, dim)),))
    bags = np.sort(rng.integers(0, UPDATE_BAGS, n)).astype(np.int32)
    weights, factors = magnitudes(rng, n), magnitudes(rng, UPDATE_BAGS)
    gradients = tuple(magnitudes(rng, (UPDATE_PERIODS * c, dim)) for c in COLUMNS)
    return table, slots, (rows, bags, weights, factors, gradients)


def updated(table, slots, given, rule, blocks):
    """Return table and slots after the compiled kernel, which works in place."""
    columns = given_columns(given)
    periods = given[-1][0].shape[0] // columns[0]

    @functools.partial(jax.jit, donate_argnums=0)
    def run(held, given):
        options = {"bags_per_period": columns, "periods": periods, "blocks": blocks}
        return cpu.update_rows(held[0], held[1:], *given, rule=rule, **options)

    held = tuple(jnp.array(array) for array in (table, *slots))
    places = [array.unsafe_buffer_pointer() for array in held]
    new = run(held, given)
    assert [array.unsafe_buffer_pointer() for array in new] == places
    return new


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "dims", [(5, 130), pytest.param((1, 20), marks=pytest.mark.whole)], ids=str
)
def test_every_rule(name, dtype, dims):
    rule = compiled(RULES[name])
    for dim in dims:
        rng = np.random.default_rng(dim)
        table, slots, given = draw_update(rng, RULES[name], dim, dtype)
        found = updated(table, slots, given, rule, STARTS)
        assert_same_bits(found, expected_update(table, slots, given, rule, STARTS))
        assert np.any(np.asarray(found[0]) != table) or rule.kind == "ftrl"


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["adam", "rowwise"])
def test_every_dimension(name, dim):
    table, slots, given = draw_update(np.random.default_rng(dim), RULES[name], dim, "float32")
    rule = compiled(RULES[name])
    found = updated(table, slots, given, rule, STARTS)
    assert_same_bits(found, expected_update(table, slots, given, rule, STARTS))


@pytest.mark.parametrize("missing", ["weights", "factors", "both", "bags", "64 bits"])
@pytest.mark.parametrize("blocks", [(), (1,), (20, 21, 77), tuple(range(3, UPDATE_BAGS, 3))])
def test_what_may_be_missing(missing, blocks):
    rng, row_type = np.random.default_rng(8), np.int64 if missing == "64 bits" else np.int32
    optimizer, alone = RULES["adagrad"], missing == "bags"
    drawn = draw_update(rng, optimizer, 20, "float32", alone=alone, row_type=row_type)
    table, slots, (rows, bags, weights, factors, gradients) = drawn
    weights = None if missing in ("weights", "both") else weights
    factors = None if missing in ("factors", "both") else factors
    given, rule = (rows, bags, weights, factors, gradients), compiled(optimizer)
    with jax.enable_x64(missing == "64 bits"):
        found = updated(table, slots, given, rule, blocks)
    assert_same_bits(found, expected_update(table, slots, given, rule, blocks))


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_columns_in_another_order(order):
    """The bags of a period in any order: gradients given so give what reordered ones give."""
    rng = np.random.default_rng(9)
    table, slots, (*given, gradients) = draw_update(rng, RULES["adam"], 20, "float32")
    options = {"bags_per_period": COLUMNS, "periods": UPDATE_PERIODS, "blocks": STARTS}
    run = functools.partial(cpu.update_rows, rule=compiled(RULES["adam"]), **options)
    joined = reference.join_features(gradients, UPDATE_PERIODS, order)
    in_order = reference.by_feature(joined, COLUMNS, UPDATE_PERIODS)
    found = jax.jit(functools.partial(run, order=order))(table, slots, *given, gradients)
    assert_same_bits(found, jax.jit(run)(table, slots, *given, in_order))


@pytest.mark.parametrize("name", ["adagrad", "rowwise"])
def test_routed_entries_tell_their_partial_sums(name):
    """Their blocks are the partial sums of their route, however the bags are numbered."""
    rng, rule = np.random.default_rng(12), compiled(RULES[name])
    table, slots, given = draw_update(rng, RULES[name], 20, "float32")
    rows, bags, weights, factors, gradients = given
    # By row, and then in batch order; a partial sum is a run of equal rows and blocks.
    present = np.flatnonzero((rows >= 0) & (rows < R))
    order = present[np.argsort(rows[present], kind="stable")]
    runs = np.stack([rows[order], np.searchsorted(STARTS, bags[order], side="right")])
    first = np.concatenate([[True], np.any(np.diff(runs), axis=0)])
    whole, merged = np.unique(runs[0, first], return_inverse=True)
    sums, merged = (first.cumsum() - 1).astype(np.int32), merged.astype(np.int32)
    # Bag b gets the number anew[b].
    anew = rng.permutation(UPDATE_BAGS).astype(np.int32)
    joined = np.asarray(reference.join_features(gradients, UPDATE_PERIODS))
    renumbered = factors[np.argsort(anew)], (joined[np.argsort(anew)],)
    run = functools.partial(cpu.update_rows, rule=rule, bags_per_period=(1,), periods=UPDATE_BAGS)
    routed = whole.astype(np.int32), anew[bags[order]], weights[order], *renumbered, sums, merged
    found = jax.jit(run)(table, slots, *routed)
    assert_same_bits(found, expected_update(table, slots, given, rule, STARTS))


def test_blocks_matter():
    """The order of the sums shows in their bits, or the tests above would show nothing."""
    drawn = draw_update(np.random.default_rng(8), RULES["sgd"], 20, "float32")
    sums = {
        np.stack(list(sums_in_order(drawn[2], blocks).values())).tobytes()
        for blocks in ((), (70, 71))
    }
    assert len(sums) == 2


@pytest.mark.parametrize("name", ["sgd, all options", "adagrad", "adam", "rowwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_and_rows_that_are_not_finite(name, dtype):
    rng, rule = np.random.default_rng(9), compiled(RULES[name])
    table, slots, given = draw_update(rng, RULES[name], 20, dtype)
    numbers = widened(table).copy()
    numbers[::7, 3], numbers[1::7, 4] = np.nan, np.inf
    table = stored(numbers, dtype)
    for gradient in given[-1]:
        gradient[::5, 0], gradient[1::5, 1], gradient[2::5, 2] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        expected = expected_update(table, slots, given, rule, STARTS)
    found = updated(table, slots, given, rule, STARTS)
    assert_same_bits(
        [widened(np.asarray(found[0])), *found[1:]], [widened(expected[0]), *expected[1:]]
    )
    assert np.isnan(widened(np.asarray(found[0]))).any()


@parametrize_pairs(dim=[1, 7, 64], least=[None, 0.0, -0.0], most=[None, 0.0, -0.0])
def test_bounds_that_are_zero(dim, least, most):
    """Of zeros of different signs, the positive one is larger."""
    optimizer = o.SGD(0.1, clip_weight_min=least, clip_weight_max=most)
    table = np.random.default_rng(dim).choice(np.float32([-0.0, 0.0, 1, -1]), (R, dim))
    rows, gradients = np.arange(R, dtype=np.int32), np.zeros((R, dim), np.float32)
    (found,) = updated(table, [], (rows, None, None, None, (gradients,)), compiled(optimizer), 0)
    rate = jnp.float32(optimizer.learning_rate)
    expected = jax.jit(optimizer.update_rows)(table, {}, gradients, 1, rate)[0]
    assert_same_bits(found, expected)


def test_no_ids_change_nothing():
    rng = np.random.default_rng(10)
    table, slots, given = draw_update(rng, RULES["adam"], 5, "float32")
    rows = np.full_like(given[0], -1)
    found = updated(table, slots, (rows, *given[1:]), compiled(RULES["adam"]), STARTS)
    assert_same_bits(found, (table, *slots))
    none = [array[:0] for array in given[:3]]
    found = updated(table, slots, (*none, *given[3:]), compiled(RULES["adam"]), STARTS)
    assert_same_bits(found, (table, *slots))


# -- calls -----------------------------------------------------------------------------------------


def test_eight_devices_call_at_once():
    """Each has more tasks than the pool has threads; none waits for another."""
    devices, rng, optimizer = 8, np.random.default_rng(11), RULES["adagrad"]
    rule = compiled(optimizer)
    drawn = [draw_update(rng, optimizer, 64, "float32", n=20_000) for _ in range(devices)]
    sums = [draw_sums(rng, 64, "float32") for _ in range(devices)]

    def device(held, given, sums):
        held, given, sums = jax.tree.map(lambda x: x[0], (held, given, sums))
        options = {
            "bags_per_period": COLUMNS,
            "periods": UPDATE_PERIODS,
            "blocks": STARTS,
        }
        new = cpu.update_rows(held[0], held[1], *given, rule=rule, **options)
        ordered = cpu.sort_rows(given[0])
        summed = cpu.gather_sum(*sums, bags=BAGS, periods=PERIODS)
        return jax.tree.map(lambda x: x[None], (new, ordered, summed))

    run = jax.jit(
        jax.shard_map(
            device,
            mesh=mesh(devices),
            in_specs=PartitionSpec("d"),
            out_specs=PartitionSpec("d"),
            check_vma=False,
        )
    )
    operands = [(table, slots) for table, slots, _ in drawn], [given for *_, given in drawn], sums
    stacked = [jax.tree.map(lambda *x: np.stack(x), *each) for each in operands]
    first = jax.device_get(run(*stacked))
    for _ in range(10):
        assert_same_bits(run(*stacked), first)
    for d, (table, slots, given) in enumerate(drawn):
        new, ordered, summed = jax.tree.map(lambda x, d=d: x[d], first)
        assert_same_bits(new, expected_update(table, slots, given, rule, STARTS))
        assert_same_bits(ordered[1], np.argsort(given[0], kind="stable").astype(np.int32))
        assert_same_bits(summed, REFERENCE_SUMS(*sums[d])[0])


def test_operands_that_do_not_fit_are_refused():
    """By the kernel itself, before it touches memory."""
    source, index, segments, weights, factors = draw_sums(np.random.default_rng(0), 5, "float32")
    rest = {"bags": BAGS, "periods": PERIODS}
    table, slots, given = draw_update(np.random.default_rng(0), RULES["adagrad"], 5, "float32")
    blocks = {"bags_per_period": COLUMNS, "periods": UPDATE_PERIODS, "blocks": ()}
    rule = compiled(RULES["adagrad"])
    calls = {
        "gather_sum: one segment": lambda: cpu.gather_sum(
            source, index, segments[1:], weights, factors, **rest
        ),
        "gather_sum: the widths": lambda: cpu.gather_sum(
            source, index, segments, weights, factors, **rest, widths=(1,)
        ),
        "gather_sum: one weight": lambda: cpu.gather_sum(
            source, index, segments, weights[1:], factors, **rest
        ),
        "gather_sum: one factor": lambda: cpu.gather_sum(
            source, index, segments, weights, factors[1:], **rest
        ),
        "set: shapes differ": lambda: cpu.set_rows(source, index, source[: len(index) - 1]),
        "update: slots of another length": lambda: cpu.update_rows(
            table, [slots[0][1:]], *given, rule=rule, **blocks
        ),
        "update: ids, bags": lambda: cpu.update_rows(
            table, slots, given[0], given[1][1:], *given[2:], rule=rule, **blocks
        ),
        "update: gradients of another size": lambda: cpu.update_rows(
            table, slots, *given[:-1], given[-1][::-1], rule=rule, **blocks
        ),
        "row numbers must be int32": lambda: cpu.gather_rows(source, index.astype(np.int16)),
    }
    for said, call in calls.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"tpu_embed: {said}"):
            jax.block_until_ready(jax.jit(call)())
