"""`Embeddings`, all tables of a model in one engine: the engine's bits, however it is trained."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facade_cases import assert_same
from flax import nnx
from nn_models import bag_of, mesh_of

import tpu_embed
from tpu_embed import DynamicVocabulary, FeatureConfig, HostStorage, RaggedIds, TableConfig, nn
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher
from tpu_embed.io import restore_modules, save_modules

B, ROWS = 8, {"users": 20, "films": 60, "tags": 30}
SLOTS = {"users": "velocities", "films": "accumulators", "tags": "accumulators"}
KEYS, HOST = {"vocabulary": DynamicVocabulary(ttl=8)}, {"storage": HostStorage(device_rows=34)}
OPTIONS = {"plain": ({}, {}), "keys": (KEYS, KEYS), "tags": ({}, KEYS), "host": (HOST, HOST | KEYS)}
"""Of the tables of films and of tags, by kind."""


def features(kind="plain"):
    """Return a user, a film and a history of films that share a table, and bags of tags."""
    drawn = {"initializer": jax.nn.initializers.normal(0.3)}
    of_films, of_tags = (drawn | options for options in OPTIONS[kind])
    users = TableConfig(ROWS["users"], 4, name="users", optimizer=o.Adam(0.125))
    films = TableConfig(ROWS["films"], 4, name="films", combiner="sum", **of_films)
    tags = TableConfig(ROWS["tags"], 2, name="tags", combiner="mean", **of_tags)
    one_each = {"user": FeatureConfig(users), "film": FeatureConfig(films)}
    return one_each | {"seen": FeatureConfig(films, jagged=True), "tags": FeatureConfig(tags)}


def layer_of(kind="plain", devices=1, seed=0):
    where = {"mesh": mesh_of(devices), "rngs": nnx.Rngs(seed)}
    return nn.Embeddings(features(kind), o.Adagrad(0.25), **where)


def engine_of(kind, devices):
    """Return the engine of a layer, its first state, and a step of training."""
    engine = tpu_embed.EmbeddingEngine(features(kind), o.Adagrad(0.25), mesh=mesh_of(devices))

    @jax.jit
    def update(state, batch):
        values, rebuild = tpu_embed.split_activations(engine.lookup(state, batch))
        return engine.update(state, batch, jax.grad(lambda v: loss_of(rebuild(v)))(values))

    return engine, engine.init(nnx.Rngs(0).params()), update


def assert_same_rows(rows, engine, state, names=ROWS, slots=SLOTS):
    """Assert that a layer has the keys, the rows and a slot of an engine's state."""
    for name in names:
        ids = np.arange(ROWS[name])
        if engine.table_configs[name].vocabulary is not None:
            keys, ids = rows.engine.vocabularies.keys(name)
            assert_same(engine.vocabularies.keys(name), (keys, ids))
        for slot in {None, slots.get(name)}:
            held = (rows.engine, rows.state), (engine, state)
            assert_same(*(own.rows(has, name, ids, slot=slot) for own, has in held))


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


def towers_of(devices, seed=0):
    model = Towers(devices, seed)
    return model, nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)


def squared_error(model, batch, wanted):
    return ((model(batch) - wanted) ** 2).mean()


@nnx.jit(donate_argnums=(0, 1))
def step_of_towers(model, optimizer, batch, wanted):
    loss, gradients = nn.fused_value_and_grad(squared_error)(model, batch, wanted)
    optimizer.update(model, gradients)
    return loss


@nnx.jit(donate_argnums=0)
def step_of_rows(rows, batch):
    return nn.fused_value_and_grad(lambda rows: loss_of(rows(batch)))(rows)[0]


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("kind", ["keys", "host", "plain"])
@pytest.mark.quick(1)
def test_twenty_steps_have_the_engines_bits(kind, devices):
    rows, (engine, state, step) = layer_of(kind, devices), engine_of(kind, devices)
    with Prefetcher(rows.engine, map(draw, range(20))) as placed:
        for number, batch in enumerate(placed):
            step_of_rows(rows, rows.admit(batch))
            state = step(*engine.admit(state, engine.place(draw(number))))
    looked = rows.place(draw(50), training=False)
    found = nnx.jit(lambda rows, batch: rows(batch)["tags"])(rows, looked)
    expected = engine.lookup(*engine.admit(state, engine.place(draw(50), training=False)))["tags"]
    np.testing.assert_array_equal(found, expected)
    assert_same_rows(rows, engine, state)
    assert int(rows.step[...]) == 20


