"""Which lookups are found and which are ignored, and every error of `nn.gradients`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from facade_cases import assert_same
from flax import nnx
from jax import lax
from nn_models import D, V, bag_of, ids_of, mesh_of
from reach_cases import CUT, FORMS, KEPT, loss_of

import tpu_embed
from tpu_embed import nn
from tpu_embed import optimizers as o

DIFFERENTIATED = "ignore:table 'films' .* is looked up under differentiation"
"""A derivative that is no step of training: that the table keeps its rows is what is meant."""
A, C = ids_of(1, (8,), lowest=0), ids_of(2, (8,), lowest=0)


def fused_step(loss, jitted=True):
    """Return a step of training that returns the loss."""

    def step(bag, *given):
        return nn.fused_value_and_grad(loss)(bag, *given)[0]

    return nnx.jit(step) if jitted else step


look_up = nnx.jit(nnx.remat(lambda bag, ids: bag(ids)))
SHAPES = {
    "twice": lambda bag: (bag(A), bag(C)),
    "in nnx.jit": lambda bag: (nnx.jit(lambda bag, ids: bag(ids))(bag, A), bag(C)),
    "in nnx.remat": lambda bag: (nnx.remat(lambda bag, ids: bag(ids))(bag, A), bag(C)),
    "grouped": lambda bag: (bag(np.stack([A, C])[..., None]),),
    "of any rank": lambda bag: (bag(A), bag(C[:, None])),
    "host ids": lambda bag: (bag(jnp.asarray(A)), bag(C.astype(np.int64))),
    "merged": lambda bag: (look_up(nnx.merge(*nnx.split(bag)), A), look_up(bag, C)),
}


@pytest.mark.parametrize(
    ("shape", "jitted"), [*((s, True) for s in SHAPES), ("twice", False), ("merged", False)]
)
@pytest.mark.quick(2)
def test_every_lookup_is_found(shape, jitted):
    """The table after steps of SGD is what the dense gradient gives."""
    bag = bag_of(o.SGD(0.5), devices=2)
    rows = jnp.asarray(np.array(bag.embedding))

    def total(found):
        return sum((jnp.cos(one) ** 2).sum() for one in found)

    step = fused_step(lambda bag: total(SHAPES[shape](bag)), jitted)
    dense = jax.jit(jax.value_and_grad(lambda rows: total((rows[A], rows[C]))))
    for _ in range(2):  # a compiled function of nnx is not traced again
        expected, gradient = dense(rows)
        rows = rows - 0.5 * gradient
        np.testing.assert_allclose(step(bag), expected, rtol=1e-5)
        np.testing.assert_allclose(bag.embedding, rows, atol=1e-6)  # summed in another order
    assert int(bag.step[...]) == 2


def test_the_update_is_the_oracles():
    bag, rng = bag_of(o.SGD(0.5), combiner="mean"), np.random.default_rng(4)
    before, ids = np.array(bag.embedding, np.float64), ids_of(3)
    weights = rng.uniform(0.5, 2, ids.shape).astype(np.float32)
    gradient = rng.normal(size=(len(ids), D)).astype(np.float32)
    nn.fused_value_and_grad(lambda bag: (bag(ids, weights) * gradient).sum())(bag)
    for row, some, g in zip(ids, weights, gradient, strict=True):
        gains = oracle.gains(some[row >= 0].tolist(), "mean")
        np.subtract.at(before, row[row >= 0], 0.5 * np.outer(gains, g))
    np.testing.assert_allclose(bag.embedding, before, atol=1e-6)  # float32 against float64


@pytest.mark.filterwarnings(DIFFERENTIATED)
def test_weights_are_differentiable():
    bag, ids = bag_of(o.SGD(0.5), devices=2, combiner="mean"), ids_of(3, lowest=0)
    rows, weights = np.array(bag.embedding), np.random.default_rng(4).uniform(0.5, 2, ids.shape)

    @jax.jit
    def gradients(weights):
        def means(weights):
            return (rows[ids] * weights[..., None]).sum(1) / weights.sum(1)[:, None]

        looks = (lambda weights: bag(ids, weights)), means
        return [jax.grad(lambda w, f=f: (jnp.cos(f(w)) ** 2).sum())(weights) for f in looks]

    found, expected = gradients(weights.astype(np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings(DIFFERENTIATED)
@pytest.mark.whole
def test_value_aux_and_state_are_as_with_nnx():
    """Statistics and keys change once, aux may hold modules, other arguments are handed on."""

    def make():
        rngs = nnx.Rngs(0)
        norm, dropout = nnx.BatchNorm(D, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        return nnx.Dict(bag=bag_of(o.SGD(0.0)), norm=norm, dropout=dropout)

    def loss(model, ids, scale):
        found = model.dropout(model.norm(model.bag(ids))) * scale
        model.found = nnx.Intermediate(found)  # a variable that was not there before
        return (found**2).sum(), {"model": model, "scale": scale}

    ours, theirs = make(), make()
    (expected, _), gradients = nnx.value_and_grad(loss, has_aux=True)(theirs, A, 2.0)
    (value, aux), found = nn.fused_value_and_grad(loss, has_aux=True)(ours, A, scale=2.0)
    assert aux["model"] is ours
    kept = nnx.Any(nnx.BatchStat, nnx.RngCount, nnx.Intermediate)
    got = value, found, aux["scale"], nnx.state(ours, kept)
    wanted = expected, gradients, 2.0, nnx.state(theirs, kept)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert [int(x.bag.step[...]) for x in (ours, theirs)] == [1, 0]


def test_two_models_by_their_places():
    models = [bag_of(o.SGD(1.0), seed=seed) for seed in (0, 1, 2)]
    before = [np.array(model.embedding) for model in models]

    def loss(a, b, c):
        return (a(A) * b(A) * c(A)).sum()

    value, (gradients, tables) = nn.sparse_value_and_grad(loss, argnums=(2, 0))(*models)
    assert len(gradients) == len(tables) == 2
    assert [list(found.lookups) for found in tables] == [[""], [""]]
    np.testing.assert_allclose(value, (before[0] * before[1] * before[2])[A].sum(), rtol=1e-5)
    expected = (before[0] * before[1])[A]
    np.testing.assert_allclose(tables[0].lookups[""][0].gradient, expected, rtol=1e-6)
    nn.fused_value_and_grad(loss, argnums=(2, 0))(*models)
    pairs = zip(models, before, strict=True)
    assert [(model.embedding != old).any() for model, old in pairs] == [True, False, True]


def test_a_clone_and_a_shared_layer_are_told_apart():
    bag = bag_of(o.SGD(1.0))
    model, rows = nnx.Dict(a=bag, again=bag, clone=nnx.clone(bag)), np.array(bag.embedding)
    nn.fused_value_and_grad(lambda m: (m.a(A) * m.again(C)).sum() + m.clone(A).sum())(model)
    of_both, of_clone = np.zeros_like(rows), np.zeros_like(rows)
    np.add.at(of_both, A, rows[C])
    np.add.at(of_both, C, rows[A])
    np.add.at(of_clone, A, 1)
    for layer, gradient in ((model.a, of_both), (model.clone, of_clone)):
        np.testing.assert_allclose(layer.embedding, rows - gradient, atol=1e-6)
        assert int(layer.step[...]) == 1


def test_between_the_two_verbs_gradients_can_be_changed():
    bag, scaled = bag_of(o.SGD(0.5)), bag_of(o.SGD(0.25))
    _, (_, gradients) = nn.sparse_value_and_grad(lambda bag: (bag(A) ** 2).sum())(bag)
    nn.apply_table_gradients(bag, gradients.map(lambda gradient: gradient * 0.5))
    nn.fused_value_and_grad(lambda bag: (bag(A) ** 2).sum())(scaled)
    np.testing.assert_array_equal(bag.embedding, scaled.embedding)


def test_a_table_read_otherwise_is_a_constant_with_a_warning():
    model = nnx.Dict(a=bag_of(o.SGD(0.5), devices=2))
    before = np.array(model.a.embedding)
    with pytest.warns(UserWarning, match="layer 'a': its table is a constant where") as warned:
        nn.fused_value_and_grad(lambda m: m.a(A).sum() + (m.a.embedding**2).sum())(model)
    assert [warning.filename for warning in warned] == [__file__]
    expected = before.copy()
    np.subtract.at(expected, A, 0.5)
    np.testing.assert_allclose(model.a.embedding, expected, atol=1e-6)


def test_a_layer_of_two_arguments_belongs_to_the_one_differentiated():
    shared = bag_of(o.SGD(1.0))
    both = nn.sparse_value_and_grad(lambda x, y: x.a(A).sum() + y.b(C).sum(), argnums=1)
    _, (_, gradients) = both(nnx.Dict(a=shared), nnx.Dict(b=shared))
    assert {name: len(found) for name, found in gradients.lookups.items()} == {"b": 2}


@pytest.mark.parametrize(
    ("first", "second"), [(np.uint8, np.uint8), (np.int8, np.uint16), (np.uint32, np.int32)]
)
@pytest.mark.quick(1)
def test_lookups_of_ids_of_any_dtype_and_width(first, second):
    """Padding between them is no row, whatever the dtypes."""
    table = tpu_embed.TableConfig(300, D, optimizer=o.SGD(0.5), combiner="mean")
    bag = nn.EmbeddingBag(table, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    wide, narrow = np.array([[1, 2, 100]], first), np.array([[4], [127], [5]], second)
    expected = np.array(bag.embedding)
    fused_step(lambda b, wide, narrow: b(wide).sum() + b(narrow).sum())(bag, wide, narrow)
    expected[wide] -= np.float32(0.5) / 3
    expected[narrow] -= 0.5
    np.testing.assert_allclose(bag.embedding, expected, atol=1e-6)  # a third, rounded
    assert int(bag.bad_ids[0]) == 0


@pytest.mark.whole
def test_weights_of_one_lookup_beside_none_and_of_another_dtype():
    def trained(*ones):
        bag, ids = bag_of(o.SGD(0.5), combiner="mean"), ids_of(1)
        nn.fused_value_and_grad(lambda b: (b(ids, *ones) ** 2).sum() + (b(A) ** 2).sum())(bag)
        return bag.embedding

    np.testing.assert_array_equal(trained(jnp.ones((16, 3), jnp.bfloat16)), trained())


@pytest.mark.filterwarnings(DIFFERENTIATED)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.quick(1)
def test_a_layer_closed_over_by_a_plain_jit(devices):
    bag = bag_of(o.SGD(0.5), devices=devices, combiner="sum")
    expected = np.array(bag.embedding)[A]
    np.testing.assert_array_equal(jax.jit(lambda ids: bag(ids))(A), expected)
    jax.jit(lambda ids: jax.vmap(bag)(ids))(A[:, None])
    found = jax.jit(jax.grad(lambda w: bag(A[:, None], w).sum()))(jnp.ones((8, 1)))
    np.testing.assert_allclose(found[:, 0], expected.sum(1), rtol=1e-5)  # in another order


def test_a_filter_sees_paths_from_the_model():
    model = nnx.Dict(a=bag_of(o.SGD(0.1)), b=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))
    chosen = nnx.All(nnx.Param, lambda path, _: path == ("b", "bias"))
    _, (gradients, _) = nn.sparse_value_and_grad(lambda m: m.b(m.a(A)).sum(), wrt=chosen)(model)
    assert [path for path, _ in nnx.to_flat_state(gradients)] == [("b", "bias")]


@pytest.mark.parametrize("count", [8, 5])
@pytest.mark.whole
def test_explicit_axes(count):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    table = tpu_embed.TableConfig(V, D, name="films", optimizer=o.SGD(0.5))
    bag, plain = nn.EmbeddingBag(table, mesh=mesh, rngs=nnx.Rngs(0)), bag_of(o.SGD(0.5), devices=8)
    step, ids = fused_step(lambda m, x: (m(x) ** 2).sum()), A[:count]
    step(plain, ids)
    with jax.set_mesh(mesh):
        step(bag, ids)
        np.testing.assert_array_equal(bag(ids), np.array(bag.embedding)[ids])
    np.testing.assert_array_equal(bag.embedding, plain.embedding)


def test_a_step_is_compiled_once():
    bag, traced = bag_of(o.Adam(0.1), devices=2), []
    step = fused_step(lambda bag, ids: traced.append(ids) or (bag(ids) ** 2).sum())
    counts = []
    for i in range(3):
        step(bag, ids_of(i))
        counts.append(len(traced))
    assert counts == counts[:1] * 3


# -- errors ----------------------------------------------------------------------------------------


def test_layers_of_one_path_are_refused():
    model = nnx.Dict({"a/b": bag_of(o.SGD(0.1)), "a": nnx.Dict(b=bag_of(o.SGD(0.1)))})
    with pytest.raises(ValueError, match="layers: expected a different path for every layer"):
        nn.fused_value_and_grad(lambda m: m["a/b"](A).sum() + m["a"].b(A).sum())(model)


@pytest.mark.filterwarnings(DIFFERENTIATED)
def test_a_step_is_not_differentiated():
    model = nnx.Dict(a=bag_of(o.SGD(0.1)), b=nnx.Linear(D, 1, rngs=nnx.Rngs(0)))

    def step(model):
        _, gradients = nn.fused_value_and_grad(lambda m: m.b(m.a(A)).sum())(model)
        return (gradients["b"]["kernel"][...] ** 2).sum()

    with pytest.raises(TypeError, match="update of a layer's table: expected a step that is not"):
        nnx.grad(step)(model)


def test_gradients_of_another_kind():
    bag = bag_of(o.SGD(0.1))
    with pytest.raises(TypeError, match="gradients: expected TableGradients, got dict"):
        nn.apply_table_gradients(bag, {})
    nn.apply_table_gradients(bag, nn.TableGradients({"": ()}))
    assert int(bag.step[...]) == 0


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        *(((), {"argnums": n}, "argnums: expected different places") for n in (1, (0, 0), "0")),
        ((A,), {"argnums": (0, 1)}, "argument 1: expected an nnx module, got ndarray"),
        ((), {"has_aux": True}, "has_aux=True: the function: expected a pair"),
    ],
)
def test_errors_of_arguments(given, options, words):
    step = nn.sparse_value_and_grad(lambda bag, other=None: bag(A).sum(), **options)
    with pytest.raises((TypeError, ValueError), match=words):
        step(bag_of(o.SGD(0.1)), *given)


def test_a_value_is_a_scalar():
    with pytest.raises(TypeError, match="scalar"):
        nn.sparse_value_and_grad(lambda bag: bag(A))(bag_of(o.SGD(0.1)))


def test_no_table_changes_when_one_cannot():
    model, other = nnx.Dict(a=bag_of(o.SGD(0.1)), b=bag_of(None)), bag_of(None)
    before = np.array(model.a.embedding)
    for loss, given in (
        (lambda m: m.a(A).sum() + m.b(A).sum(), (model,)),
        (lambda m, other: (m.a(A) * other(A)).sum(), (model, other)),
    ):
        step = nn.fused_value_and_grad(loss, argnums=tuple(range(len(given))))
        with pytest.raises(ValueError, match=r"every trainable table, got none for .'films'"):
            step(*given)
    np.testing.assert_array_equal(model.a.embedding, before)
    _, (_, gradients) = nn.sparse_value_and_grad(lambda m: m.a(A).sum())(model)
    with pytest.raises(ValueError, match=r"gradients: expected layers among \[''\], got 'a'"):
        nn.apply_table_gradients(model.a, gradients)


# -- rows that no gradient reaches are not updated -------------------------------------------------

ADAM = o.Adam(0.1, weight_decay_factor=0.1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick(2)
def test_a_lookup_that_is_cut_is_left_out(form):
    """Of the lookups that a step would train by."""
    graphdef, state = nnx.split(bag_of(ADAM))

    @jax.jit
    def looked_up(state):
        step = nn.sparse_value_and_grad(loss_of(form), has_aux=True)
        _, (_, tables) = step(nnx.merge(graphdef, state))
        return [one.ids for lookups in tables.lookups.values() for one in lookups]

    (ids,) = looked_up(state)
    assert sorted(np.asarray(ids).reshape(-1).tolist()) == sorted(KEPT)


@functools.cache
def stepped(loss):
    """Return what is in a layer after a step by a loss `(bag) -> (value, aux)`.

    A step before it gave momenta to all the rows that tests look up.
    """
    bag = bag_of(ADAM)
    nn.fused_value_and_grad(lambda bag: (bag(np.arange(6)) ** 2).sum())(bag)
    nnx.jit(lambda bag: nn.fused_value_and_grad(loss, has_aux=True)(bag)[0][0])(bag)
    return [np.array(bag.embedding), bag.logical_slots, bag.step[...], bag.bad_ids[...]]


def kept(bag):
    return (bag(KEPT) ** 2).sum(), None


@pytest.mark.parametrize(
    "loss",
    [
        lambda bag: (kept(bag)[0] + lax.stop_gradient(bag(CUT)).sum(), None),
        lambda bag: (kept(bag)[0], bag(np.append(CUT, 99))),  # 99 is no row
        lambda bag: (kept(bag)[0], (bag.embedding**2).sum()),
    ],
    ids=["stopped", "aux", "read by aux"],
)
@pytest.mark.quick(1)
def test_a_step_is_that_of_the_lookups_that_reach_the_value(loss):
    """Bit for bit: rows, slots and counters, without a warning."""
    assert_same(stepped(loss), stepped(kept))


@pytest.mark.whole
def test_a_layer_that_no_gradient_reaches_takes_no_step():
    used, cut = bag_of(ADAM), bag_of(ADAM)
    model = nnx.Dict(used=used, cut=cut, linear=nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    before = jax.tree.map(np.array, nnx.state(cut))

    def loss(model):
        stopped = lax.stop_gradient(model.cut(KEPT))
        return (model.linear(model.used(KEPT) * stopped) ** 2).sum()

    _, gradients = nn.fused_value_and_grad(loss)(model)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(cut))
    assert int(used.step[...]) == 1
    assert np.asarray(gradients["linear"]["kernel"][...]).any()
    alone = nn.sparse_value_and_grad(lambda bag: lax.stop_gradient(bag(CUT)).sum())
    value, (_, tables) = alone(cut)
    np.testing.assert_allclose(value, np.array(cut.embedding)[CUT].sum(), rtol=1e-6)
    assert tables.lookups == {}


def test_a_layer_without_an_optimizer_is_looked_up_behind_stop_gradient():
    model = nnx.Dict(a=bag_of(ADAM), teacher=bag_of(None))
    before = np.array(model.teacher.embedding)

    def loss(model):
        return ((model.a(KEPT) - lax.stop_gradient(model.teacher(KEPT))) ** 2).sum()

    nn.fused_value_and_grad(loss)(model)
    np.testing.assert_array_equal(model.teacher.embedding, before)
    with pytest.raises(ValueError, match="expected an optimizer for every trainable table"):
        nn.fused_value_and_grad(lambda m: ((m.a(KEPT) - m.teacher(KEPT)) ** 2).sum())(model)


def test_a_placed_batch_stands_beside_a_lookup_that_is_cut():
    bag = bag_of(o.SGD(0.5), devices=2)
    before = np.array(bag.embedding)
    batch = bag.place(np.array([4, 1]))
    nn.fused_value_and_grad(lambda b: b(batch).sum() + lax.stop_gradient(b(CUT)).sum())(bag)
    before[[4, 1]] -= 0.5
    np.testing.assert_array_equal(bag.embedding, before)


def test_a_table_read_by_what_is_cut_is_no_warning():
    nn.sparse_value_and_grad(lambda b: b(KEPT).sum() + lax.stop_gradient((b.embedding**2).sum()))(
        bag_of(ADAM)
    )
