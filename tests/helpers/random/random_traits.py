"""The traits of random cases, used to choose few seeds that together have all traits.

`python tests/helpers/random/random_traits.py` chooses new seeds after the generator has changed.
"""

import collections

import numpy as np
import optimizer_cases
import random_batches
import random_optimizers
from random_cases import WAYS, draw_case

RULES = ("rule in a kernel", "rule in XLA", "rule over the row", "rule of optax")
EVERY = {
    *RULES,
    *("mod", "div", "replicated", "float32", "bfloat16", "mean", "sum", "sqrtn"),
    *("guard allow", "guard skip", "guard error", "native kernels", "reference kernels"),
    *(f"ids: {kind}" for kind in random_batches.KINDS),
    *(f"weights: {place}" for place in ("none", "array", "inside", "container")),
    *(f"bad id, {policy}" for policy in ("error", "drop", "clip")),
    *(f"way: {way}" for way in WAYS),
    *("quantized", "not trained", "each by itself", "every row", "one column", "shared table"),
    *("gradient clip", "weight clip", "decay", "schedule", "host rate", "fewer rows than shards"),
    *("stacked", "alike but not stacked", "two axes", "batch axes", "shard axes", "explicit axes"),
    *("8 devices", "own sizes", "uneven blocks", "pipelined", "no ids", "no gradient", "left out"),
    "extreme weights",
}


def traits(case):
    """Return the traits of a case on its first and its last arrangement."""
    runs = (case.arrangements[0], case.arrangements[-1])
    met = {
        f"guard {case.on_bad_gradient}": True,
        "batch axes": case.batch_axes is not None,
        "uneven blocks": case.batch > case.sum_blocks
        and case.batch % case.sum_blocks > 0
        and case.replicas(runs[1]) > 1
        and case.keeps_bits(runs[1]),
        "shared table": len(case.features) > len(case.tables),
        "own sizes": len({form.shape[0] for form in case.steps[0].forms}) > 1
        and case.replicas(runs[1]) > 1,
        "left out": any(map(case.skips, case.steps)),
    }
    parts = [met]
    parts += [_of_table(case, table, runs[1]) for table in case.tables.values()]
    parts += [_of_run(case, run) for run in runs]
    parts += [_of_leaf(case, step, f) for step in case.steps for f in range(len(case.features))]
    return {trait for part in parts for trait, holds in part.items() if holds}


def _of_table(case, table, run):
    """Return trait -> whether a table has it; nothing if no row of it changes."""
    rule = case.optimizer_of(table)
    if rule is None or not _moves(case, table):
        return {"not trained": rule is None}
    hyper = optimizer_cases.hyper(rule) if hasattr(rule, "clipvalue") else {}
    rate, by_host = hyper.get("learning_rate"), random_optimizers.HOST_RATE
    return {
        _kind_of_rule(rule): run.devices > 1,
        table.placement: run.devices > 1,
        table.combiner: True,
        table.dtype: True,
        "host rate": rate is by_host,
        "schedule": callable(rate) and rate is not by_host,
        "shard axes": table.shard_axes is not None,
        "quantized": table.quantization_config is not None,
        "each by itself": not hyper.get("use_gradient_accumulation", True)
        and _most_duplicates(case, table) > 3,
        "every row": not hyper.get("lazy_adam", True),
        "gradient clip": None not in (hyper.get("clipvalue") or [None]),
        "weight clip": hyper.get("clip_weight_max") is not None,
        "decay": hyper.get("weight_decay_factor", 0),
        "fewer rows than shards": table.vocabulary_size < run.devices > 1
        and table.placement != "replicated",
        "one column": table.dim == 1,
    }


def _moves(case, table):
    """Return whether a table is looked up with a gradient other than zero in every step."""
    return all(
        any(
            feature.table is table and np.any(_numbers(ids) >= 0) and np.any(gradient)
            for feature, ids, gradient in zip(case.features, step.ids, step.gradients, strict=True)
            if gradient is not None
        )
        for step in case.steps
    )


