"""CrossShardOptimizer on 8 replicas does what one device does with the whole batch."""

import functools

import cross_shard_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import pytest
from cross_shard_cases import GROUPS, IDS, PARAMS, D, S, V, X, expected, loss_of, on_replicas, train
from jax.sharding import PartitionSpec as P

from tpu_embed import optimizers as o
from tpu_embed.kernels.tracing import as_varying
from tpu_embed.sparse import IndexedSlices, embedding_lookup
from tpu_embed.training import CrossShardOptimizer, Optimizer, cross_shard


def trained(step, check_vma, **options):
    """Return what a step makes on replicas of the model's parameters and batch."""
    return on_replicas(step, check_vma, **options)(cases.params(), IDS, X)


def each(step, check_vma, *given, **options):
    """Return what a step makes on each replica, stacked, by default of the model."""

    def stacked(*args):
        return jax.tree.map(lambda leaf: leaf[None], step(*args))

    run = on_replicas(stacked, check_vma, **{"out_specs": P("r")} | options)
    return run(*(given or (cases.params(), IDS, X)))


@pytest.mark.parametrize("name", optimizer_cases.CASES)
@pytest.mark.quick(1)
def test_every_rule_equals_one_device_on_the_whole_batch(name):
    """Modes and reductions alternate; `test_modes_and_reductions` has all of one rule."""
    i = list(optimizer_cases.CASES).index(name)
    reduction, check_vma = (("mean", True), ("sum", False), ("sum", True), ("mean", False))[i % 4]
    inner, none = Optimizer(optimizer_cases.CASES[name][1], "inner"), (None, [])[i % 2]
    crossed = CrossShardOptimizer(inner, reduction, axis_name="r", group_assignment=none)
    got = trained(functools.partial(train, crossed, reduction), check_vma)
    cases.assert_close(got, expected(optimizer_cases.CASES[name][1], reduction))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@cases.MODES
@pytest.mark.quick(1)
def test_modes_and_reductions(reduction, check_vma):
    """Two steps of an optax transform, over two axes that count as one."""
    tx = optax.sgd(0.1, momentum=0.9)
    crossed = CrossShardOptimizer(tx, reduction, axis_name=("a", "b"))
    step = functools.partial(train, crossed, reduction, steps=2)
    tree, slots = trained(step, check_vma, sizes={"a": 2, "b": 4})
    momenta = {path: {"momenta": named["trace"]} for path, named in slots.items()}
    cases.assert_close((tree, momenta), expected(o.Momentum(0.1), reduction, steps=2))


@cases.MODES
@pytest.mark.quick(1)
def test_an_optimizer_with_an_axis_does_the_same(check_vma):
    """In two steps of Adam, which corrects by their number."""
    rule = o.Adam(0.1)
    own = Optimizer(rule, "own", axis_name="r")
    got = trained(functools.partial(train, own, "mean", steps=2), check_vma)
    cases.assert_close(got, expected(rule, "mean", steps=2))


@pytest.mark.parametrize(
    ("sizes", "check_vma", "reduction", "groups"),
    [
        ({"r": S}, False, "sum", GROUPS),
        ({"r": S}, True, "mean", [[2, 0, 1, 3, 4, 5, 6, 7]]),
        ({"r": S}, True, "mean", GROUPS),
        ({"a": 2, "b": 4}, True, "sum", GROUPS),
    ],
    ids=["unchecked sum", "one group", "checked mean", "two axes"],
)
@pytest.mark.quick(2)
def test_groups_are_each_as_one_device(sizes, check_vma, reduction, groups):
    rule, axes = o.Adagrad(0.1), tuple(sizes)
    inner = Optimizer(rule, "inner")
    crossed = CrossShardOptimizer(inner, reduction, axis_name=axes, group_assignment=groups)
    step = functools.partial(train, crossed, reduction)
    assert_groups(each(step, check_vma, sizes=sizes, out_specs=P(axes)), rule, reduction, groups)


def assert_groups(got, rule, reduction, groups, steps=1):
    """Assert that each replica has the parameters, and slots if any, of its group on one device."""
    for group in groups:
        tree, slots = expected(rule, reduction, cases.part(group), steps=steps)
        wanted = (tree, slots) if isinstance(got, tuple) else tree
        for replica in group:
            cases.assert_close(jax.tree.map(lambda leaf, i=replica: leaf[i], got), wanted)


# -- the parts -------------------------------------------------------------------------------------


