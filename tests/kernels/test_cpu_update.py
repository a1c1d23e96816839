"""The compiled update against a float32 NumPy loop, in the documented order of its sums."""

import functools

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
import update_cases
from facade_cases import mesh
from jax.sharding import PartitionSpec
from kernel_cases import BAGS, DIMS, REFERENCE_SUMS, assert_same_bits, draw_sums, sums_of
from pairs import parametrize_pairs
from update_cases import COUNTS, RULES, STARTS, R, compiled, draw_update, expected_update, updated

from tpu_embed import optimizers as o
from tpu_embed.kernels import cpu

if cpu.load().path is None:
    pytest.skip(f"compiled library: {cpu.load().why_not}", allow_module_level=True)


def check(name, dim, dtype="float32", blocks=STARTS, rounds=False):
    """Update rows; return those before, and after."""
    table, slots, given = draw_update(np.random.default_rng(dim), RULES[name], dim, dtype)
    rule = compiled(RULES[name])
    found = updated(table, slots, given, rule, blocks, rounds)
    assert_same_bits(found, expected_update(table, slots, given, rule, blocks, rounds))
    return table, np.asarray(found[0])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dims", [(1, 20), (5, 130)], ids=str)
@pytest.mark.quick(4)
def test_every_rule(name, dtype, dims):
    for dim in dims:
        before, after = check(name, dim, dtype)
        assert np.any(after != before) or RULES[name] == RULES["ftrl, no rate"]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["adam", "rowwise"])
@pytest.mark.quick(6)
def test_every_dimension(name, dim):
    check(name, dim)


@pytest.mark.parametrize("dim", [1, 7, 20, 130])
@pytest.mark.parametrize("name", ["adagrad", "rowwise"])
@pytest.mark.parametrize("blocks", [(), STARTS], ids=["one block", "blocks"])
@pytest.mark.quick(8)
def test_sums_of_blocks_are_rounded(name, dim, blocks):
    """Rows of a single gradient are rounded, too, and the sum over the blocks is not."""
    check(name, dim, blocks=blocks, rounds=True)


@pytest.mark.parametrize("missing", ["weights", "bags", "64 bits"])
@pytest.mark.parametrize("blocks", [(), ((1,), (100,)), ((20, 21, 77), (90, 99, 150)), STARTS])
@pytest.mark.quick(5)
def test_what_may_be_missing(missing, blocks):
    row_type, alone = np.int64 if missing == "64 bits" else np.int32, missing == "bags"
    options = {"alone": alone, "row_type": row_type}
    rng, rule = np.random.default_rng(8), compiled(RULES["adagrad"])
    table, slots, given = draw_update(rng, RULES["adagrad"], 20, "float32", **options)
    if missing == "weights":
        given = (*given[:2], None, given[3])
    blocks = () if alone else blocks
    with jax.enable_x64(missing == "64 bits"):
        found = updated(table, slots, given, rule, blocks)
    assert_same_bits(found, expected_update(table, slots, given, rule, blocks))


def test_blocks_matter():
    """The order of the sums shows in their bits, or the tests above would show nothing."""
    _, _, given = draw_update(np.random.default_rng(8), RULES["sgd"], 20, "float32")
    one, several = (
        update_cases.sums_in_order(given, blocks) for blocks in ((), ((70, 71), (110, 120)))
    )
    assert any(np.any(one[row] != several[row]) for row in one)


