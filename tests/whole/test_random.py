"""Random cases of two steps: the oracle's numbers, and the same bits in every arrangement.

Each step starts from the exact numbers that the library holds, so that the oracle's intervals
(`oracle_bounds`) cover only one step. `make test` runs a few cases, each on one device and on its
largest device count. The marked test runs many cases, each in all of its arrangements.

    RANDOM_SEEDS=1000:1100 python -m pytest tests/whole/test_random.py -k many
"""

import dataclasses
import functools
import os
import warnings
from collections import namedtuple

import jax
import numpy as np
import optimizer_cases
import oracle
import oracle_bounds
import oracle_rules
import pytest
from random_cases import INSIDE, Known, draw_case, filled
from random_optimizers import HOST_RATE

import tpu_embed
from tpu_embed.kernels import dispatch

Held = namedtuple("Held", "tables slots")
"""Tables and slots by name, on the host."""


class Run(namedtuple("Run", "states activations seen steps_done counters")):
    """The results of a case: states before each step and after the last, and activations.

    `seen` has the number of the state that each step's lookup saw.
    """


def run(case, arrangement):
    """Run the steps of a case in an arrangement."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, arrangement.kernels)
        warnings.filterwarnings("ignore", "activation gradient of .*: None is taken as zeros")
        if arrangement.way == "stateful":
            return run_stateful(case, arrangement)
        return run_engine(case, arrangement)


def batches_of(case):
    """Return (features, weights, gradients) of every step in the nesting of the features."""

    def nested(values):
        return None if values is None else filled(case.nest, values)

    return [tuple(map(nested, (step.ids, step.weights, step.gradients))) for step in case.steps]


def run_engine(case, arrangement):
    options = {"mesh": arrangement.mesh(), "stack_tables": arrangement.stack_tables}
    options |= {"batch_axes": case.batch_axes, "sum_blocks": case.sum_blocks}
    options |= {"on_bad_gradient": case.on_bad_gradient}
    engine = tpu_embed.EmbeddingEngine(case.nest, case.optimizer, **options)
    state, ahead = engine.init(jax.random.key(case.seed)), None
    if arrangement.ahead and not case.inside:
        specs = [engine.place(ids, weights).spec for ids, weights, _ in batches_of(case)]
        ahead = tpu_embed.BatchSpec.union(*specs)
    step = make_step(engine, arrangement.way, ahead)
    states, activations = [held(engine, state)], []
    for t, (ids, weights, gradients) in enumerate(batches_of(case)):
        HOST_RATE.step = t
        found, state = step(state, ids, weights, gradients)
        activations.append(check_nesting(case, found))
        states.append(held(engine, state))
    seen = list(range(len(activations)))
    return Run(states, activations, seen, int(state.step), jax.device_get(state.counters))


def held(engine, state):
    return Held(*jax.tree.map(np.array, (engine.tables(state), engine.slots(state))))


def make_step(engine, way, spec):
    """Return a step: eager, or in one user's jit, with ids that are placed or given inside."""

    @functools.partial(jax.jit, donate_argnums=0)
    def both(state, given, weights, gradients, rates):
        found = engine.lookup(state, given, weights)
        return found, engine.update(state, given, gradients, weights, learning_rates=rates)

    def step(state, ids, weights, gradients):
        if way == INSIDE:
            # JAX takes no swapped bytes, and weights inside a jit are floats; `place` takes any.
            ids = jax.tree.map(lambda leaf: leaf.astype(leaf.dtype.newbyteorder("=")), ids)
            weights = jax.tree.map(lambda leaf: leaf.astype(np.float32), weights)
            return both(state, ids, weights, gradients, engine.learning_rates())
        batch = engine.place(ids, weights, spec)
        if way == "in jit":
            return both(state, batch, None, gradients, engine.learning_rates())
        found = engine.lookup(state, batch)
        if spec is None:  # `update` also takes ids instead of a Batch
            return found, engine.update(state, ids, gradients, weights)
        return found, engine.update_in_place(state, batch, gradients)

    return step


def run_stateful(case, arrangement):
    given = case.nest, case.optimizer, arrangement.pipelined, arrangement.mesh(), case.batch_axes
    options = {"seed": case.seed, "on_bad_gradient": case.on_bad_gradient}
    embedding = tpu_embed.TPUEmbedding(*given, **options)
    embedding.build()
    batches = batches_of(case)
    if arrangement.ahead:
        for ids, weights, _ in batches:
            embedding.enqueue(ids, weights)
    states, activations = [Held(*embedding.retrieve())], []
    for t, (ids, weights, gradients) in enumerate(batches):
        HOST_RATE.step = t
        if not arrangement.ahead:
            embedding.enqueue(ids, weights)
        activations.append(check_nesting(case, embedding.dequeue()))
        embedding.apply_gradients(gradients)
        states.append(Held(*embedding.retrieve()))
    state = embedding.state
    late = arrangement.ahead and arrangement.pipelined
    seen = [max(0, t - late) for t in range(len(batches))]
    return Run(states, activations, seen, int(state.step), jax.device_get(state.counters))