def test_a_model_is_trained_with_an_optimizer_of_its_own(tmp_path):
    (model, optimizer), (other, mine) = towers_of(2), towers_of(1, seed=1)
    ones = np.ones(B, np.float32)
    losses = [step_of_towers(model, optimizer, model.rows.place(draw(0)), ones) for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]
    save_modules(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    restore_modules(tmp_path / "saved", {"model": other, "optimizer": mine})
    batch, again = model.rows.place(draw(1)), other.rows.place(draw(1))
    np.testing.assert_allclose(other(again), model(batch), rtol=1e-5)
    graphdef, state = nnx.split(model)
    assert not [path for path, _ in nnx.to_flat_state(state) if {"tap", "seen"} & set(path)]
    for copied in (nnx.merge(graphdef, state), nnx.clone(model)):
        np.testing.assert_array_equal(copied(batch), model(batch))


def test_fit_trains_a_model_with_its_tables(tmp_path):
    """As steps by hand do, also over a break; the network's sums are of other programs."""
    by_hand, optimizer = towers_of(2)
    kept = np.array(by_hand.user.kernel[...])
    labels = [np.random.default_rng(n).normal(size=B).astype(np.float32) for n in range(6)]
    source = [(draw(step), labels[step]) for step in range(6)]
    for ids, wanted in source:
        step_of_towers(by_hand, optimizer, by_hand.rows.place(ids), wanted)
    how = {"optimizer": optax.sgd(0.05), "progress": False}
    for steps in (3, 6):
        model = Towers(devices=2)
        where = {"model": model, "steps": steps, "directory": tmp_path / "run"}
        report = tpu_embed.fit(model.rows, squared_error, source, **where, **how)
    assert (report.step, int(report.model.rows.step[...])) == (6, 6)
    np.testing.assert_allclose(report.model.user.kernel[...], by_hand.user.kernel[...], rtol=1e-4)
    assert (np.asarray(report.model.user.kernel[...]) != kept).any()
    batch, own = (one.rows.place(draw(9), training=False) for one in (report.model, by_hand))
    np.testing.assert_allclose(report.model(batch), by_hand(own), rtol=1e-4)

    def looks_up(model, batch, wanted):
        return model.rows(draw(0))["film"].sum()

    theirs, other = Towers().rows, {"rows": np.ones(2, np.float32)}
    for kind, rows, of, whole, words in (
        (TypeError, theirs, squared_error, model, "the one layer that stands in place"),
        (ValueError, model.rows, looks_up, model, r"expected rows, got .* fit looks up itself"),
        (TypeError, theirs, squared_error, other, "model: expected an nnx module"),
    ):
        with pytest.raises(kind, match=words):
            tpu_embed.fit(rows, of, source, model=whole, **how)


def test_ids_in_the_jit_whose_number_does_not_divide():
    config = TableConfig(30, 4, combiner="mean", optimizer=o.SGD(0.5))
    pair = {"a": FeatureConfig(config), "b": FeatureConfig(config)}
    rows, ids = [], {"a": np.arange(5), "b": np.array([[1, 2, -1], [7, -1, -1], [0, 29, 3]])}
    again = {"a": ids["a"] + 1, "b": ids["b"][:1]}

    @nnx.jit
    def step(layer, ids, again):
        found = layer(ids)
        both = nn.fused_value_and_grad(lambda m: loss_of(m(ids)) + loss_of(m(again)))(layer)
        return found, both[0]

    for devices in (1, 8):
        layer = nn.Embeddings(pair, mesh=mesh_of(devices), rngs=nnx.Rngs(0))
        eager = layer(ids)["b"]
        found, _ = step(layer, ids, again)
        assert {name: one.shape for name, one in found.items()} == {"a": (5, 4), "b": (3, 4)}
        np.testing.assert_allclose(found["b"], eager, rtol=1e-5)
        assert int(layer.step[...]) == 1
        assert layer.bad_ids[...].tolist() == [0, 0]
        rows.append(np.asarray(layer.engine.rows(layer.state, "table_0", np.arange(30))))
    np.testing.assert_allclose(*rows, rtol=1e-6)


def test_one_feature_without_a_name_is_looked_up_twice_with_weights():
    feature = FeatureConfig(TableConfig(20, 4, combiner="sum", optimizer=o.SGD(1.0)))
    rows = nn.Embeddings(feature, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    before = np.asarray(rows.engine.rows(rows.state, "table_0", np.arange(20)))
    ids, weights = np.arange(16).reshape(8, 2), np.full((8, 2), 0.5, np.float32)

    def train(other):
        nn.fused_value_and_grad(lambda rows: (rows(ids, weights) + rows(other)).sum())(rows)

    with pytest.raises(ValueError, match="expected a placed batch as the only lookup"):
        train(ids.astype(">i8"))  # other than native integers are placed
    train(ids)
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
    """`test_random_calls_equal_a_plain_loop` has batches of other ids and of another's turn."""
    rows, hosted = layer_of("keys", 2), layer_of("host", 2)
    maps = rows.engine.vocabularies
    for layer in (rows, hosted):
        with pytest.raises(ValueError, match=r"table 'films', .*got keys; .*layer\.place"):
            layer(draw(0))
    many = {"seen": RaggedIds.from_lists(np.arange(56).reshape(8, 7).tolist())}
    with pytest.raises(ValueError, match="at most 34 distinct ids"):
        hosted.place(draw(0) | many)
    assert (maps.placed, hosted.engine.vocabularies.placed) == (0, 0)
    with pytest.raises(ValueError, match="got one that is not admitted"):
        rows(rows.engine.place(draw(0)))
    with pytest.raises(ValueError, match="the batch of step 1"):
        rows.place(draw(1))  # an earlier one waits
    assert (maps.placed, maps.admitted) == (1, 0)
    with pytest.raises(ValueError, match=r"engine\.rows"):
        _ = bag_of(o.SGD(0.1), storage=HostStorage(device_rows=8)).embedding


ACTIONS = ["ahead", "ahead", "train", "train", "train", "bad", "look", "drop", "restore"]


@pytest.mark.parametrize(
    ("kind", "seed", "devices"),
    [
        ("host", 0, 2),
        ("host", 1, 4),
        ("host", 2, 1),
        ("keys", 1, 2),
        ("keys", 2, 2),
        ("keys", 0, 2),
    ],
)
@pytest.mark.quick(1)
def test_random_calls_equal_a_plain_loop(kind, seed, devices, tmp_path):
    """Whatever is placed ahead, refused, dropped or restored between the steps."""
    rng, rows, waiting = np.random.default_rng(seed), layer_of(kind, devices), []
    engine, state, update = engine_of("tags" if kind == "host" else kind, devices)
    plain, moved = engine.vocabularies, 0
    look_up = nnx.jit(lambda rows, batch: rows(batch))
    for number, action in enumerate(rng.permutation(ACTIONS * 3)):
        ids, maps = draw(number), rows.engine.vocabularies
        counts = maps.placed, maps.admitted
        if action == "ahead":
            waiting.append((ids, rows.engine.place(ids)))
        elif action == "train":
            ids, batch = waiting.pop(0) if waiting else (ids, None)
            step_of_rows(rows, rows.place(ids) if batch is None else rows.admit(batch))
            state = update(*engine.admit(state, engine.place(ids)))
        elif action == "bad":
            wrong = ids if waiting else ids | {"tags": np.ones((B, 3))}  # an earlier one waits
            with pytest.raises((ValueError, TypeError)):
                rows.place(wrong)
            assert (maps.placed, maps.admitted) == counts
        elif action == "look":
            own = engine.admit(state, engine.place(ids, training=False))
            found, expected = look_up(rows, rows.place(ids, training=False)), engine.lookup(*own)
            for name in ("user", "film", "tags"):
                np.testing.assert_array_equal(found[name], expected[name])
        elif action == "drop":
            maps.rewind(rows.state)
            waiting = []
        else:
            save_modules(tmp_path / f"{number}", {"rows": rows})
            rows, waiting = layer_of(kind, devices, seed=1), []
            restore_modules(tmp_path / f"{number}", {"rows": rows})
        mine = rows.engine.vocabularies
        assert (mine.admitted, mine.placed) == (plain.admitted, plain.placed + len(waiting))
        assert_same_rows(rows, engine, state, ["users"] if waiting else ROWS, slots={})
        if kind == "host":
            counters = rows.engine.storage.counters["films"]
            moved = max(moved, min(counters["sent"], counters["brought"]))
    assert bool(moved) == (kind == "host")


@pytest.mark.parametrize(
    ("saved", "restored"), [("keys", "keys"), ("host", "host"), ("tags", "host"), ("host", "tags")]
)
@pytest.mark.whole
def test_saved_on_8_devices_and_continued_on_4(saved, restored, tmp_path):
    """From memory and the host, to both."""
    layer, other = layer_of(saved, 8), layer_of(restored, 4, seed=1)

    def train(layer, steps):
        for step in steps:
            step_of_rows(layer, layer.place(draw(step)))

    train(layer, range(3))
    save_modules(tmp_path / "early", {"rows": layer})
    train(layer, range(3, 5))
    save_modules(tmp_path / "saved", {"rows": layer})  # of the host's rows, those that changed
    train(other, range(50, 53))  # what it knew is replaced
    restore_modules(tmp_path / "saved", {"rows": other})
    assert_same_rows(other, layer.engine, layer.state)
    if restored == "host":  # the next save goes on from this checkpoint if that has rows by id
        assert len(other.engine.storage.saves) == (saved == "host")
    for each in (layer, other):
        train(each, [5])
    assert_same_rows(other, layer.engine, layer.state)
    save_modules(tmp_path / "again", {"rows": other})
    third = nnx.eval_shape(lambda: layer_of(restored, seed=2))
    restore_modules(tmp_path / "again", {"rows": third})
    assert_same_rows(third, layer.engine, layer.state)


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


def _nnx_scan_carry(bag, ids):
    axes = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    return nnx.scan(lambda bag, x: (bag, bag(x)), **axes)(bag, ids[:, None])[1]


def _custom_jvp(bag, ids):
    @jax.custom_jvp
    def scaled(x):
        return bag(ids) * x

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), bag(ids) * tangents[0]))
    return scaled(jnp.float32(1))


