"""Optimizer: the methods of its TensorFlow ancestor, against float64 loops."""

import collections
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import pytest
from facade_cases import assert_same

from tpu_embed import optimizers as o
from tpu_embed.sparse import IndexedSlices
from tpu_embed.training import CrossShardOptimizer, Optimizer

V, D = 7, 2
RNG = np.random.default_rng(3)
SHAPES = {"bias": (3,), "kernel": (3, D), "table": (V, D)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
ROWS = np.array([5, 1, V, 5, 0], np.int32)  # 5 twice, V is padding
VALUES = RNG.normal(size=(2, 5, D)).astype(np.float32)
DENSE = RNG.normal(size=(2, 3, D)).astype(np.float32)
Pair = collections.namedtuple("Pair", ["left", "right"])


def params():
    return jax.tree.map(jnp.asarray, PARAMS)


def slices(step=0, size=V):
    return IndexedSlices(jnp.asarray(VALUES[step]), jnp.asarray(ROWS), (size, D))


def pairs():
    return [(gradient, path(name)) for name, gradient in both(0).items()]


def applied(optimizer, *steps):
    """Return parameters and state after gradients by name of each step, in one program."""

    @jax.jit
    def step(gradients, *held):
        return optimizer.apply_gradients([(g, path(n)) for n, g in gradients.items()], *held)

    now, state = params(), optimizer.init(params())
    for gradients in steps:
        now, state = step(gradients, now, state)
    return now, state


def both(step):
    """Return the gradients of a step by name: slices of the table, and the kernel's."""
    return {"table": slices(step), "kernel": jnp.asarray(DENSE[step])}


def summed(step, every=False):
    """Return the float64 gradients of the rows of the table that are touched, or of every row."""
    sums = dict.fromkeys(range(V), np.zeros(D)) if every else {}
    for row, value in zip(ROWS.tolist(), VALUES[step].astype(np.float64), strict=True):
        if row < V:
            sums[row] = sums.get(row, 0.0) + value
    return sums


def slots_of(optimizer, state, path):
    return {name: optimizer.get_slot(state, path, name) for name in optimizer.get_slot_names(state)}


def path(name):
    return f"['{name}']"


NAMES = ("RowWiseAdagrad", "Adam", "FTRL", "LAMB", "CustomOptimizer")
RULES = [optimizer_cases.CASES[name][1] for name in NAMES]
WHOLE = o.Adam(0.1, lazy_adam=False, weight_decay_factor=0.1)


@pytest.mark.parametrize("rule", [*RULES, WHOLE], ids=[*NAMES, "every row"])
@pytest.mark.quick(3)
def test_rules_dense_and_sparse(rule):
    """float32 against float64; all else keeps its bits. `test_cross_shard` has every rule."""
    optimizer, every = Optimizer(rule, "opt"), not getattr(rule, "lazy_adam", True)
    now, state = applied(optimizer, both(0), both(1))
    gradients = {
        "table": [summed(0, every), summed(1, every)],
        "kernel": [dict(enumerate(g)) for g in DENSE],
    }
    for leaf, given in gradients.items():
        *_, wanted = optimizer_cases.oracle_steps(rule, PARAMS[leaf], given)
        got = now[leaf], slots_of(optimizer, state, path(leaf))
        close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6)
        jax.tree.map(close, got, wanted)
    untouched = np.array([2, 3, 4, 6])
    same = np.array_equal(now["table"][untouched], PARAMS["table"][untouched])
    assert same != every
    assert np.array_equal(now["bias"], PARAMS["bias"])
    assert_same(*(slots_of(optimizer, s, "['bias']") for s in (optimizer.init(params()), state)))
    assert int(state.step) == int(optimizer.get_non_slot(state)["step"]) == 2


def plain(tx):
    """Return optax' own step: (gradients, state, parameters) to (parameters, state)."""

    def step(gradients, state, tree):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(gradients, state, tree)
        return optax.apply_updates(tree, updates), state

    return jax.jit(step)