def check_nesting(case, activations):
    """Return the leaves of activations on the host, after checking that they are nested right."""
    assert jax.tree.structure(activations) == jax.tree.structure(case.nest)
    return [np.array(leaf) for leaf in jax.tree.leaves(activations)]


CHOSEN = (1673, 6225, 4908, 1148, 4793, 935, 6640, 824)
"""Cases that together had every kind of ids, rules, placements and ways to run when they were
chosen: where `random_cases.py` draws others, they are to be chosen anew."""
MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "0:200").split(":")))


# -- the oracle ----------------------------------------------------------------------------------


def check_run(case, done: Run, replicas=1):
    """Compare a run with the oracle: every number of every step."""
    blocks = max(case.sum_blocks, replicas)
    assert done.steps_done == sum(not case.skips(step) for step in case.steps)
    check_counters(case, done.counters)
    check_start(case, done.states[0])
    count = 0
    for t, step in enumerate(case.steps):
        seen, before, after = (done.states[i] for i in (done.seen[t], t, t + 1))
        check_activations(case, t, done.activations[t], seen)
        skipped = case.skips(step)
        features = [] if skipped else read_features(case, step)
        occurrences = oracle.row_gradients(
            features, [] if skipped else step.gradients, blocks, replicas
        )
        count += not skipped
        for name, config in case.tables.items():
            what = f"step {t}: table {name!r}"
            assert after.tables[name].dtype == before.tables[name].dtype == config.dtype
            if skipped or case.optimizer_of(config) is None:
                assert_bits(what, of_table(after, name), of_table(before, name))
            else:
                old, new = of_table(before, name), of_table(after, name)
                check_update(what, case, config, occurrences, count, t, old, new)


def read_features(case, step):
    """Return (feature, ids, weights) as the oracle reads them."""
    features = [
        (dataclasses.replace(f, on_bad_id="drop") if case.inside and f.on_bad_id == "error" else f)
        for f in case.features
    ]
    weights = step.weights or [None] * len(features)
    return list(zip(features, step.ids, weights, strict=True))


def check_counters(case, counters):
    """Check what is counted by feature: ids dropped under "error", and gradients not finite."""
    ids, gradients = [], [0] * len(case.features)
    for f, feature in enumerate(case.features):
        numbers = []
        if case.inside and feature.on_bad_id == "error":
            columns = feature.max_sequence_length or None
            arrays = [step.ids[f] for step in case.steps]
            seen = [array[:, :columns] if array.ndim == 2 else array for array in arrays]
            numbers = [int(number) for array in seen for number in array.flat]
        ids.append(sum(n < -1 or n >= feature.table.vocabulary_size for n in numbers))
    assert counters["bad_ids"].tolist() == ids
    for step in filter(case.skips, case.steps):
        gradients[step.spoilt] += 1
    assert counters.get("bad_gradients", np.zeros(len(gradients))).tolist() == gradients


def of_table(held, name):
    """Return a table and its slots as one dict of arrays, the table's name ""."""
    return {"": held.tables[name], **held.slots[name]}


def assert_bits(what, values, expected):
    assert set(values) == set(expected), what
    for name, array in values.items():
        np.testing.assert_array_equal(array, expected[name], f"{what} {name}", strict=True)


def check_start(case, first):
    """Check initial rows where the oracle knows them, and initial slots."""
    assert set(first.tables) == set(first.slots) == set(case.tables)
    for name, config in case.tables.items():
        rows, size = first.tables[name], (config.vocabulary_size, config.dim)
        if isinstance(config.initializer, Known):
            expected = config.initializer.values(*size).astype(rows.dtype)
            np.testing.assert_array_equal(rows, expected, name)
        elif config.initializer is not None:
            numbers = (np.arange(size[0]) + config.initializer.offset).astype(rows.dtype)
            np.testing.assert_array_equal(rows, np.broadcast_to(numbers[:, None], size), name)
        optimizer, slots = case.optimizer_of(config), first.slots[name]
        if not isinstance(optimizer, tpu_embed.optimizers.RowOptimizer):
            assert optimizer is not None or not slots
            continue
        hyper = optimizer_cases.hyper(optimizer)
        if any(callable(first) for _, first in hyper["slot_initializers"]):
            continue
        expected = oracle_rules.initial_slots(type(optimizer).__name__, hyper, size[1])
        assert set(slots) == set(expected), name
        for slot, value in expected.items():
            shape = (size[0], *np.shape(value))
            value = np.broadcast_to(np.float32(value), shape)
            np.testing.assert_array_equal(slots[slot], value, f"{name}/{slot}", strict=True)


def check_activations(case, t, found, seen):
    for f, (feature, ids, weights) in enumerate(read_features(case, case.steps[t])):
        name = next(n for n, config in case.tables.items() if config is feature.table)
        bounds = oracle_bounds.activation(seen.tables[name], feature, ids, weights)
        what = f"step {t}: activation of feature {f}, form {type(ids).__name__}, {feature}"
        assert found[f].dtype == np.float32, what
        assert_within(what, found[f], bounds)


