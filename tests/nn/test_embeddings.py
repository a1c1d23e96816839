"""`Embeddings`, all tables of a model in one engine: the engine's bits, however it is trained."""

import dataclasses
import functools
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import assert_same
from flax import nnx
from nn_models import mesh_of

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, RaggedIds, TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher
from tpu_embed.io import restore_modules, save_modules

B, ROWS = 8, {"users": 20, "films": 60, "tags": 30}


def features(kind="plain"):
    """Return a user, a film and a history of films that share a table, and bags of tags."""
    rule = o.Adam(0.125)
    options: dict[str, Any] = {"initializer": jax.nn.initializers.normal(0.3)}
    if kind == "keys":
        options["vocabulary"] = DynamicVocabulary(ttl=8)
    elif kind == "host":
        options["storage"] = HostStorage(device_rows=48)
    users = TableConfig(ROWS["users"], 4, name="users", optimizer=rule)
    films = TableConfig(ROWS["films"], 4, name="films", combiner="sum", **options)
    tags = TableConfig(ROWS["tags"], 2, name="tags", combiner="mean", **options)
    return {
        "user": FeatureConfig(users),
        "film": FeatureConfig(films),
        "seen": FeatureConfig(films, jagged=True),
        "tags": FeatureConfig(tags),
    }


def layer_of(kind="plain", devices=1, seed=0) -> Any:
    rngs = nnx.Rngs(seed)
    return nn.Embeddings(features(kind), o.Adagrad(0.25), mesh=mesh_of(devices), rngs=rngs)


def engine_of(kind, devices):
    """Return the engine of a layer, and its first state."""
    engine = tpu_embed.EmbeddingEngine(features(kind), o.Adagrad(0.25), mesh=mesh_of(devices))
    return engine, engine.init(nnx.Rngs(0).params())


def update(engine, state, batch):
    values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))
    return engine.update(state, batch, jax.grad(lambda v: loss_of(rebuild(v)))(values))


def draw(step):
    rng = np.random.default_rng(step)
    seen = [rng.integers(0, 50, n).tolist() for n in rng.integers(0, 4, B)]
    return {
        "user": rng.integers(0, ROWS["users"], B),
        "film": rng.integers(0, 50, B),
        "seen": RaggedIds.from_lists(seen),
        "tags": rng.integers(0, 20, (B, 3)),
    }


def loss_of(found):
    """Return Σ (a² + a): its gradient 2a + 1 has the same bits in every program."""
    arrays = jax.tree.leaves(tpu_embed.split_activations(found)[0])
    return sum((one**2 + one).sum() for one in arrays)


class Towers(nnx.Module):
    """Two towers, one of them over a history."""

    def __init__(self, devices=1, seed=0):
        rngs, self.rows = nnx.Rngs(seed), layer_of("plain", devices, seed)
        self.user, self.film = nnx.Linear(8, 4, rngs=rngs), nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, batch):
        found = self.rows(batch)
        user = self.user(jnp.concatenate([found["user"], found["seen"].means()], -1))
        return (user * self.film(jnp.concatenate([found["film"], found["tags"]], -1))).sum(-1)


@nnx.jit(donate_argnums=0)
def step_of_rows(rows, batch):
    return nn.fused_value_and_grad(lambda rows: loss_of(rows(batch)))(rows)[0]


CASES = [("plain", 8), ("keys", 8), ("host", 1)]
WHOLE = [("plain", 1), ("keys", 1), ("host", 8)]


@pytest.mark.parametrize(
    ("kind", "devices"), [*CASES, *(pytest.param(*case, marks=pytest.mark.whole) for case in WHOLE)]
)
def test_twenty_steps_have_the_engines_bits(kind, devices):
    rows, (engine, state) = layer_of(kind, devices), engine_of(kind, devices)
    step = jax.jit(functools.partial(update, engine))
    with Prefetcher(rows.engine, map(draw, range(20))) as placed:
        for number, batch in enumerate(placed):
            step_of_rows(rows, rows.admit(batch))
            state = step(*engine.admit(state, engine.place(draw(number))))
    looked = rows.place(draw(50), training=False)
    found = nnx.jit(lambda rows, batch: rows(batch)["tags"])(rows, looked)
    expected = engine.lookup(*engine.admit(state, engine.place(draw(50), training=False)))["tags"]
    np.testing.assert_array_equal(found, expected)
    for name in ROWS:
        ids = np.arange(20)
        if kind == "keys" and name != "users":
            keys, ids = rows.engine.vocabularies.keys(name)
            assert_same(engine.vocabularies.keys(name), (keys, ids))
        assert_same(rows.engine.rows(rows.state, name, ids), engine.rows(state, name, ids))
    assert int(rows.step[...]) == 20


