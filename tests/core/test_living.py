"""Tables with a dynamic vocabulary: rows follow plain Python, and values follow their keys."""

import dataclasses
import itertools

import jax
import living_cases as cases
import numpy as np
import pytest

from tpu_embed import FeatureConfig, RaggedIds, TableConfig
from tpu_embed.vocabulary import DynamicVocabulary

STEPS = 12
NO_KEYS = RaggedIds(np.zeros(0, np.uint64), np.zeros(9, np.int32))


@pytest.fixture(scope="module")
def trained():
    """Return an engine on two devices, its state after some steps, and all activations."""
    made = cases.engine()
    state, seen = cases.train(made, made.init(jax.random.key(cases.KEY)), STEPS)
    return made, cases.whole(made, state), seen


def test_rows_are_the_oracles_step_by_step():
    made, maps = cases.engine(), cases.oracles()
    state = made.init(jax.random.key(cases.KEY))
    for step in range(STEPS):
        state, _ = made.admit(state, made.place(cases.draw(step)))
        for name, keys in cases.keys_in_order(cases.draw(step)).items():
            maps[name].take(keys)
            keys, rows = made.vocabularies.keys(name)
            found = dict(zip(keys.tolist(), rows.tolist(), strict=True))
            assert found == maps[name].row_of
            assert made.vocabularies.counters[name] == {"keys": len(found), **maps[name].counters}
    assert all(oracle.counters["evicted"] for oracle in maps.values())
    assert maps["items"].counters["expired"]


def row_per_key(step, rows):
    """Return a batch in which each key is the number of a row of its own, and unseen ones none."""

    def numbered(table, keys, unseen=-1):
        found = [rows[table].get(int(key) % 2**64, unseen) for key in keys.reshape(-1)]
        return np.reshape(found, keys.shape)

    batch = cases.draw(step)
    bags, seen, one = batch["bags"], batch["seen"], batch["one"]
    values = numbered("items", bags.values)
    kept = values >= 0
    splits = np.append(0, np.cumsum(kept))[bags.row_splits]  # how many are kept before each bag
    return batch | {
        "bags": RaggedIds(values[kept], splits, bags.weights[kept]),
        "one": np.where(one == -1, -1, numbered("tags", one, cases.TAGS - 1)),
        "seen": np.where(seen == -1, -1, numbered("items", seen)),
    }


def test_values_are_those_of_a_table_with_a_row_per_key(trained):
    """A key that comes back has its first value and slots, whichever row it gets."""
    features = cases.configs()
    living = {f.table.name: f.table for f in features.values()}
    sizes = {"items": 200, "tags": 50, "users": 9}
    fixed = {
        name: dataclasses.replace(table, vocabulary_size=sizes[name], vocabulary=None)
        for name, table in living.items()
    }
    twin = cases.engine(
        features={
            path: dataclasses.replace(f, table=fixed[f.table.name], on_bad_id="drop")
            for path, f in features.items()
        }
    )
    state, maps = twin.init(jax.random.key(cases.KEY)), cases.oracles()
    # The shared row is drawn by its number in a table of that size, as `init` draws it.
    made, found, _ = trained
    shared = made.tables(made.init(jax.random.key(cases.KEY)))["tags"][cases.TAGS - 1]
    state = twin.set_rows(state, "tags", [cases.TAGS - 1], np.asarray(shared)[None])
    known, next_row = {}, {"items": 0, "tags": cases.TAGS}
    for step, activations in enumerate(trained[2]):
        for name, keys in cases.keys_in_order(cases.draw(step)).items():
            of = known.setdefault(name, {})
            for key, _ in maps[name].take(keys)[1]:
                # Each admission gets a row that nobody had before.
                of[key] = next_row[name]
                value = cases.initial_row(living[name], key)
                state = twin.set_rows(state, name, [next_row[name]], value[None])
                next_row[name] += 1
            known[name] = {key: row for key, row in of.items() if key in maps[name].row_of}
        batch = twin.place(row_per_key(step, known))
        expected = twin.lookup(state, batch)
        jax.tree.map(np.testing.assert_array_equal, activations, expected)
        state = twin.update_in_place(state, batch, cases.gradients(expected, step))
    assert next_row["items"] > 30  # keys came back
    tables, slots = twin.tables(state), twin.slots(state)
    for name, of in known.items():
        arrays = {f"table {name}": tables[name]}
        arrays |= {f"slot {name}/{slot}": array for slot, array in slots[name].items()}
        for key, row in zip(*(x.tolist() for x in made.vocabularies.keys(name)), strict=True):
            for what, array in arrays.items():
                np.testing.assert_array_equal(found[what][row], array[of[key]], err_msg=what)