@pytest.mark.parametrize("name", ["adamw by schedule", "chain"])
@pytest.mark.quick(1)
def test_a_row_separable_transform_updates_touched_rows_as_it_updates_a_whole(name):
    tx, _ = optimizer_cases.OPTAX_CASES[name]
    optimizer, step = Optimizer(tx, "opt"), plain(tx)
    now, state = applied(optimizer, {"table": slices(0)}, {"table": slices(1)})
    whole, inner = jnp.asarray(PARAMS["table"]), tx.init(jnp.asarray(PARAMS["table"]))
    for t in range(2):
        whole, inner = step(slices(t).to_dense(), inner, whole)
    touched, other = np.array([0, 1, 5]), np.array([2, 3, 4, 6])
    # two compiled forms of one expression
    np.testing.assert_allclose(now["table"][touched], whole[touched], rtol=1e-5, atol=1e-6)
    assert np.array_equal(now["table"][other], PARAMS["table"][other])
    for values in slots_of(optimizer, state, "['table']").values():
        assert not np.asarray(values)[other].any()
        assert np.asarray(values)[touched].any()


def test_dense_parameters_take_the_transform_as_it_is():
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    gradients = {name: jnp.ones_like(leaf) for name, leaf in PARAMS.items()}
    now, state = applied(Optimizer(tx, "opt"), gradients)
    expected, inner = plain(tx)(gradients, tx.init(params()), params())
    assert_same((now, state.inner), (expected, inner))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1, weight_decay=0.5)),
        optax.masked(optax.adam(0.1), {"bias": False, "kernel": True, "table": True}),
        optax.multi_transform(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)},
            {"bias": "a", "kernel": "b", "table": "b"},
        ),
        optax.MultiSteps(optax.adam(0.1), 2),
    ],
    ids=["global norm", "masked", "multi", "multi steps"],
)
@pytest.mark.quick(1)
def test_none_leaves_parameter_and_slots_alone_and_everything_else_goes_on(tx):
    optimizer = Optimizer(tx, "opt")
    every = {name: np.ones_like(leaf) for name, leaf in PARAMS.items()}
    some = {"table": None, "bias": np.full(3, 3, np.float32)}
    before, start = applied(optimizer, every)
    after, end = applied(optimizer, every, some)
    for name in ("table", "kernel"):
        assert np.array_equal(after[name], before[name])
        assert_same(*(slots_of(optimizer, state, path(name)) for state in (start, end)))
    counts = [optimizer.get_non_slot(state) for state in (start, end)]
    assert [int(count["step"]) for count in counts] == [1, 2]
    for name in counts[0].keys() - {"step", "0_skip_state"}:
        assert not np.array_equal(counts[0][name], counts[1][name]), name


def test_a_clip_by_the_global_norm_sees_the_gradients_that_there_are():
    optimizer = Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "opt")
    now, _ = applied(optimizer, {"bias": jnp.full(3, 2.0), "kernel": None})
    np.testing.assert_allclose(now["bias"], PARAMS["bias"] - 1 / np.sqrt(3), rtol=1e-6)


def test_tables_of_any_rank_and_bfloat16():
    optimizer = Optimizer(o.RowWiseAdagrad(0.1), "opt")
    table = jnp.asarray(RNG.normal(size=(V, 3, D)), jnp.bfloat16)
    gradient = IndexedSlices(jnp.ones((2, 3, D), jnp.bfloat16), jnp.array([4, 4]), table.shape)
    apply = jax.jit(lambda g, *held: optimizer.apply_gradients([(g, "")], *held))
    now, state = apply(gradient, table, optimizer.init(table))
    accumulators = optimizer.get_slot(state, "", "accumulators")
    assert (now.dtype, accumulators.dtype) == (jnp.bfloat16, jnp.float32)
    expected = np.full((V, 3), 0.1)
    expected[4] = 4.1
    np.testing.assert_allclose(accumulators, expected, rtol=1e-6)
    row = np.asarray(table[4], np.float64) - 0.1 * 2 / np.sqrt(4.1)
    np.testing.assert_allclose(np.asarray(now[4], np.float64), row, rtol=2**-8)
    assert np.array_equal(np.delete(now, 4, 0), np.delete(table, 4, 0))


# -- how gradients are given -----------------------------------------------------------------------


def test_any_iterable_in_any_order():
    optimizer = Optimizer(o.SGD(0.1), "opt")
    state, given = optimizer.init(params()), pairs()
    lists = [[DENSE[0].tolist(), "['kernel']"]]
    for one, other in ((given, iter(given[::-1])), (given[1:], lists)):
        assert_same(*(optimizer.apply_gradients(x, params(), state) for x in (one, other)))


