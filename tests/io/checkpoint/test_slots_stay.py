"""Slots that were saved are restored, made anew when that is asked for, or left out for serving."""

import jax
import numpy as np
import pytest
from checkpoint_cases import small
from facade_cases import mesh

from tpu_embed import EmbeddingEngine, FeatureConfig, HostStorage, TableConfig
from tpu_embed import optimizers as o
from tpu_embed.io import CheckpointManager, restore, save

KEY, DRAWN = jax.random.key(7), jax.nn.initializers.uniform(1.0)
TABLES = {
    "on the devices": {},
    "on the host": {"storage": HostStorage(device_rows=5), "initializer": DRAWN},
}
LOST = r"table 'item', slots: expected slots of {}, \[\], got those of Adam, \['momenta', 'velo"


def rows_of(engine, state):
    return engine.rows(state, "item", np.arange(5))


@pytest.fixture(scope="module", params=TABLES)
def saved(request, tmp_path_factory):
    """Return a manager's directory with a checkpoint under Adam, options of its table, its rows."""
    engine = small(optimizer=o.Adam(0.5), **TABLES[request.param])
    state, batch = engine.admit(engine.init(KEY), engine.place({"x": np.arange(5)}))
    state = engine.update(state, batch, {"x": np.ones((5, 2), np.float32)})
    path = tmp_path_factory.mktemp("slots")
    save(path / "1", engine, state)
    return path, TABLES[request.param], rows_of(engine, state)


def test_a_rule_without_slots_drops_them_only_when_asked(saved):
    path, options, rows = saved
    plain = small(optimizer=o.SGD(0.5), devices=2, **options)
    with pytest.raises(ValueError, match=LOST.format("SGD") + ".*; give key= to go on without"):
        restore(path / "1", plain)
    with CheckpointManager(path, plain) as manager:
        with pytest.raises(ValueError, match=LOST.format("SGD")):
            manager.restore()
        state = manager.restore(key=KEY).state
    np.testing.assert_array_equal(rows_of(plain, state), rows)


def test_an_engine_without_optimizers_leaves_them_out(saved):
    path, options, rows = saved
    serving = small(optimizer=False, **options)
    np.testing.assert_array_equal(rows_of(serving, restore(path / "1", serving).state), rows)
    # A table that is not trained is no reason to refuse where nothing is trained.
    fixed = small(optimizer=False, trainable=False, **options)
    np.testing.assert_array_equal(rows_of(fixed, restore(path / "1", fixed).state), rows)


def test_a_table_that_is_not_trained_any_more_drops_them_only_when_asked(tmp_path):
    def engine_of(**options):
        tables = {name: TableConfig(5, 2, name=name) for name in ("item", "user")}
        tables["item"] = TableConfig(5, 2, name="item", **options)
        features = {name: FeatureConfig(table) for name, table in tables.items()}
        return EmbeddingEngine(features, o.Adam(0.5), mesh=mesh(1))

    first, fixed = engine_of(), engine_of(trainable=False)
    state = first.init(KEY)
    save(tmp_path / "saved", first, state)
    with pytest.raises(ValueError, match=LOST.format("a table that is not trained")):
        restore(tmp_path / "saved", fixed)
    found = restore(tmp_path / "saved", fixed, key=KEY).state
    np.testing.assert_array_equal(rows_of(fixed, found), rows_of(first, state))
    assert fixed.slots(found)["user"].keys() == {"momenta", "velocities"}


def test_what_has_no_slots_goes_on_under_any_rule_without(tmp_path):
    def rule(gradient, row, slots, learning_rate, step):
        return row - learning_rate * gradient, slots

    first, other = small(optimizer=o.SGD(0.5)), small(optimizer=o.CustomOptimizer(rule, {}))
    save(tmp_path / "saved", first, state := first.init(KEY))
    found = restore(tmp_path / "saved", other).state
    np.testing.assert_array_equal(rows_of(other, found), rows_of(first, state))
