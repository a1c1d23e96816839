"""Restoring into tables that have changed: what is accepted, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_cases import contents, small, small_engine, small_state, table_of
from facade_cases import assert_same, mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager, restore, save

KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a checkpoint of 5 rows of 2, whose accumulators are 2, under Adagrad."""
    path, twos = tmp_path_factory.mktemp("forms") / "saved", np.full((5, 2), 2.0)
    state = small_state()
    state = small_engine().set_rows(state, "item", np.arange(5), twos, slot="accumulators")
    save(path, small_engine(), state, position=[1])
    return path


def saved():
    return table_of(small_engine(), small_state())


def test_a_table_grows(path):
    grown = small(9, devices=2)
    state = restore(path, grown, key=KEY).state
    fresh = contents(grown, grown.init(KEY))
    tables, slots, _ = contents(grown, state)
    np.testing.assert_array_equal(tables["item"][:5], saved())
    np.testing.assert_array_equal(tables["item"][5:], fresh[0]["item"][5:])
    assert (slots["item"]["accumulators"][:5] == 2).all()
    assert (slots["item"]["accumulators"][5:] == np.float32(0.1)).all()


def test_slots_are_made_where_there_were_none(tmp_path):
    serving = small(optimizer=False)
    save(tmp_path / "saved", serving, serving.init(jax.random.key(0)))
    state = restore(tmp_path / "saved", small_engine(), key=KEY).state
    np.testing.assert_array_equal(table_of(small_engine(), state), saved())
    assert (small_engine().slots(state)["item"]["accumulators"] == np.float32(0.1)).all()


def test_another_rate_is_the_same_optimizer(path):
    slower = small(optimizer=o.Adagrad(lambda step: 0.1 / step))
    slots = contents(slower, restore(path, slower).state)[1]
    assert (slots["item"]["accumulators"] == 2).all()


@pytest.mark.parametrize("rule", [o.AdagradMomentum(0.5), o.RMSProp(0.5), optax.adam(0.5)])
@pytest.mark.quick(1)
def test_another_optimizers_slots_are_made_anew(path, rule):
    other = small(optimizer=rule)
    tables, slots, _ = contents(other, restore(path, other, key=KEY).state)
    np.testing.assert_array_equal(tables["item"], saved())
    assert_same(slots, contents(other, other.init(KEY))[1])