def _custom_vjp(bag, ids):
    graphdef, state = nnx.split(bag)

    @jax.custom_vjp
    def looked_up(state, ids):
        return nnx.merge(graphdef, state)(ids)

    looked_up.defvjp(lambda *args: (looked_up(*args), None), lambda _, g: (None, None))
    return looked_up(state, ids)


EACH_ID, ONES = {"in_axes": (None, 0), "out_axes": 0}, np.ones((8, 1), np.float32)
REFUSED = {
    "jax.jit": lambda bag, ids: jax.jit(lambda ids: bag(ids))(ids),
    "jax.checkpoint": lambda bag, ids: jax.checkpoint(lambda ids: bag(ids))(ids),
    "scan": lambda bag, ids: jax.lax.scan(lambda c, x: (c, bag(x)), 0, ids[:, None])[1],
    "cond": lambda bag, ids: jax.lax.cond(ids.sum() > 0, bag, lambda x: 2 * bag(x), ids),
    "vmap": lambda bag, ids: jax.vmap(bag)(ids[:, None]),
    "while": lambda bag, ids: jax.lax.fori_loop(0, 2, lambda _, x: x + bag(ids).sum(), 0.0),
    "custom_jvp": _custom_jvp,
    "by weights": lambda bag, ids: jax.grad(lambda w: bag(ids[:, None], w).sum())(ONES),
    "custom_vjp": _custom_vjp,
    "a copy": lambda bag, ids: nnx.merge(*nnx.split(bag), copy=True)(ids),
    "nnx.clone": lambda bag, ids: nnx.clone(bag)(ids),
    "nnx.vmap": lambda bag, ids: nnx.vmap(lambda b, x: b(x), **EACH_ID)(bag, ids[:, None]),
    "nnx.scan": lambda bag, ids: nnx.scan(lambda b, x: b(x), **EACH_ID)(bag, ids[:, None]),
    "nnx.scan's carry": _nnx_scan_carry,
    "nnx.cond": lambda bag, ids: nnx.cond(ids.sum() > 0, lambda b: b(ids), lambda b: b(ids), bag),
}