@pytest.mark.parametrize("devices", [1, 8, pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.quick(1)
def test_bits_are_the_same_on_other_devices_and_in_other_placements(trained, devices):
    features = cases.configs()
    if devices == 4:
        placements = {"items": "div", "tags": "replicated", "users": "mod"}
        tables = {
            f.table: dataclasses.replace(f.table, placement=placements[f.table.name])
            for f in features.values()
        }
        features = {n: dataclasses.replace(f, table=tables[f.table]) for n, f in features.items()}
    made = cases.engine(devices, features=features, stack_tables=devices != 4)
    state, seen = cases.train(made, made.init(jax.random.key(cases.KEY)), STEPS)
    cases.assert_same(cases.whole(made, state), trained[1])
    jax.tree.map(np.testing.assert_array_equal, seen, trained[2])


def test_work_is_in_place_and_few_programs_are_compiled():
    made = cases.engine(1)
    state, _ = cases.train(made, made.init(jax.random.key(cases.KEY)), 4)
    before = made.compilations
    old, held = state.tables, [table.unsafe_buffer_pointer() for table in state.tables.values()]
    state, _ = cases.train(made, state, 4, first=4)
    assert made.compilations == before
    assert [table.unsafe_buffer_pointer() for table in state.tables.values()] == held
    assert all(table.is_deleted() for table in old.values())


def test_admitting_compiles_a_program_per_stack_whichever_get_keys_together():
    living, names = DynamicVocabulary(), "abc"
    tables = [TableConfig(40, 1 + i, name=n, vocabulary=living) for i, n in enumerate(names)]
    made = cases.engine(1, features={table.name: FeatureConfig(table) for table in tables})
    state, key = made.init(jax.random.key(cases.KEY)), itertools.count(100)
    for subset in [s for n in range(4) for s in itertools.combinations(names, n)]:
        given = {name: np.full(8, next(key) if name in subset else -1) for name in names}
        before = state
        state, batch = made.admit(state, made.place(given))
        for name in subset:
            row = cases.initial_row(made.table_configs[name], int(given[name][0]))
            np.testing.assert_array_equal(made.lookup(state, batch)[name][0], row)
        gone = {made.layout.stacks[f.stack].name: f.path in subset for f in made.layout.features}
        assert {n: table.is_deleted() for n, table in before.tables.items()} == gone
    assert made.compilations["admit"] == 3


def test_every_64_bit_number_is_a_key_where_there_is_no_padding():
    odd = np.array([0, 2**63, 2**64 - 1, 2**64 - 1], np.uint64)
    made, state = cases.simple()
    batch = made.place({"x": odd})
    assert made.vocabularies.counters["t"]["admitted"] == 3
    state, batch = made.admit(state, batch)
    rows = made.lookup(state, batch)["x"]
    table = made.structure.tables[0]
    np.testing.assert_array_equal(rows, [cases.initial_row(table, key) for key in odd.tolist()])
    signed = made.place({"x": odd.view(np.int64)}, training=False)  # -1 is padding here
    np.testing.assert_array_equal(made.lookup(state, signed)["x"][2:], np.zeros((2, 2)))
    flat = made.place({"x": RaggedIds(odd.view(np.int64), [*range(5)])}, training=False)
    np.testing.assert_array_equal(made.lookup(state, flat)["x"], rows)


def test_more_keys_than_rows_are_unseen_and_nobody_elses_row_changes():
    made, state = cases.simple()
    state, batch = made.admit(state, made.place({"x": np.arange(8)}))
    rows = made.lookup(state, batch)["x"]
    np.testing.assert_array_equal(rows[3:], np.zeros((5, 2)))
    assert (np.abs(rows[:3]).sum(axis=1) > 0).all()
    before = np.asarray(made.tables(state)["t"])
    state = made.update(state, batch, {"x": np.ones((8, 2), np.float32)})
    np.testing.assert_array_equal(made.tables(state)["t"], before - 1)
    counts = {"keys": 3, "admitted": 3, "evicted": 0, "expired": 0, "unseen": 5, "forgotten": 0}
    assert made.vocabularies.counters["t"] | {"evicted": 0} == counts


def test_an_empty_batch_is_a_step():
    made, state = cases.simple()
    state, batch = made.admit(state, made.place({"x": NO_KEYS}))
    made.lookup(state, batch)
    state, _ = made.admit(state, made.place({"x": np.full(8, -1)}))
    assert state.vocabulary["map_version"][0] == 2