@pytest.mark.parametrize(("first", "second"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.quick(1)
def test_dtypes_are_converted_when_asked(tmp_path, first, second):
    engines = small(dtype=first), small(dtype=second, devices=2)
    state = engines[0].init(jax.random.key(0))
    save(tmp_path / "saved", engines[0], state)
    with pytest.raises(ValueError, match=f"expected dtype {second}, got dtype {first}; convert="):
        restore(tmp_path / "saved", engines[1])
    found = table_of(engines[1], restore(tmp_path / "saved", engines[1], convert=True).state)
    np.testing.assert_array_equal(found, table_of(engines[0], state).astype(found.dtype))


def _two(*names, **options):
    """Return an engine of tables of these names; the options are of the first."""
    tables = {name: TableConfig(5, 2, name=name) for name in names}
    tables[names[0]] = TableConfig(5, 2, name=names[0], **options)
    features = {name: FeatureConfig(table) for name, table in tables.items()}
    return EmbeddingEngine(features, o.Adagrad(0.5), mesh=mesh(1))


def test_tables_are_left_out_and_made_anew(tmp_path):
    engine, other = _two("item", "user"), _two("item", "day")
    state = engine.init(jax.random.key(0))
    save(tmp_path / "saved", engine, state)
    saved = engine.tables(state)
    for made, anew in ((_two("item"), None), (other, "day"), (engine, "user")):
        found = restore(tmp_path / "saved", made, key=KEY, leave_out=["user"]).state
        fresh = made.tables(made.init(KEY))
        for name, table in made.tables(found).items():
            np.testing.assert_array_equal(table, (fresh if name == anew else saved)[name])


REFUSED = {
    "more rows": ({"rows": 9}, {}, r"table 'item': expected 9 rows, got 5; give key="),
    "fewer rows": ({"rows": 4}, {"key": KEY}, r"table 'item': expected at most 4 rows, got 5; "),
    "dim": ({"dim": 3}, {"key": KEY}, r"'item': expected shape \[3\], got shape \[2\]; declare"),
    "name": ({"name": "user"}, {}, r"table 'item': expected it among .*\['user'\].*leave_out"),
    "left out": (
        {"name": "user"},
        {"leave_out": ["item"]},
        r"got tables \[\]; give key=",
    ),
    "nothing to leave out": ({}, {"leave_out": "item"}, r"expected some of \['item'\], got 'i'"),
    "optimizer": (
        {"optimizer": o.AdagradMomentum(0.5)},
        {},
        "slot 'accumulators': .*; give key=",
    ),
}


@pytest.mark.parametrize(("changes", "options", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused(path, changes, options, said):
    with pytest.raises(ValueError, match=said):
        restore(path, small(**changes), **options)


def test_counters_go_by_feature(tmp_path):
    engine, fewer = _two("item", "user"), _two("user")
    state = engine.init(KEY)
    counters = {**state.counters, "bad_ids": jnp.array([3, 4], jnp.int32)}
    state = type(state)(state.tables, state.slots, jnp.int32(6), counters)
    save(tmp_path / "saved", engine, state)
    assert_same(restore(tmp_path / "saved", engine).state.counters, counters)
    left = restore(tmp_path / "saved", fewer, leave_out=["item"]).state
    assert left.counters["bad_ids"].tolist() == [4]
    assert int(left.step) == 6


# -- slots that were saved and are not wanted any more -----------------------------------------

DRAWN = jax.nn.initializers.uniform(1.0)
HOSTED = {"storage": HostStorage(device_rows=5), "initializer": DRAWN}
TABLES = {"on the devices": {}, "on the host": HOSTED}
LOST = r"table 'item', slots: expected slots of {}, \[\], got those of Adam, \['momenta', 'velo"


def rows_of(engine, state):
    return engine.rows(state, "item", np.arange(5))


@pytest.fixture(scope="module", params=TABLES)
def under_adam(request, tmp_path_factory):
    """Return a manager's directory with a checkpoint under Adam, options of its table, its rows."""
    engine = small(optimizer=o.Adam(0.5), **TABLES[request.param])
    state, batch = engine.admit(engine.init(KEY), engine.place({"x": np.arange(5)}))
    state = engine.update(state, batch, {"x": np.ones((5, 2), np.float32)})
    path = tmp_path_factory.mktemp("slots")
    save(path / "1", engine, state)
    return path, TABLES[request.param], rows_of(engine, state)


def test_a_rule_without_slots_drops_them_only_when_asked(under_adam):
    path, options, rows = under_adam
    plain = small(optimizer=o.SGD(0.5), devices=2, **options)
    with pytest.raises(ValueError, match=LOST.format("SGD") + ".*; give key= to go on without"):
        restore(path / "1", plain)
    with CheckpointManager(path, plain) as manager:
        with pytest.raises(ValueError, match=LOST.format("SGD")):
            manager.restore()
        state = manager.restore(key=KEY).state
    np.testing.assert_array_equal(rows_of(plain, state), rows)


def test_an_engine_without_optimizers_leaves_them_out(under_adam):
    path, options, rows = under_adam
    serving = small(optimizer=False, **options)
    np.testing.assert_array_equal(rows_of(serving, restore(path / "1", serving).state), rows)
    # A table that is not trained is no reason to refuse where nothing is trained.
    fixed = small(optimizer=False, trainable=False, **options)
    np.testing.assert_array_equal(rows_of(fixed, restore(path / "1", fixed).state), rows)


def test_a_table_that_is_not_trained_any_more_drops_them_only_when_asked(tmp_path):
    first, fixed = _two("item", "user"), _two("item", "user", trainable=False)
    state = first.init(KEY)
    save(tmp_path / "saved", first, state)
    with pytest.raises(ValueError, match="got those of Adagrad"):
        restore(tmp_path / "saved", fixed)
    found = restore(tmp_path / "saved", fixed, key=KEY).state
    np.testing.assert_array_equal(rows_of(fixed, found), rows_of(first, state))
    assert fixed.slots(found)["user"].keys() == {"accumulators"}


def test_what_has_no_slots_goes_on_under_any_rule_without(tmp_path):
    def rule(gradient, row, slots, learning_rate, step):
        return row - learning_rate * gradient, slots

    first, other = small(optimizer=o.SGD(0.5)), small(optimizer=o.CustomOptimizer(rule, {}))
    save(tmp_path / "saved", first, state := first.init(KEY))
    found = restore(tmp_path / "saved", other).state
    np.testing.assert_array_equal(rows_of(other, found), rows_of(first, state))
