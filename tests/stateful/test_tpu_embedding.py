"""The stateful API: order of calls, batch sizes, loading, and its description."""

import dataclasses
import json

import facade_cases
import jax
import numpy as np
import optax
import pytest
from facade_cases import ITEM, USER, assert_same, batch, gradients, make_embedding, snapshot, train

from tpu_embed import FeatureConfig, TableConfig, TableState, pad_batch
from tpu_embed import optimizers as o


def looked_up(embedding, number):
    """Return what the engine looks up for a batch."""
    return embedding.engine.lookup(embedding.state, embedding.engine.place(batch(number)))


def test_build_makes_the_state_of_the_seed():
    drawn = TableConfig(8, 4, name="item", initializer=jax.nn.initializers.normal(1.0))
    embedding = facade_cases.make_embedding_of(FeatureConfig(drawn), o.SGD(0.1), seed=3)
    embedding.build(2)
    expected = embedding.engine.init(jax.random.key(3))
    assert_same(embedding.state, expected)
    other = embedding.engine.init(jax.random.key(0))
    assert not np.array_equal(*(embedding.engine.tables(s)["item"] for s in (expected, other)))


def test_building_again():
    embedding = make_embedding()
    embedding.build(2)
    state = embedding.state
    embedding.build(2)
    embedding.build()
    assert embedding.state is state
    with pytest.raises(ValueError, match=r"build: batch size per replica: expected 2, .* got 3; m"):
        embedding.build(3)
    assert embedding.describe()["per_replica_batch_size"] == 2
    for bad in (0, True, 2.0):
        with pytest.raises(ValueError, match="per_replica_batch_size: expected an integer >= 1"):
            embedding.build(bad)


def test_features_of_their_own_size():
    """One user and three items per replica: built so, refused otherwise, described by path."""
    feature = FeatureConfig(TableConfig(20, 2, name="item"))
    embedding = facade_cases.make_embedding_of({"items": feature, "user": feature}, o.SGD(1.0))
    embedding.build({"user": 1, "items": 3})
    assert embedding.describe()["per_replica_batch_size"] == {"items": 3, "user": 1}
    before = np.asarray(embedding.retrieve()[0]["item"])
    embedding.enqueue({"user": np.array([3, 4]), "items": np.arange(6)})
    activations = embedding.dequeue()
    np.testing.assert_array_equal(activations["items"], before[:6])
    np.testing.assert_array_equal(activations["user"], before[3:5])
    embedding.apply_gradients(jax.tree.map(np.ones_like, jax.device_get(activations)))
    counts = np.array([1, 1, 1, 2, 2, 1] + [0] * 14)[:, None]
    np.testing.assert_allclose(embedding.retrieve()[0]["item"], before - counts, rtol=1e-6)
    for users, said in {
        6: r"expected \(3, 1\), the size .* got 3; pad it",
        3: "feature 'user': batch size: expected a positive mult",
        0: "got 0; examples whose bags are empty will do",
    }.items():
        with pytest.raises(ValueError, match=said):
            embedding.enqueue({"user": np.arange(users), "items": np.arange(6)})
    for sizes, said in (
        ({"items": 0, "user": 1}, "items: expected an integer >= 1"),
        ({"items": 3}, "user is missing"),
    ):
        with pytest.raises(ValueError, match=f"per_replica_batch_size: {said}"):
            embedding.build(sizes)


def test_the_first_training_batch_sets_the_size_that_others_then_have():
    embedding = make_embedding()
    embedding.enqueue(batch(0, size=8), training=False)
    assert embedding.describe()["per_replica_batch_size"] is None
    with pytest.raises(ValueError, match=r"positive multiple of 2.*pad_batch\(features, 2\)"):
        embedding.enqueue(batch(0, size=3))
    embedding.enqueue(pad_batch(batch(0, size=3), 2))
    assert embedding.describe()["per_replica_batch_size"] == 2
    before = snapshot(embedding)
    wrong = r"enqueue 'x': batch size per replica: expected 2, .* got 4; pad .* training=False"
    with pytest.raises(ValueError, match=wrong):
        embedding.enqueue(batch(0, size=8), name="x")
    assert_same(snapshot(embedding), before)
    assert embedding.dequeue()["user"].shape == (8, 2)
    padded = embedding.dequeue()
    assert padded["clicks"].shape == (4, 2, 2)
    assert not any(np.any(activation[3]) for activation in padded.values())