def check_update(what, case, config, occurrences, t, number, old, new):
    """Compare one table and its slots with the oracle; rows that are not updated keep their bits.

    Args:
      t: the step that the rule sees, 1 at the first.
      number: of the batch, which the host's rate goes by.
    """
    optimizer = case.optimizer_of(config)
    ours = isinstance(optimizer, tpu_embed.optimizers.RowOptimizer)
    hyper = optimizer_cases.hyper(optimizer) if ours else {}
    given = oracle_bounds.updates(config, hyper, occurrences)
    per_row = {name: array for name, array in new.items() if np.ndim(array)}
    for name, array in per_row.items():
        kept = np.setdiff1d(np.arange(config.vocabulary_size), list(given))
        assert_bits(f"{what} rests", {name: array[kept]}, {name: old[name][kept]})
    exact = {name: np.asarray(array, np.float64) for name, array in old.items()}
    if not ours:
        check_optax(what, optimizer, config, given, exact, new)
        return
    rate = rate_at(optimizer.learning_rate, t, number)
    for row, mine in given.items():
        slots = {name: exact[name][row] for name in exact if name}
        name = type(optimizer).__name__
        args = (name, hyper, config.dtype, exact[""][row], slots, mine, t, rate)
        bounds, bounds_of_slots = oracle_bounds.updated_row(*args)
        for slot, interval in {"": bounds, **bounds_of_slots}.items():
            assert_within(f"{what} {slot}[{row}] by {optimizer}", new[slot][row], interval)


def rate_at(rate, t, number):
    """Return the learning rate of step t, counted from 1."""
    if rate is HOST_RATE:
        HOST_RATE.step = number
        return float(np.float32(rate()))
    return float(rate(t - 1)) if callable(rate) else rate


def check_optax(what, transform, config, given, exact, new):
    rows, names = sorted(given), list(slots_in_order(transform, config.dim))
    leaves = [exact[name][rows] if np.ndim(exact[name]) else exact[name] for name in names]
    if not rows:
        return
    args = (transform, config.dtype, exact[""][rows], leaves, [given[row] for row in rows])
    bounds, of_leaves = oracle_bounds.updated_by_optax(*args)
    for name, interval in zip(["", *names], [bounds, *of_leaves], strict=True):
        array = new[name][rows] if np.ndim(new[name]) else new[name]
        assert_within(f"{what} {name} {rows}", array, interval)


@functools.cache
def slots_in_order(transform, dim):
    return tpu_embed.optimizers.as_table_optimizer(transform).slot_shapes(dim, np.float32)


def assert_within(what, values, bounds):
    """Assert that float numbers of the library are in the oracle's intervals."""
    assert np.shape(values) == np.shape(bounds.low), what
    wrong = oracle_bounds.outside(values, bounds)
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {np.size(values)} wrong; at {wrong[0]} value, least and most: "
        f"{[np.asarray(one)[tuple(wrong[0])] for one in (values, bounds.low, bounds.high)]}"
    )


# -- the tests -----------------------------------------------------------------------------------


def check_case(seed, *, whole):
    """Compare the first arrangement with the oracle, and the others with the first."""
    case = draw_case(seed)
    ends = dict.fromkeys((case.arrangements[0], case.arrangements[-1]))
    # Programs make the gains of traced ids, within rounding of those that the host makes.
    firsts = {}
    for arrangement in case.arrangements if whole else ends:
        try:
            done = run(case, arrangement)
            first = firsts.setdefault(arrangement.way == INSIDE, done)
            if first is done or not compare_bits(case, arrangement, done, first):
                check_run(case, done, case.replicas(arrangement))
        except Exception as error:
            seeds, file = f"RANDOM_SEEDS={seed}:{seed + 1}", "tests/whole/test_random.py"
            again = f"{seeds} python -m pytest {file} -k many"
            error.add_note(f"random case {seed}, {arrangement}\nrun it alone: {again}")
            raise


def compare_bits(case, arrangement, done, first):
    """Assert the bits that are promised; tell whether the oracle has thereby seen all numbers."""
    if not case.keeps_bits(arrangement):
        return False
    for t, (mine, its) in enumerate(zip(done.states, first.states, strict=True)):
        for name in case.tables:
            assert_bits(f"state {t}: table {name!r}", of_table(mine, name), of_table(its, name))
    if arrangement.way == INSIDE:  # shards add up their parts of traced bags
        return False
    for t, step in enumerate(case.steps):
        if done.seen[t] != first.seen[t]:
            continue
        for f, ids in enumerate(step.ids):
            what = f"step {t}: activation of feature {f}, {type(ids).__name__}"
            assert_bits(what, {"": done.activations[t][f]}, {"": first.activations[t][f]})
    check_counters(case, done.counters)
    return (done.seen, done.steps_done) == (first.seen, first.steps_done)


@pytest.mark.parametrize("seed", CHOSEN)
@pytest.mark.quick(1)
def test_chosen(seed):
    check_case(seed, whole=False)


@pytest.mark.whole
@pytest.mark.parametrize("seed", MANY)
def test_many(seed):
    check_case(seed, whole=True)