@cases.MODES
@pytest.mark.quick(1)
def test_gradients_are_local_and_scaled_and_slices_stay_slices(check_vma):
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r")

    def step(tree, ids, x):
        found = crossed.compute_gradients(loss_of("mean", ids, x), tree)
        gradients = {path[-1].key: gradient for gradient, path in found}
        assert gradients["table"].values.shape == (cases.B // S, D)
        gradients["table"] = gradients["table"].to_dense()
        return gradients, crossed.scale_loss(jnp.float32(8.0))

    got, scaled = each(step, check_vma)
    assert scaled.tolist() == [1.0] * S
    gradient = jax.jit(jax.vmap(lambda ids, x: jax.grad(loss_of("mean", ids, x))(cases.params())))
    wanted = gradient(IDS.reshape(S, -1), X.reshape(S, -1, D))
    for name, whole in wanted.items():
        np.testing.assert_allclose(got[name], whole / S, rtol=1e-5, atol=1e-7)


@cases.MODES
@pytest.mark.quick(1)
def test_slices_are_gathered_never_summed_or_made_dense(check_vma):
    crossed = CrossShardOptimizer(Optimizer(o.SGD(0.1), "inner"), axis_name="r")
    size = 10_007

    def step(tree, ids, x):
        state = crossed.init(tree)
        return crossed.minimize(lambda p: embedding_lookup(p, ids).sum(), tree, state)[0]

    traced = on_replicas(step, check_vma).trace(jnp.ones((size, D)), IDS, X)
    program = str(traced.jaxpr)
    assert "psum" not in program
    assert program.count("all_gather") >= 2
    assert traced.lower().compile().memory_analysis().temp_size_in_bytes < size * D


@pytest.mark.parametrize("groups", [None, [[2, 0, 1, 7], [3, 6, 5, 4]]], ids=["all", "groups"])
@cases.MODES
@pytest.mark.quick(1)
def test_slices_are_summed_in_the_order_of_the_shards(groups, check_vma):
    """In float32 1e8 - 1e8 + 1 is 1, and 1e8 + 1 - 1e8 is 0."""
    inner = Optimizer(o.SGD(1.0), "inner")
    crossed = CrossShardOptimizer(inner, "sum", axis_name="r", group_assignment=groups)

    def step(tree, row, x):
        gradient = IndexedSlices(x, row, (V, 1))
        return crossed.apply_gradients([(gradient, "")], tree, crossed.init(tree))[0]

    rows = jnp.array([3, 3, 3, 4, 4, V, 4, V], jnp.int32)
    x = jnp.array([1e8, -1e8, 1, 1e8, 1, 7, -1e8, 7], jnp.float32)[:, None]
    got = each(step, check_vma, jnp.zeros((V, 1)), rows, x)[..., 0]
    for replica in range(S):
        seen = 1 if groups is None or replica in groups[0] else 0
        assert got[replica].tolist() == [0, 0, 0, -seen] + [0] * (V - 4)


@cases.MODES
@pytest.mark.quick(1)
def test_aggregation_can_be_skipped(check_vma):
    """Summed by `jax.grad` where it is checked what varies, by the caller where not; every replica.

    float32 sums of 16 examples against one device's.
    """
    crossed = CrossShardOptimizer(Optimizer(o.SGD(1.0), "inner"), "sum", axis_name="r")
    slices = IndexedSlices(jnp.ones((2, D)), jnp.array([7, 7]), (V, D))

    def step(tree, ids, x):
        gradient = jax.grad(loss_of("sum", ids, x))(tree)["kernel"]
        gradient = gradient if check_vma else jax.lax.psum(gradient, "r")
        pairs = [(gradient, "['kernel']"), (slices, "['table']")]
        state = crossed.init(tree)
        return crossed.apply_gradients(pairs, tree, state, skip_gradients_aggregation=True)[0]

    got = each(step, check_vma)
    kernel, table = expected(o.SGD(1.0), "sum")[0]["kernel"], PARAMS["table"].copy()
    table[7] -= 2  # of two entries, once a replica
    np.testing.assert_allclose(got["kernel"], np.stack([kernel] * S), rtol=1e-5, atol=1e-5)
    assert np.array_equal(got["table"], np.stack([table] * S))


@cases.MODES
@pytest.mark.quick(1)
def test_none_passes_through(check_vma):
    crossed = CrossShardOptimizer(optax.sgd(1.0, momentum=0.9), axis_name="r")

    def step(tree, ids, x):
        state = crossed.init(tree)
        kernel = crossed.compute_gradients(loss_of("mean", ids, x), tree, ["['kernel']"])
        now, state = crossed.apply_gradients([*kernel, (None, "['table']")], tree, state)
        return now, crossed.get_slot(state, "['table']", "trace"), state.step

    tree, trace, count = each(step, check_vma)
    wanted, _ = expected(o.SGD(1.0), "mean")
    cases.assert_close(tree["kernel"], np.stack([wanted["kernel"]] * S))
    assert np.array_equal(tree["table"], np.stack([PARAMS["table"]] * S))
    assert np.array_equal(trace, np.zeros((S, V, D)))
    assert count.tolist() == [1] * S


# -- arguments and the step ------------------------------------------------------------------------


@cases.MODES
@pytest.mark.quick(1)
def test_the_arguments_of_the_wrapped_optimizer(check_vma):
    """A cotangent by example, a constant, a constraint and a rate: leave one out, and it fails.

    The bias is a constant that the loss depends on; the rule's own rate is absurd.
    """
    crossed = CrossShardOptimizer(Optimizer(o.SGD(1e3), "inner"), axis_name="r")
    options = {
        "var_list": ["['table']", "['kernel']"],
        "constraints": {"['kernel']": lambda kernel: kernel / jnp.linalg.norm(kernel)},
        "learning_rate": 2.0,
    }

    def step(tree, ids, x):
        def loss(tree):
            return cases.example_losses(tree, ids, x + tree["bias"])

        now, _, losses = crossed.minimize(
            loss, tree, crossed.init(tree), grad_loss=x[:, 0], **options
        )
        return now, losses

    got, losses = each(step, check_vma, cases.params() | {"bias": jnp.zeros(D)}, IDS, X)
    assert not got.pop("bias").any()
    rows = [row.astype(np.float64) for row in (PARAMS["kernel"], *PARAMS["table"])]
    for row, g in cases.row_gradients(rows, "sum", slice(None), X[:, 0]).items():
        rows[row] = rows[row] - 2.0 * g / S
    wanted = {"kernel": rows[0] / np.linalg.norm(rows[0]), "table": np.stack(rows[1:])}
    cases.assert_close(got, jax.tree.map(lambda leaf: np.stack([leaf] * S), wanted))
    # Unscaled and not seeded; two programs' tanh in float32.
    losses_of_all = cases.example_losses(cases.params(), IDS, X)
    np.testing.assert_allclose(losses.reshape(-1), losses_of_all, rtol=1e-5, atol=1e-6)


# -- the optax form --------------------------------------------------------------------------------


def by_transform(transform, reduction, tree, ids, x):
    """Return two steps by an optax transform, with local gradients of unscaled losses."""
    state = transform.init(tree)
    for _ in range(2):
        local = jax.tree.map(lambda leaf: as_varying(leaf, frozenset({"r"})), tree)
        gradients = jax.grad(loss_of(reduction, ids, x))(local)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transform.update(gradients, state, tree)
        tree = optax.apply_updates(tree, updates)
    return tree


@pytest.mark.parametrize(
    ("reduction", "groups"), [("mean", [range(S)]), ("sum", [range(S)]), ("mean", GROUPS)]
)
@cases.MODES
@pytest.mark.quick(2)
def test_the_optax_form(reduction, groups, check_vma):
    options = {"group_assignment": GROUPS if groups is GROUPS else None}
    transform = cross_shard(optax.sgd(0.1, momentum=0.9), "r", reduction, **options)
    step = functools.partial(by_transform, transform, reduction)
    assert_groups(each(step, check_vma), o.Momentum(0.1), reduction, groups, steps=2)


# -- unbound axes, and refusals --------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"r": S}, {"a": 2, "b": 4}], ids=["one axis", "two axes"])
def test_gradients_that_are_summed_already_are_refused(sizes):
    axes = tuple(sizes)
    crossed = CrossShardOptimizer(optax.sgd(1.0), axis_name=axes)
    transform = cross_shard(optax.sgd(1.0), axes)

    def step(tree, ids, x):
        kernel = jax.lax.pcast(tree["kernel"], axes[:-1], to="varying")
        gradient = jax.grad(lambda k: loss_of("sum", ids, x)(tree | {"kernel": k}))(kernel)
        return crossed.apply_gradients([(gradient, "['kernel']")], tree, crossed.init(tree))[0]

    def update(tree, ids, x):
        gradient = jax.grad(loss_of("sum", ids, x))(tree)
        return transform.update(gradient, transform.init(tree), tree)[0]

    way_out = r"gradient of \['kernel'\].*compute_gradients.*skip_gradients_aggregation=True"
    for local, words in ((step, way_out), (update, r"cross_shard: gradient of \['kernel'\]")):
        with pytest.raises(ValueError, match=words):
            trained(local, True, sizes=sizes)


# -- without an axis -------------------------------------------------------------------------------


def test_an_unbound_axis_is_one_replica_and_one_warning():
    """Another warning would be an error."""
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=[[0]])
    with pytest.warns(UserWarning, match="no axis named r is bound") as seen:
        tree, _ = jax.jit(functools.partial(train, crossed, "mean"))(cases.params(), IDS, X)
    assert len(seen) == 1
    assert crossed.scale_loss(3.0) == 3.0
    cases.assert_close(tree, expected(o.SGD(0.1), "mean")[0])