@pytest.mark.parametrize("form", [tuple, jax.tree_util.keystr], ids=["key path", "keystr"])
def test_a_path_is_a_key_path_or_its_keystr(form):
    """In var_list, pairs, constraints and get_slot alike; keys, positions and fields. Exact."""
    tree = {"a": [jnp.ones(2), Pair(jnp.ones(2), jnp.full(2, 3.0))]}
    paths = [form(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    first, held, last = paths
    optimizer = Optimizer(optax.sgd(1.0, momentum=0.5), "opt")

    def loss(tree):
        return sum(leaf.sum() for leaf in jax.tree.leaves(tree))

    options = {"var_list": [last, first], "constraints": {last: lambda x: x + 0.25}}
    now, state, _ = optimizer.minimize(loss, tree, optimizer.init(tree), **options)
    assert [leaf.tolist() for leaf in jax.tree.leaves(now)] == [[0, 0], [1, 1], [2.25, 2.25]]
    traces = [optimizer.get_slot(state, path, "trace").tolist() for path in paths]
    assert traces == [[1, 1], [0, 0], [1, 1]]
    given, constraints = [(jnp.ones(2), held), (None, first)], {held: jnp.square}
    now, state = optimizer.apply_gradients(given, now, state, constraints=constraints)
    assert [leaf.tolist() for leaf in jax.tree.leaves(now)] == [[0, 0], [0, 0], [2.25, 2.25]]
    assert optimizer.get_slot(state, held, "trace").tolist() == [1, 1]


@pytest.mark.parametrize("path", [(), ""], ids=["key path", "keystr"])
def test_the_path_of_a_tree_that_is_one_array(path):
    optimizer, w = Optimizer(optax.sgd(1.0, momentum=0.5), "opt"), jnp.ones(2)
    constraints = {path: lambda x: x + 0.25}
    given = [(jnp.ones(2), path)], w, optimizer.init(w)
    now, state = optimizer.apply_gradients(*given, constraints=constraints)
    assert now.tolist() == [0.25, 0.25]
    assert optimizer.get_slot(state, path, "trace").tolist() == [1, 1]
    assert [name for name, _ in optimizer.variables(state)] == ["step", "trace"]


def test_constraints_follow_dense_updates_only():
    optimizer = Optimizer(optax.sgd(0.1), "opt")
    given = [(jnp.asarray(DENSE[0]), "['kernel']"), (None, "['bias']")]
    constraints = dict.fromkeys(["['kernel']", "['bias']"], functools.partial(jnp.maximum, 0))
    state = optimizer.init(params())
    now, _ = optimizer.apply_gradients(given, params(), state, constraints=constraints)
    expected = np.maximum(PARAMS["kernel"] - np.float32(0.1) * DENSE[0], 0)
    np.testing.assert_allclose(now["kernel"], expected, rtol=1e-6, atol=1e-7)
    assert PARAMS["bias"].min() < 0
    assert np.array_equal(now["bias"], PARAMS["bias"])


def test_learning_rates_of_every_kind():
    calls = []

    def host():
        calls.append(1)
        return 0.5

    halves = [(rate, None, 0.5) for rate in (0.5, lambda count: 0.5 + 0 * count, host)]
    for rate, given, expected in (*halves, (host, 0.25, 0.25)):
        optimizer = Optimizer(o.SGD(rate), "opt")
        state = optimizer.init(params())
        now, _ = optimizer.apply_gradients(pairs(), params(), state, learning_rate=given)
        rows, kernel = PARAMS["table"][5], PARAMS["kernel"]
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        close(now["kernel"], kernel - np.float32(expected) * DENSE[0])
        close(now["table"][5], rows - expected * summed(0)[5])
    assert len(calls) == 1


def test_nothing_is_scaled_or_summed_without_an_axis():
    optimizer = Optimizer(optax.sgd(1.0), "opt")
    assert optimizer.scale_loss(3.0) == 3.0

    def step(x):
        w = jnp.zeros(())
        return optimizer.minimize(lambda w: w * x, w, optimizer.init(w))[0]

    mapped = jax.vmap(step, axis_name="replicas")(jnp.array([1.0, 3.0]))
    assert mapped.tolist() == [-1.0, -3.0]


# -- the state, and pickles ------------------------------------------------------------------------


INNER = Optimizer(o.AdagradMomentum(0.1), "opt")


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (INNER, "opt"),
        (CrossShardOptimizer(INNER, axis_name="r"), "CrossShardOptimizer"),
        (CrossShardOptimizer(INNER, axis_name="r", name="mine"), "mine"),
    ],
)
def test_slots_exist_from_init_and_have_names(optimizer, name):
    state = optimizer.init(params())
    assert optimizer.get_name() == name
    assert optimizer.get_slot_names(state) == ["accumulators", "momenta"]
    assert optimizer.get_slot(state, "['kernel']", "momenta").shape == (3, D)
    assert optimizer.get_slot(state, "['kernel']", "velocity") is None
    assert sorted(optimizer.get_non_slot(state)) == ["count", "step"]
    names = [f"['{name}']/{slot}" for name in params() for slot in ("accumulators", "momenta")]
    assert [name for name, _ in optimizer.variables(state)] == [*names, "count", "step"]


