"""Ids inside a jit lose nothing, on any number of devices, with any number of blocks.

Random cases (`traced_cases`) of small tables: traced ids, a placed batch, and the oracle's float64
loop. More of them:

    RANDOM_SEEDS=1000:3000 python -m pytest tests/whole/test_traced_ids.py -k many
"""

import functools
import os

import jax
import numpy as np
import optimizer_cases
import oracle
import oracle_rules
import pytest
from facade_cases import assert_same
from traced_cases import draw_case

MANY = range(*map(int, os.environ.get("RANDOM_SEEDS", "0:2000").split(":")))
NEAR = {"rtol": 1e-4, "atol": 2e-3}
"""Float32 sums of a few hundred numbers below 10; a gradient that is lost makes more than 0.1."""


def run(case, engine):
    """Return the first tables; activations, tables, slots and counters of traced and placed ids."""
    ids, weights, gradients = map(list, (case.ids, case.weights, case.gradients))
    batch = engine.place(ids, weights)

    def step(state, given, weights, gradients):
        found = engine.lookup(state, given, weights)
        new = engine.update(state, given, gradients, weights)
        return found, engine.tables(new), engine.slots(new), new.counters

    @jax.jit
    def steps(key, batch, ids, weights, gradients):
        state = engine.init(key)
        placed = step(state, batch, None, gradients)
        return engine.tables(state), step(state, ids, weights, gradients), placed

    return jax.device_get(steps(jax.random.key(0), batch, ids, weights, gradients))


def check_case(seed):
    case = draw_case(seed)
    first, traced, placed = run(case, case.engine())
    again = f"RANDOM_SEEDS={seed}:{seed + 1} python -m pytest {__file__} -k many"
    try:
        check_oracle(case, first, traced)
        check_route(case, traced, placed)
    except AssertionError as error:
        error.add_note(f"{case}\nrun it alone: {again}")
        raise


def check_route(case, route, placed):
    """Compare a route with that of the placed batch."""
    activations, *new, _ = route
    # Shards add up their parts of traced bags, and a program rounds the gains of means and weighted
    # bags more often than the host does.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, activations, placed[0])
    if any(feature.table.combiner != "sum" for feature in case.features):
        jax.tree.map(close, new, list(placed[1:3]))
        return
    if case.keeps_bits:
        assert_same(new, list(placed[1:3]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, **NEAR), new, list(placed[1:3]))


def check_oracle(case, first, traced):
    """Compare a route with the loop in float64."""
    activations, tables, slots, _ = traced
    configs = {feature.table.name: feature.table for feature in case.features}
    features = list(zip(case.features, case.ids, case.weights, strict=True))
    for (feature, *ids), found in zip(features, activations, strict=True):
        expected = oracle.lookup(first[feature.table.name], feature, *ids)
        np.testing.assert_allclose(found, expected, **NEAR)
    hyper = optimizer_cases.hyper(case.optimizer)
    rule = type(case.optimizer).__name__, hyper, case.optimizer.learning_rate
    new, new_slots = oracle.train_step(
        {config: first[name] for name, config in configs.items()},
        {
            config: {slot: np.full_like(first[name], 0.1) for slot in slots[name]}
            for name, config in configs.items()
        },
        features,
        case.gradients,
        optimizers=dict.fromkeys(configs.values(), rule),
        step=1,
        apply=oracle_rules.apply,
        blocks=case.blocks,
        replicas=case.replicas,
    )
    for name, config in configs.items():
        np.testing.assert_allclose(tables[name], new[config], **NEAR)
        for slot, array in slots[name].items():
            np.testing.assert_allclose(array, new_slots[config][slot], **NEAR)


@pytest.mark.parametrize("seed", MANY)
@pytest.mark.quick(1)
def test_many(seed):
    check_case(seed)