def test_a_model_is_trained_with_an_optimizer_of_its_own(tmp_path):
    model = Towers(devices=8)
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        loss, grads = nn.fused_value_and_grad(lambda m: ((m(batch) - 1.0) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, model.rows.place(draw(0)))) for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    save_modules(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    other = Towers(devices=1, seed=1)
    mine = nnx.Optimizer(other, optax.sgd(0.05), wrt=nnx.Param)
    restore_modules(tmp_path / "saved", {"model": other, "optimizer": mine})
    batch, again = model.rows.place(draw(1)), other.rows.place(draw(1))
    np.testing.assert_allclose(other(again), model(batch), rtol=1e-5)
    graphdef, state = nnx.split(model)
    assert not [path for path, _ in nnx.to_flat_state(state) if {"tap", "seen"} & set(path)]
    for copied in (nnx.merge(graphdef, state), nnx.clone(model)):
        np.testing.assert_array_equal(copied(batch), model(batch))


def test_fit_trains_a_model_with_its_tables(tmp_path):
    """As steps by hand do, also over a break; the network's sums are of other programs."""
    by_hand, kept = Towers(devices=2), np.asarray(Towers(devices=2).user.kernel[...])
    optimizer = nnx.Optimizer(by_hand, optax.sgd(0.05), wrt=nnx.Param)
    labels = [np.random.default_rng(n).normal(size=B).astype(np.float32) for n in range(6)]
    source = [(draw(step), labels[step]) for step in range(6)]

    def loss(model, batch, wanted):
        return ((model(batch) - wanted) ** 2).mean()

    for ids, wanted in source:
        batch = by_hand.rows.place(ids)
        optimizer.update(by_hand, nn.fused_value_and_grad(loss)(by_hand, batch, wanted)[1])
    how = {"optimizer": optax.sgd(0.05), "progress": False}
    for steps in (3, 6):
        model = Towers(devices=2)
        where = {"model": model, "steps": steps, "directory": tmp_path / "run"}
        report = tpu_embed.fit(model.rows, loss, source, **where, **how)
    assert (report.step, int(report.model.rows.step[...])) == (6, 6)
    np.testing.assert_allclose(report.model.user.kernel[...], by_hand.user.kernel[...], rtol=1e-4)
    assert (np.asarray(report.model.user.kernel[...]) != kept).any()
    batch, own = (one.rows.place(draw(9), training=False) for one in (report.model, by_hand))
    np.testing.assert_allclose(report.model(batch), by_hand(own), rtol=1e-4)

    def looks_up(model, batch, wanted):
        return model.rows(draw(0))["film"].sum()

    other = {"rows": np.ones(2, np.float32)}
    for kind, rows, of, whole, words in (
        (TypeError, Towers().rows, loss, model, "the one layer that stands in place of the engine"),
        (ValueError, model.rows, looks_up, model, r"expected rows, got .* fit looks up itself"),
        (TypeError, Towers().rows, loss, other, "model: expected an nnx module that has the layer"),
    ):
        with pytest.raises(kind, match=words):
            tpu_embed.fit(rows, of, source, model=whole, **how)


def test_ids_in_the_jit_whose_number_does_not_divide():
    config = TableConfig(30, 4, combiner="mean", optimizer=o.SGD(0.5))
    pair = {"a": FeatureConfig(config), "b": FeatureConfig(config)}
    rows, ids = [], {"a": np.arange(5), "b": np.array([[1, 2, -1], [7, -1, -1], [0, 29, 3]])}
    for devices in (1, 8):
        layer = nn.Embeddings(pair, mesh=mesh_of(devices), rngs=nnx.Rngs(0))
        found = nnx.jit(lambda layer, ids: layer(ids))(layer, ids)
        assert {name: one.shape for name, one in found.items()} == {"a": (5, 4), "b": (3, 4)}
        np.testing.assert_allclose(found["b"], layer(ids)["b"], rtol=1e-5)
        again = {"a": ids["a"] + 1, "b": ids["b"][:1]}

        def step(layer, ids, again):
            both = nn.fused_value_and_grad(lambda m: loss_of(m(ids)) + loss_of(m(again)))
            return both(layer)[0]

        nnx.jit(step)(layer, ids, again)
        assert int(layer.step[...]) == 1
        assert layer.bad_ids[...].tolist() == [0, 0]
        rows.append(np.asarray(layer.engine.rows(layer.state, "table_0", np.arange(30))))
    np.testing.assert_allclose(*rows, rtol=1e-6)


def test_one_feature_without_a_name_is_looked_up_twice_with_weights():
    feature = FeatureConfig(TableConfig(20, 4, combiner="sum", optimizer=o.SGD(1.0)))
    rows = nn.Embeddings(feature, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    before = np.asarray(rows.engine.rows(rows.state, "table_0", np.arange(20)))
    ids, weights = np.arange(16).reshape(8, 2), np.full((8, 2), 0.5, np.float32)
    with pytest.raises(ValueError, match="expected a placed batch as the only lookup"):
        nn.fused_value_and_grad(lambda rows: (rows(ids, weights) + rows(ids.astype(">i8"))).sum())(
            rows  # other than native integers are placed
        )
    nn.fused_value_and_grad(lambda rows: (rows(ids, weights) + rows(ids)).sum())(rows)
    after = np.asarray(rows.engine.rows(rows.state, "table_0", np.arange(20)))
    np.testing.assert_allclose(after[:16], before[:16] - 1.5, rtol=1e-6)
    np.testing.assert_array_equal(after[16:], before[16:])
    for look_up in (lambda rows, *given: rows(*given), nnx.jit(lambda rows, *given: rows(*given))):
        with pytest.raises(ValueError, match=r"weights: expected real .* ids' shape \(5, 2\)"):
            look_up(rows, ids[:5], weights[:3])  # also where examples are added to both
        with pytest.raises(ValueError, match="rank 1 or more"):
            look_up(rows, jnp.array(3))
    with pytest.raises(ValueError, match="weights: expected None with what was looked up"):
        rows(nn.Activations(after), weights)


def test_a_batch_that_is_refused_changes_nothing():
    rows = layer_of("keys", 2)
    maps = rows.engine.vocabularies
    with pytest.raises(TypeError):
        rows.place(draw(0) | {"tags": np.ones((B, 3))})
    assert (maps.placed, len(maps)) == (0, 0)
    with pytest.raises(ValueError, match=r"table 'films', .*got keys; .*layer\.place"):
        rows(draw(0))
    ahead = rows.engine.place(draw(0))
    with pytest.raises(ValueError, match="got one that is not admitted"):
        rows(ahead)
    with pytest.raises(ValueError, match="the batch of step 1"):
        rows.place(draw(1))  # an earlier one waits
    assert maps.placed == 1
    step_of_rows(rows, rows.admit(ahead))
    step_of_rows(rows, rows.place(draw(1)))
    assert (maps.placed, maps.admitted) == (2, 2)


ACTIONS = ["ahead", "ahead", "train", "train", "train", "bad", "look", "drop", "restore"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.whole) for n in (1, 2))])
def test_random_calls_equal_a_plain_loop(seed, tmp_path):
    """Whatever is placed ahead, refused, dropped or restored between the steps."""
    rng, rows, waiting, done = np.random.default_rng(seed), layer_of("keys", 2), [], set()
    engine, state = engine_of("keys", 2)
    plain: Any = engine.vocabularies
    for number in range(30):
        ids, maps, kind = draw(number), rows.engine.vocabularies, str(rng.choice(ACTIONS))
        counts = maps.placed, maps.admitted
        done.add(kind)
        if kind == "ahead":
            waiting.append((ids, rows.engine.place(ids)))
        elif kind == "train":
            ids, batch = waiting.pop(0) if waiting else (ids, None)
            step_of_rows(rows, rows.place(ids) if batch is None else rows.admit(batch))
            state = update(engine, *engine.admit(state, engine.place(ids)))
        elif kind == "bad":
            wrong = ids if waiting else ids | {"tags": np.ones((B, 3))}  # an earlier one waits
            with pytest.raises((ValueError, TypeError)):
                rows.place(wrong)
            assert (maps.placed, maps.admitted) == counts
        elif kind == "look":
            own = engine.admit(state, engine.place(ids, training=False))
            found = rows(rows.place(ids, training=False))
            np.testing.assert_array_equal(found["tags"], engine.lookup(*own)["tags"])
        elif kind == "drop":
            maps.rewind(rows.state)
            waiting = []
        else:
            save_modules(tmp_path / f"{number}", {"rows": rows})
            rows, waiting = layer_of("keys", 2, seed=1), []
            restore_modules(tmp_path / f"{number}", {"rows": rows})
        mine = rows.engine.vocabularies
        assert (mine.admitted, mine.placed) == (plain.admitted, plain.placed + len(waiting))
        for name in ["users"] if waiting else ROWS:
            places = np.arange(ROWS[name])
            if name != "users":
                keys, places = mine.keys(name)
                assert_same((keys, places), plain.keys(name))
            assert_same(
                rows.engine.rows(rows.state, name, places), engine.rows(state, name, places)
            )
    assert done == {*ACTIONS}