def test_first_in_first_out():
    embedding = make_embedding()
    for number in range(3):
        embedding.enqueue(batch(number), training=False)
    for number in range(3):
        activations = embedding.dequeue()
        assert_same(activations, looked_up(embedding, number))
        for each in activations.values():
            assert [shard.data.shape[0] for shard in each.addressable_shards] == [2, 2]


def test_calls_out_of_turn_change_nothing():
    embedding = make_embedding()

    def refused(said, call, *arguments, **options):
        with pytest.raises(RuntimeError, match=said):
            call(*arguments, **options)

    apply, none = embedding.apply_gradients, "got none since the last apply_gradients"
    refused(r"gradients 'x': .* got tables that were not built", apply, {}, name="x")
    for number in range(2):
        embedding.enqueue(batch(number))
    refused(none, apply, {})
    given, before = gradients(embedding.dequeue()), snapshot(embedding)
    refused(r"dequeue 'second': expected gradients .* none yet; call", embedding.dequeue, "second")
    assert_same(snapshot(embedding), before)
    apply(given)
    refused(none, apply, given)
    assert_same(embedding.dequeue(), looked_up(embedding, 1))
    apply(given)
    embedding.enqueue(batch(0), training=False)
    embedding.dequeue()
    before = snapshot(embedding)
    refused("got one enqueued with training=False", apply, given)
    refused("dequeue: expected a batch, got an empty queue", embedding.dequeue)
    assert_same(snapshot(embedding), before)


def test_a_step_is_the_engines_and_what_is_retrieved_is_loaded():
    embedding = make_embedding()
    engine, state = embedding.engine, embedding.engine.init(jax.random.key(0))
    train(embedding, range(2))
    for number in range(2):
        placed = engine.place(batch(number))
        state = engine.update(state, placed, gradients(engine.lookup(state, placed)))
    assert_same(embedding.state, state)
    tables, slots = embedding.retrieve()
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves((tables, slots)))
    assert_same((tables, slots), (engine.tables(state), engine.slots(state)))
    assert list(embedding.embedding_tables) == [ITEM, USER]
    assert_same([*embedding.embedding_tables.values()], [tables["item"], tables["user"]])
    kept = jax.tree.map(np.copy, (tables, slots))
    train(embedding, [2])
    assert_same((tables, slots), kept)  # the next step does not change what was retrieved
    embedding.load({"item": ZEROS})  # and leaves the others
    after = engine.tables(embedding.state)
    assert_same(embedding.retrieve()[0], {"item": ZEROS, "user": np.asarray(after["user"])})
    assert int(embedding.state.step) == 3
    other = make_embedding(seed=1)
    other.load(tables, slots)
    assert_same(other.retrieve(), kept)


ZEROS = np.zeros((6, 2), np.float32)
ITEM_ONLY = {"item": ZEROS}
WRONG = {
    r"table 'user': values: expected shape \(5, 2\), got \(6, 2": ({"user": ZEROS}, None),
    r"table: expected one of .*user.*, got 'mine'": ({"item": ZEROS, "mine": ZEROS}, None),
    r"table 'item': slot: .*'accumulators'": (ITEM_ONLY, {"item": {"momenta": ZEROS}}),
    r"slot 'accumulators': values: exp": (ITEM_ONLY, {"item": {"accumulators": ZEROS[:, 0]}}),
    r"'momenta': values: expected real numb": (ITEM_ONLY, {"user": {"momenta": ZEROS[:5] * 1j}}),
}