@pytest.mark.parametrize("name", ["sgd, all options", "adagrad", "adam", "rowwise"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.quick(2)
def test_gradients_and_rows_that_are_not_finite(name, dtype):
    rng, rule = np.random.default_rng(9), compiled(RULES[name])
    table, slots, given = draw_update(rng, RULES[name], 20, dtype)
    numbers = cases.widened(table).copy()
    numbers[::7, 3], numbers[1::7, 4] = np.nan, np.inf
    table = cases.stored(numbers, dtype)
    for gradient in given[-1]:
        gradient[::5, 0], gradient[1::5, 1], gradient[2::5, 2] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        expected = expected_update(table, slots, given, rule, STARTS)
    found = updated(table, slots, given, rule, STARTS)
    rows = cases.widened(np.asarray(found[0]))
    assert_same_bits([rows, *found[1:]], [cases.widened(expected[0]), *expected[1:]])
    assert np.isnan(rows).any()


@parametrize_pairs(dim=[1, 7, 64], least=[None, 0.0, -0.0], most=[None, 0.0, -0.0])
@pytest.mark.quick(3)
def test_bounds_that_are_zero(dim, least, most):
    """Of zeros of different signs, the positive one is larger."""
    optimizer = o.SGD(0.1, clip_weight_min=least, clip_weight_max=most)
    table = np.random.default_rng(dim).choice(np.float32([-0.0, 0.0, 1, -1]), (R, dim))
    rows, gradients = np.arange(R, dtype=np.int32), np.zeros((R, dim), np.float32)
    (found,) = updated(table, [], (rows, None, None, (gradients,)), compiled(optimizer), ())
    rate = jnp.float32(optimizer.learning_rate)
    expected = jax.jit(optimizer.update_rows)(table, {}, gradients, 1, rate)[0]
    assert_same_bits(found, expected)


def test_no_ids_change_nothing():
    table, slots, given = draw_update(np.random.default_rng(10), RULES["adam"], 5, "float32")
    for rows in (np.full_like(given[0], -1), given[0][:0]):
        now = rows, *(x[: len(rows)] for x in given[1:3]), given[3]
        found = updated(table, slots, now, compiled(RULES["adam"]), STARTS)
        assert_same_bits(found, (table, *slots))


# -- calls -----------------------------------------------------------------------------------------


def test_eight_devices_call_at_once():
    """Each has more tasks than the pool has threads; none waits for another."""
    devices, rng, optimizer = 8, np.random.default_rng(11), RULES["adagrad"]
    rule = compiled(optimizer)
    drawn = [draw_update(rng, optimizer, 64, "float32", n=20_000) for _ in range(devices)]
    sums = [draw_sums(rng, 64, "float32") for _ in range(devices)]

    def device(drawn, sums):
        (table, slots, given), sums = jax.tree.map(lambda x: x[0], (drawn, sums))
        new = cases.update_of(table, slots, *given, rule=rule, bags=COUNTS, blocks=STARTS)
        summed = sums_of(cpu.gather_sum, *sums, bags=BAGS)
        return jax.tree.map(lambda x: x[None], (new, cpu.sort_rows(given[0]), summed))

    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec("d")}
    run = jax.jit(jax.shard_map(device, mesh=mesh(devices), check_vma=False, **specs))
    stacked = [jax.tree.map(lambda *x: np.stack(x), *each) for each in (drawn, sums)]
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
    source, index, segments, weights = draw_sums(np.random.default_rng(0), 5, "float32")
    drawn = draw_update(np.random.default_rng(0), RULES["adagrad"], 5, "float32")
    table, slots, (rows, bags, weight, gradients) = drawn
    summed = functools.partial(sums_of, cpu.gather_sum, source, index, bags=BAGS)
    update = functools.partial(cases.update_of, table, rule=compiled(RULES["adagrad"]), bags=COUNTS)
    rest = weight, gradients
    calls = {
        "gather_sum: one segment": lambda: summed(segments[1:], weights),
        "gather_sum: the widths": lambda: summed(segments, weights, widths=(1,)),
        "gather_sum: one weight": lambda: summed(segments, weights[1:]),
        "set: shapes differ": lambda: cpu.set_rows(source, index, source[: len(index) - 1]),
        "update: slots of another length": lambda: update([slots[0][1:]], rows, bags, *rest),
        "update: ids, bags": lambda: update(slots, rows, bags[1:], *rest),
        "update: gradients of another": lambda: update(slots, rows, bags, weight, gradients[::-1]),
        "update: as many blocks": lambda: update(slots, rows, bags, *rest, blocks=((1, 2, 3),)),
        "row numbers must be int32": lambda: cpu.gather_rows(source, index.astype(np.int16)),
    }
    for said, call in calls.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"tpu_embed: {said}"):
            jax.block_until_ready(jax.jit(call)())


# -- ids that the host has routed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rounds"), [("adagrad", False), ("rowwise", False), ("adagrad", True)]
)
def test_routed_entries_tell_their_partial_sums(name, rounds):
    """Their blocks are the partial sums of their route, however the bags are numbered."""
    rng, rule = np.random.default_rng(12), compiled(RULES[name])
    table, slots, given = draw_update(rng, RULES[name], 20, "float32")
    rows, bags, weights, gradients = given
    # By row, and then by block; a partial sum is a run of equal rows and blocks.
    present = np.flatnonzero((rows >= 0) & (rows < R))
    # Counted through both features, bags 0 to 6 and 100 to 102 are in block 0.
    first_bags = np.where(bags[:, None] < COUNTS[0], *map(np.array, STARTS))
    block = (bags[:, None] >= first_bags).sum(axis=1)
    order = present[np.lexsort((block[present], rows[present]))]
    runs, sums = np.unique([rows[order], block[order]], axis=1, return_inverse=True)
    whole, merged = np.unique(runs[0], return_inverse=True)
    # Bag b gets the number anew[b].
    anew = rng.permutation(sum(COUNTS)).astype(np.int32)
    renumbered = (np.concatenate(gradients)[np.argsort(anew)],)
    run = functools.partial(cases.update_of, rule=rule, bags=(sum(COUNTS),), rounds=rounds)
    routed = whole.astype(np.int32), anew[bags[order]], weights[order], renumbered
    found = jax.jit(run)(table, slots, *routed, sums.astype(np.int32), merged.astype(np.int32))
    assert_same_bits(found, expected_update(table, slots, given, rule, STARTS, rounds))