def test_after_an_interrupt_that_has_taken_the_rows_they_are_refused(monkeypatch):
    rows = layer_of("keys")
    set_state = nn.Embeddings.set_state

    def interrupted(layer, state):
        signal.raise_signal(signal.SIGINT)
        set_state(layer, state)

    ahead = rows.engine.place(draw(0))
    monkeypatch.setattr(nn.Embeddings, "set_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rows.admit(ahead)
    monkeypatch.undo()
    maps = rows.engine.vocabularies
    assert (maps.placed, maps.admitted) == (1, 1)
    with pytest.raises(ValueError, match=r"a state of step 0 while 1 was admitted before"):
        rows.admit(rows.engine.place(draw(1)))


# -- where a lookup may stand ----------------------------------------------------------------------


look_up = nnx.jit(nnx.remat(lambda rows, ids: rows(ids)))


def test_nested_functions_of_nnx_and_merged_models_train_alike():
    config = {"a": FeatureConfig(TableConfig(30, 4, name="a", optimizer=o.Adagrad(0.5)))}
    tables, ids = [], {"a": jnp.arange(8)}

    def nested(rows, ids):
        return look_up(nnx.merge(*nnx.split(rows)), ids)

    for look in (nested, lambda rows, ids: rows(ids)):
        rows = nn.Embeddings(config, mesh=mesh_of(2), rngs=nnx.Rngs(0))

        def loss(rows, look=look):
            return (look(rows, ids)["a"] * look(rows, {"a": ids["a"] + 1})["a"]).sum()

        for _ in range(3):  # the compiled function of nnx is not traced again
            nn.fused_value_and_grad(loss)(rows)
        assert int(rows.step[...]) == 3
        tables.append(rows.engine.tables(rows.state)["a"])
    np.testing.assert_allclose(*tables, rtol=1e-6)


def _nnx_scan(bag, ids):
    run = nnx.scan(lambda bag, x: bag(x), in_axes=(None, 0), out_axes=0)
    return run(bag, ids[:, None])


def _nnx_scan_carry(bag, ids):
    axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    return nnx.scan(lambda bag, x: (bag, bag(x)), **axes)(bag, ids[:, None])[1]


def _custom_jvp(bag, ids):
    @jax.custom_jvp
    def scaled(x):
        return bag(ids) * x

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), bag(ids) * tangents[0]))
    return scaled(jnp.float32(1))