# -- construction ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0, 1], [1, 2]], r"got \[1\] more than once"),
        ([[0, 1], [2]], r"got lists of \[1, 2\] ids"),
        ([[0, 2], [3, 4]], r"got \[1\] in none"),
        ([[False, True]], "got ids that are no integers"),
        ([[]], "got lists without ids"),
    ],
)
@pytest.mark.parametrize("make", [CrossShardOptimizer, cross_shard])
def test_groups(groups, words, make):
    with pytest.raises(ValueError, match=f"group_assignment: expected lists of .*{words}"):
        make(optax.sgd(0.1), axis_name="r", group_assignment=groups)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"axis_name": ("r", "q")}, r"expected all axes bound, or none, got \['q'\] unbound"),
        ({"group_assignment": [[0, 1]]}, "expected each of 8 replicas once, got 2 ids"),
    ],
)
def test_other_axes_than_those_of_the_step(options, words):
    crossed = CrossShardOptimizer(optax.sgd(0.1), **{"axis_name": "r"} | options)
    with pytest.raises(ValueError, match=words):
        trained(functools.partial(train, crossed, "mean"), True)


def test_groups_of_an_unbound_axis():
    crossed = CrossShardOptimizer(optax.sgd(0.1), axis_name="r", group_assignment=GROUPS)
    with pytest.raises(ValueError, match="group_assignment: expected each of 1 replicas once"):
        crossed.scale_loss(1.0)