def test_slots_of_a_chain_bear_its_positions_and_masked_parameters_have_none():
    last = optax.masked(optax.trace(0.5), {"bias": False, "kernel": True, "table": True})
    optimizer = Optimizer(optax.chain(optax.trace(0.9), optax.scale_by_adam(), last), "opt")
    gradient = jnp.arange(6.0).reshape(3, D)
    _, state = applied(optimizer, {"kernel": gradient})
    assert optimizer.get_slot_names(state) == ["0_trace", "2_trace", "mu", "nu"]
    assert np.array_equal(optimizer.get_slot(state, "['kernel']", "0_trace"), gradient)
    assert np.array_equal(optimizer.get_slot(state, "['bias']", "0_trace"), np.zeros(3))
    assert optimizer.get_slot(state, "['bias']", "2_trace") is None
    assert optimizer.get_slot(state, "['kernel']", "2_trace").shape == (3, D)


# -- a transform that counts by the name of `step` -------------------------------------------------


def counted():
    """Return a transform whose state is a step, from 10 on."""

    def update(updates, state, params=None):
        return updates, {"step": state["step"] + 1}

    return optax.GradientTransformation(lambda params: {"step": jnp.int32(10)}, update)


@pytest.mark.parametrize("tx", [counted(), optax.chain(optax.trace(0.9), counted())])
def test_a_transform_s_own_step_stands_beside_the_optimizer_s(tx):
    optimizer = Optimizer(tx, "opt")
    _, state = applied(optimizer, {"bias": jnp.ones(3)})
    found = {name: int(leaf) for name, leaf in optimizer.get_non_slot(state).items()}
    assert found == {"step": 1, "inner_step": 11}
    assert found.items() <= {n: v.sum().item() for n, v in optimizer.variables(state)}.items()


def test_a_slot_called_step_stands_beside_the_optimizer_s():
    def rule(gradient, row, slots, learning_rate, step):
        return row - learning_rate * gradient, {"step": slots["step"] + 1}

    optimizer = Optimizer(o.CustomOptimizer(rule, {"step": 5.0}), "opt")
    variables = dict(optimizer.variables(optimizer.init(jnp.ones(2))))
    assert variables["inner_step"].tolist() == [5.0, 5.0]
    assert int(variables["step"]) == 0


# -- pickles ---------------------------------------------------------------------------------------


def scaled(updates, state, params=None):
    return jax.tree.map(lambda g: -g, updates), state


def no_state(params):
    return optax.EmptyState()


@pytest.mark.parametrize(
    "tx",
    [
        o.Adagrad(0.5),
        o.Adam(0.1, lazy_adam=False, clipvalue=1.0),
        optax.GradientTransformation(no_state, scaled),
    ],
    ids=["rule", "options", "transform of named functions"],
)
def test_a_pickled_optimizer_does_the_same(tx):
    alone = Optimizer(tx, "opt")
    for optimizer in (alone, CrossShardOptimizer(alone, "sum", axis_name="r")):
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.get_name() == optimizer.get_name()
        results = []
        for one in (optimizer, again):
            given = [(jnp.ones(3), "['bias']")], params(), one.init(params())
            results.append(one.apply_gradients(*given, skip_gradients_aggregation=True))
        jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, results))