def _by_weights(bag, ids):
    return jax.grad(lambda w: bag(ids[:, None], w).sum())(jnp.ones((8, 1)))


def _custom_vjp(bag, ids):
    graphdef, state = nnx.split(bag)

    @jax.custom_vjp
    def looked_up(state, ids):
        return nnx.merge(graphdef, state)(ids)

    looked_up.defvjp(lambda *args: (looked_up(*args), None), lambda _, g: (None, None))
    return looked_up(state, ids)


REFUSED = {
    "jax.jit": lambda bag, ids: jax.jit(lambda ids: bag(ids))(ids),
    "jax.checkpoint": lambda bag, ids: jax.checkpoint(lambda ids: bag(ids))(ids),
    "scan": lambda bag, ids: jax.lax.scan(lambda c, x: (c, bag(x)), 0, ids[:, None])[1],
    "cond": lambda bag, ids: jax.lax.cond(ids.sum() > 0, bag, lambda x: 2 * bag(x), ids),
    "vmap": lambda bag, ids: jax.vmap(bag)(ids[:, None]),
    "while": lambda bag, ids: jax.lax.fori_loop(0, 2, lambda _, x: x + bag(ids).sum(), 0.0),
    "custom_jvp": _custom_jvp,
    "a derivative by weights": _by_weights,
    "custom_vjp": _custom_vjp,
    "a copy": lambda bag, ids: nnx.merge(*nnx.split(bag), copy=True)(ids),
    "nnx.clone": lambda bag, ids: nnx.clone(bag)(ids),
    "nnx.vmap": lambda bag, ids: nnx.vmap(lambda b, x: b(x), in_axes=(None, 0))(bag, ids[:, None]),
    "nnx.scan": _nnx_scan,
    "nnx.scan's carry": _nnx_scan_carry,
    "nnx.cond": lambda bag, ids: nnx.cond(ids.sum() > 0, lambda b: b(ids), lambda b: b(ids), bag),
}