CROSSED, OWN = (f(optax.sgd(0.1), axis_name="r") for f in (CrossShardOptimizer, Optimizer))
SLICES = IndexedSlices(jnp.ones((1, D)), jnp.array([0]), (V, D))
ONCE = cross_shard(optax.sgd(0.1), "r")
TWICE = "an optimizer without an axis of its own"


@pytest.mark.parametrize(
    ("kind", "opt", "options", "words"),
    [
        (ValueError, optax.sgd(0.1), {"reduction": "max"}, r"reduction: expected 'mean' \| 'sum'"),
        (ValueError, optax.sgd(0.1), {"axis_name": None}, "axis_name: expected the name of a mesh"),
        (ValueError, optax.sgd(0.1), {"name": ""}, "name: expected a word, got ''"),
        (TypeError, "sgd", {}, "opt: expected an Optimizer or an optax transform, got str"),
        (TypeError, o.SGD(0.1), {}, r"got SGD; wrap it: Optimizer\(SGD\(...\)\)"),
        (TypeError, CROSSED, {}, "one is enough: give it the optimizer that this one wraps"),
        (ValueError, OWN, {}, TWICE),
        (ValueError, ONCE, {}, TWICE),
        (ValueError, Optimizer(ONCE, "opt"), {}, TWICE),
    ],
)
def test_construction(kind, opt, options, words):
    with pytest.raises(kind, match=words):
        CrossShardOptimizer(opt, **({"axis_name": "r"} | options))


def test_the_optax_form_without_an_axis_and_with_none():
    transform = cross_shard(optax.sgd(1.0), "r")
    gradients = {"a": jnp.ones(2), "b": None}
    with pytest.warns(UserWarning, match="cross_shard: no axis named r is bound"):
        updates, _ = transform.update(gradients, transform.init(gradients))
    assert updates["b"] is None
    assert updates["a"].tolist() == [-1.0, -1.0]
    transform.update(gradients, transform.init(gradients))  # a second warning would be an error


@pytest.mark.parametrize(
    ("kind", "call", "words"),
    [
        (TypeError, lambda: cross_shard(o.SGD(0.1), "r"), r"opt: .* or SGD\(...\).as_optax\(\)"),
        (TypeError, lambda: cross_shard(OWN, "r"), "CrossShardOptimizer takes an Optimizer"),
        (ValueError, lambda: cross_shard(optax.sgd(0.1), "r", "max"), "reduction: expected 'mean'"),
        (ValueError, lambda: cross_shard(ONCE, axis_name="d"), TWICE),
        (ValueError, lambda: Optimizer(ONCE, "opt", axis_name="d"), TWICE),
        (TypeError, lambda: ONCE.update(SLICES, optax.EmptyState()), "the parameter: expected an"),
    ],
)
def test_what_the_optax_form_refuses(kind, call, words):
    with pytest.raises(kind, match=words):
        call()