def _most_duplicates(case, table):
    """Return the count of the most frequent id of a table (bad ids included) in any one step."""
    most = 0
    for step in case.steps:
        pairs = zip(case.features, step.ids, strict=True)
        numbers = [_numbers(ids) for feature, ids in pairs if feature.table is table]
        counts = np.unique(np.concatenate(numbers), return_counts=True)
        most = max([most, *(n for number, n in zip(*counts, strict=True) if number >= 0)])
    return most


def _numbers(ids):
    """Return the ids of any container, int64 [N]."""
    return np.ravel(getattr(ids, "values", ids)).astype(np.int64)


def _kind_of_rule(rule):
    """Return the element of `RULES` that fits."""
    name = type(rule).__name__
    if name == "LAMB" or getattr(rule, "rule", None) is optimizer_cases.centred_rule:
        return RULES[2]
    if name in ("SGD", "Momentum", "Adagrad", "RowWiseAdagrad", "Adam", "FTRL"):
        return RULES[0]
    return RULES[1] if name in random_optimizers.OPTIONS else RULES[3]


def _kind(case, table):
    """Return the options that tables of one stack have in common."""
    rule = case.optimizer_of(table)
    stored = (table.dim, table.dtype, table.quantization_config)
    return (*stored, table.placement, table.shard_axes, None if rule is None else id(rule))


def _of_run(case, run):
    """Return trait -> whether an arrangement has it."""
    kinds = [_kind(case, table) for table in case.tables.values()]
    alike, stateful = max(collections.Counter(kinds).values()) > 1, run.way == "stateful"
    return {
        f"way: {run.way}": True,
        f"{run.kernels} kernels": True,
        "stacked": alike and (run.stack_tables or stateful),
        "alike but not stacked": alike and not (run.stack_tables or stateful),
        "two axes": len(run.mesh_shape) == 2 and run.devices > 1,
        "explicit axes": any(run.explicit) and run.devices > 1,
        "pipelined": run.pipelined and run.ahead and stateful,
        "8 devices": run.devices == 8,
    }


def _of_leaf(case, step, f):
    """Return trait -> whether the ids of a feature in a batch have it."""
    feature, form, ids = case.features[f], step.forms[f], _numbers(step.ids[f])
    lowest = -1 if form.kind in random_batches.DENSE else 0
    return {
        f"ids: {form.kind}": True,
        f"weights: {form.weights}": True,
        f"bad id, {feature.on_bad_id}": np.any(
            (ids < lowest) | (ids >= feature.table.vocabulary_size)
        ),
        "no ids": not np.any(ids >= 0),
        "no gradient": step.gradients[f] is None and feature.table.trainable,
        "extreme weights": np.any(_weights(step, f) > 1e18),
    }


def _weights(step, f):
    """Return the weights of a feature, in whatever they are given, float64 [N]."""
    given = step.weights[f] if step.weights else None
    given = getattr(step.ids[f], "weights", None) if given is None else given
    return np.ravel(getattr(given, "values", [] if given is None else given)).astype(np.float64)


def choose_seeds(count=8000, tries=3000):
    """Return seeds below `count` whose cases have every trait together, and few programs.

    Each try draws some hundred seeds at random and takes the one with the most new traits per
    cost, until no trait is missing; the cheapest try wins. Cases for one device are left out.
    """
    cases = {seed: case for seed in range(count) if (case := draw_case(seed)).arrangements[1:]}
    met = {seed: traits(case) for seed, case in cases.items()}
    # Roughly the seconds that the programs take to compile: by what is trained and looked up.
    costs = {
        seed: 1 + sum(table.trainable for table in case.tables.values()) + len(case.features) / 4
        for seed, case in cases.items()
    }
    rng, found = np.random.default_rng(0), []
    for _ in range(tries):
        chosen, missing = [], EVERY
        while missing:
            drawn = rng.choice(list(met), 300).tolist()
            chosen.append(
                max(drawn, key=lambda seed, missing=missing: len(met[seed] & missing) / costs[seed])
            )
            missing = missing - met[chosen[-1]]
        found.append(chosen)
    return min(found, key=lambda each: sum(costs[seed] for seed in each))


if __name__ == "__main__":
    print(choose_seeds())