@pytest.mark.filterwarnings("ignore:table 'films' .* is looked up under differentiation")
@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_a_lookup_whose_gradient_would_be_lost_is_an_error(way, jitted):
    table = TableConfig(30, 4, name="films", combiner="sum", optimizer=o.SGD(0.5))
    model = nnx.Dict(a=nn.EmbeddingBag(table, mesh=mesh_of(1), rngs=nnx.Rngs(0)))
    before = np.asarray(model.a.embedding)

    def step(model, ids):
        return nn.fused_value_and_grad(lambda m: (REFUSED[way](m.a, ids) ** 2).sum())(model)[0]

    with pytest.raises(ValueError, match=r"layer 'a': expected lookups in plain code, nnx\.jit"):
        (nnx.jit(step) if jitted else step)(model, jnp.arange(8))
    np.testing.assert_array_equal(model.a.embedding, before)
    assert (model.a.seen, model.a.tap) == (None, None)
    nn.fused_value_and_grad(lambda m: m.a(np.arange(8)).sum())(model)  # it can be trained
    assert int(model.a.step[...]) == 1


def test_features_are_in_containers_that_a_program_can_take():
    @dataclasses.dataclass
    class Pair:
        a: Any

    with pytest.raises(ValueError, match=r"features: expected containers.*got Pair; .*register"):
        nn.Embeddings(Pair(FeatureConfig(TableConfig(8, 2))), mesh=mesh_of(1), rngs=nnx.Rngs(0))


def test_a_lookup_past_the_layer_is_named():
    rows = layer_of()
    batch = rows.place(draw(0))
    with pytest.warns(UserWarning, match="layer '': its table is a constant where the function"):
        nn.fused_value_and_grad(lambda m: loss_of(m.engine.lookup(m.state, batch)))(rows)
    assert int(rows.step[...]) == 0


def test_members_of_an_ensemble_are_mapped():
    """Models with tables of their own, trained by one vmap, as one by one."""
    table = TableConfig(30, 4, name="films", optimizer=o.Adagrad(0.5))
    bags = [nn.EmbeddingBag(table, mesh=mesh_of(2), rngs=nnx.Rngs(seed)) for seed in range(2)]
    graphdef, _ = nnx.split(bags[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[nnx.state(bag) for bag in bags])
    ids = np.stack([np.arange(8), np.arange(8) + 3])

    def step(state, ids):
        bag = nnx.merge(graphdef, state)
        value, _ = nn.fused_value_and_grad(lambda bag: (bag(ids) ** 2).sum())(bag)
        return nnx.state(bag), value

    state, values = jax.jit(jax.vmap(step))(stacked, ids)
    for member, bag in enumerate(bags):
        value, _ = nn.fused_value_and_grad(lambda b, m=member: (b(ids[m]) ** 2).sum())(bag)
        np.testing.assert_allclose(values[member], value, rtol=1e-6)
        own = nnx.merge(graphdef, jax.tree.map(lambda x, m=member: x[m], state))
        np.testing.assert_array_equal(own.embedding, bag.embedding)