@pytest.mark.filterwarnings("ignore:table 'films' .* is looked up under differentiation")
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.quick(10)
def test_a_lookup_whose_gradient_would_be_lost_is_an_error(way, jitted):
    model = nnx.Dict(a=bag_of(o.SGD(0.5), combiner="sum"))
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
    pair = dataclasses.make_dataclass("Pair", ["a"])(FeatureConfig(TableConfig(8, 2)))
    with pytest.raises(ValueError, match=r"features: expected containers.*got Pair; .*register"):
        nn.Embeddings(pair, mesh=mesh_of(1), rngs=nnx.Rngs(0))


def test_members_of_an_ensemble_are_mapped():
    """Models with tables of their own, trained by one vmap, as one by one."""
    bags = [bag_of(o.Adagrad(0.5), seed=seed, devices=2) for seed in range(2)]
    graphdef, _ = nnx.split(bags[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[nnx.state(bag) for bag in bags])
    ids = np.stack([np.arange(8), np.arange(8) + 3])

    def train(bag, ids):
        return nn.fused_value_and_grad(lambda bag: (bag(ids) ** 2).sum())(bag)[0]

    def step(state, ids):
        bag = nnx.merge(graphdef, state)
        return train(bag, ids), nnx.state(bag)

    values, state = jax.jit(jax.vmap(step))(stacked, ids)
    for member, bag in enumerate(bags):
        np.testing.assert_allclose(values[member], train(bag, ids[member]), rtol=1e-6)
        own = nnx.merge(graphdef, jax.tree.map(lambda x, m=member: x[m], state))
        np.testing.assert_array_equal(own.embedding, bag.embedding)