def test_load_checks_everything_before_anything_changes():
    embedding = make_embedding(pipeline_execution_with_tensor_core=True)
    embedding.enqueue(batch(0))
    before = snapshot(embedding)
    for said, arrays in WRONG.items():
        with pytest.raises(ValueError, match=said):
            embedding.load(*arrays)
        assert_same(snapshot(embedding), before)


@pytest.mark.parametrize("pipelined", [False, True])
def test_load_issues_waiting_lookups_again(pipelined):
    embedding = make_embedding(pipeline_execution_with_tensor_core=pipelined)
    embedding.enqueue(batch(0))
    embedding.enqueue(batch(1))
    embedding.load({"item": ZEROS + 3, "user": ZEROS[:5] + 5})
    expected = [looked_up(embedding, number) for number in (0, 1)]
    assert np.all(np.asarray(expected[0]["user"]) == 5)
    activations = embedding.dequeue()
    assert_same(activations, expected[0])
    embedding.load({"item": ZEROS - 1})
    embedding.apply_gradients({**gradients(activations), "user": np.zeros((4, 2), np.float32)})
    changed = np.asarray(embedding.dequeue()["clicks"])
    assert not np.array_equal(changed, expected[1]["clicks"])
    assert np.all(changed < 3)


def test_the_state_may_be_replaced():
    embedding = make_embedding(pipeline_execution_with_tensor_core=True)
    embedding.enqueue(batch(0))
    other = embedding.engine.init(jax.random.key(7))
    embedding.state = other
    assert embedding.state is other
    assert_same(embedding.dequeue(), looked_up(embedding, 0))
    larger = facade_cases.make_embedding_of(
        {"a": FeatureConfig(TableConfig(8, 2, name="item"))}, o.Adagrad(0.1)
    ).state
    for wrong, said in (
        ({}, "expected a TableState, got dict"),
        (larger, r"expected stacks .*'item@mod2x3#.*got \['item@mod2x4#.*tpu_embed\.io"),
        (TableState({}, {}, other.step, {}), r"expected stacks .*, got \[\]; "),
        (jax.tree.map(np.asarray, other), "table 'item': expected .* got a ndarray"),
    ):
        with pytest.raises(ValueError, match=f"state: {said}"):
            embedding.state = wrong
    assert embedding.state is other


@dataclasses.dataclass(frozen=True)
class Rate:
    """A callable rate; equal to another one of the same value."""

    value: float

    def __call__(self):
        return self.value


def test_describe():
    rules = {
        "a": o.SGD(lambda count: 0.1 / (1 + count)),
        "b": o.Adagrad(Rate(0.5), epsilon=0.125),
        "c": o.Momentum(Rate(0.5)),
        "d": o.SGD(Rate(0.25)),
        "e": None,
        "f": optax.sgd(0.1),
    }
    tables = [TableConfig(5, 2, name=name, optimizer=rule) for name, rule in rules.items()]
    tables.append(TableConfig(9, 2, name="g", dtype="bfloat16", placement="div"))
    config = {table.name: FeatureConfig(table) for table in tables}
    config["h"] = FeatureConfig(tables[-1], max_sequence_length=7)
    embedding = facade_cases.make_embedding_of(
        config, o.SGD(0.125), pipeline_execution_with_tensor_core=True
    )
    described = embedding.describe()
    assert json.loads(json.dumps(described)) == described
    expected = {"vocabulary_size": 9, "padded_vocabulary_size": 10, "dim": 2, "dtype": "bfloat16"}
    expected |= {"placement": "div", "offset": 0, "num_features": 8, "learning_rate": 0.125}
    assert described["tables"]["g"].items() >= expected.items()
    rule = described["tables"]["b"]["optimizer"]
    assert (rule["class"], rule["epsilon"]) == ("Adagrad", 0.125)
    rest = {"devices": 2, "hosts": 1, "pipelined": True, "per_replica_batch_size": None}
    assert described.items() >= rest.items()
    # Equal rates share a tag.
    rates = [described["tables"][name]["learning_rate"] for name in "abcdef"]
    assert rates == [{"tag": 2}, {"tag": 0}, {"tag": 0}, {"tag": 1}, 0.125, None]
