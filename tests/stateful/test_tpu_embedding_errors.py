"""The stateful API after an error or an interrupt: what is left, and how it can continue."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same, batch, gradients, make_embedding, make_embedding_of, snapshot

import tpu_embed
from tpu_embed import optimizers as o


def _dequeued(pipelined=False):
    """Return an embedding after one step, with a dequeued batch, one waiting, and the gradients."""
    embedding = make_embedding(pipeline_execution_with_tensor_core=pipelined)
    for number in range(3):
        embedding.enqueue(batch(number))
    embedding.apply_gradients(gradients(embedding.dequeue()))
    return embedding, gradients(embedding.dequeue())


WRONG_FEATURES = {
    "feature 'shown': .*6": {"shown": np.full((4, 2), 6)},
    "feature 'shown': .*float64": {"shown": np.zeros((4, 2))},
    "'shown'.*batch size": {"shown": np.zeros((3, 2), np.int32)},
    "extra": {"extra": np.zeros(4, np.int32)},
}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_enqueue_of_wrong_features(pipelined):
    embedding, given = _dequeued(pipelined)
    before = snapshot(embedding)
    for said, wrong in WRONG_FEATURES.items():
        with pytest.raises((ValueError, TypeError), match=said) as raised:
            embedding.enqueue({**batch(3), **wrong}, name="eve")
        assert raised.value.__notes__ == ["raised by enqueue 'eve'"]
        assert_same(snapshot(embedding), before)
    embedding.apply_gradients(given)


ONES = np.ones((4, 2), np.float32)

WRONG_GRADIENTS = {
    r"feature 'shown': expected shape \(4, 2\), got \(2, 2\)": {"shown": ONES[:2]},
    r"feature 'clicks': expected shape \(4, 2, 2\), got \(4, 2\)": {"clicks": ONES},
    r"feature 'shown': expected shape \(4, 2\), got no array: str": {"shown": "g"},
    r"feature 'shown': expected shape \(4, 2\), got no array: flo": {"shown": 1.0},
    r"feature 'user': expected floats, got dtype int64": {"user": ONES.astype(int)},
    "activation_gradients: extra is not among the features": {"extra": ONES},
    "activation_gradients: shown: expected one .*, got a list": {"shown": [ONES]},
    "activation_gradients: the top: expected a mapping, got a": None,
}


def test_wrong_gradients_change_nothing():
    embedding, given = _dequeued()
    before = snapshot(embedding)
    for said, changed in WRONG_GRADIENTS.items():
        wrong = given | changed if changed else [*given.values()]
        with pytest.raises((ValueError, TypeError), match=said) as raised:
            embedding.apply_gradients(wrong, name="eve")
        assert raised.value.__notes__ == ["raised by apply_gradients 'eve'"]
        assert_same(snapshot(embedding), before)
    embedding.apply_gradients(given)
    assert int(embedding.state.step) == before[1] + 1


def test_a_gradient_that_is_none_is_zero_and_warned_of_once():
    (embedding, given), (other, _) = _dequeued(), _dequeued()
    with pytest.warns(UserWarning, match=r"feature 'user': None is taken as zeros") as found:
        embedding.apply_gradients({**given, "user": None})
    assert [warning.filename for warning in found] == [__file__]
    other.apply_gradients({**given, "user": np.zeros((4, 2), np.float32)})
    assert_same(snapshot(embedding), snapshot(other))
    embedding.dequeue()
    with pytest.warns(UserWarning, match="feature 'clicks'"):  # a call, not a program, warns
        embedding.apply_gradients({**given, "clicks": None})


TABLE = tpu_embed.TableConfig(4, 2, name="t")


def _one_table(optimizer, **options):
    return make_embedding_of(tpu_embed.FeatureConfig(TABLE), optimizer, devices=1, **options)


def _step(embedding):
    embedding.enqueue(np.array([0, 1]))
    return np.asarray(embedding.dequeue())


def _raise(error):
    raise error


INTERNAL = "INTERNAL: the service of learning rates"
RATES = {
    "no number": lambda: "much",
    "ValueError": lambda: _raise(ValueError(INTERNAL)),
    "JaxRuntimeError": lambda: _raise(jax.errors.JaxRuntimeError(INTERNAL)),
}


@pytest.mark.parametrize(
    ("wrong", "while_tracing"), [*((rate, False) for rate in RATES), ("JaxRuntimeError", True)]
)
def test_what_a_learning_rate_raises_is_no_device_error(wrong, while_tracing):
    """Whatever its message: the device did not raise it."""

    def rate():
        return RATES[wrong]() if fails else 0.5

    fails = True
    embedding = _one_table(o.Momentum((lambda count: rate()) if while_tracing else rate))
    given = _step(embedding)
    before = snapshot(embedding)
    said = f"learning_rate .*: expected .* a number, got 'much'|{INTERNAL}"
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=said) as raised:
        embedding.apply_gradients(given)
    assert type(raised.value).__name__ == ("ValueError" if wrong == "no number" else wrong)
    assert_same(snapshot(embedding), before)
    fails = False
    embedding.apply_gradients(given)
    assert int(embedding.state.step) == 1
    assert embedding.engine.compilations == {"lookup": 1, "update": 1 + while_tracing}


def _fail_on_the_device(pipelined=False):
    """Return an embedding whose last update failed, with a batch that waits."""
    fails = False

    def on_host():
        if fails:
            raise ZeroDivisionError("while running")
        return np.float32(0)

    def rule(gradient, row, slots, learning_rate, step):
        zero = jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.float32))
        return row - learning_rate * gradient + zero, {"seen": slots["seen"] + 1}

    optimizer = o.CustomOptimizer(rule, {"seen": 0.0}, 0.5)
    embedding = _one_table(optimizer, pipeline_execution_with_tensor_core=pipelined)
    embedding.apply_gradients(_step(embedding))
    given = _step(embedding)
    embedding.enqueue(np.array([2, 3]))
    fails = True
    with pytest.raises(jax.errors.JaxRuntimeError, match="while running"):  # noqa: PT012
        embedding.apply_gradients(given)
        jax.block_until_ready(embedding.state)
    fails = False
    return embedding, given


CALLS = {
    "build": tpu_embed.TPUEmbedding.build,
    "enqueue 'x'": lambda embedding: embedding.enqueue(np.array([0, 1]), name="x"),
    "dequeue": tpu_embed.TPUEmbedding.dequeue,
    "apply_gradients": lambda embedding: embedding.apply_gradients(np.zeros((2, 2), np.float32)),
    "state": lambda embedding: embedding.state,
    "embedding_tables": lambda embedding: embedding.embedding_tables,
    "retrieve": tpu_embed.TPUEmbedding.retrieve,
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("pipelined", [False, True])
def test_after_a_device_error_the_state_is_invalid_until_load(pipelined):
    embedding, given = _fail_on_the_device(pipelined)
    for what, call in CALLS.items():
        with pytest.raises(RuntimeError, match=f"^{what}: expected a valid state, .*device error"):
            call(embedding)
    with pytest.raises(ValueError, match="expected shape"):
        embedding.load({"t": np.zeros((3, 2))})
    with pytest.raises(RuntimeError, match=r"device error .*; load the tables, or set `state`"):
        embedding.retrieve()
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    embedding.load({"t": rows}, {"t": {"seen": rows}})
    assert_same(embedding.retrieve(), ({"t": rows}, {"t": {"seen": rows}}))
    with pytest.raises(RuntimeError, match="none since"):  # what was dequeued then is forgotten
        embedding.apply_gradients(given)
    assert_same(embedding.dequeue(), rows[2:])
    embedding.apply_gradients(np.ones((2, 2), np.float32))
    assert_same(embedding.retrieve()[0]["t"], rows - np.float32([[0], [0], [0.5], [0.5]]))


@pytest.mark.filterwarnings("default")
def test_after_a_device_error_the_state_may_be_set():
    embedding, _ = _fail_on_the_device()
    embedding.state = embedding.engine.init(jax.random.key(1))
    assert_same(embedding.state, embedding.engine.init(jax.random.key(1)))
    assert embedding.dequeue().shape == (2, 2)


def test_a_state_that_was_donated_elsewhere():
    embedding, given = _dequeued()
    embedding.apply_gradients(given)
    (tables, slots), gone = embedding.retrieve(), embedding.state
    embedding.engine.update_in_place(gone, embedding.engine.place(batch(2)), given)
    with pytest.raises(RuntimeError, match=r"dequeue: expected a valid state, .* donated to an"):
        embedding.dequeue()
    with pytest.raises(ValueError, match=r"state: stack 'item@mod.*': .* got one that was donated"):
        embedding.state = gone
    embedding.load(tables, slots)
    assert_same(embedding.retrieve(), (tables, slots))
    assert embedding.dequeue()["user"].shape == (4, 2)


def test_serving_without_an_optimizer():
    frozen = tpu_embed.TableConfig(4, 2, name="frozen", trainable=False)
    config = jax.tree.map(tpu_embed.FeatureConfig, {"a": TABLE, "b": frozen})
    embedding = make_embedding_of(config, None, devices=1)
    features = {name: np.array([0, 1]) for name in config}
    said = r"enqueue 'x' with training=True: expected an optimizer .* got none for \['t'\]"
    with pytest.raises(ValueError, match=said):
        embedding.enqueue(features, name="x")
    embedding.enqueue(features, training=False)
    assert_same(np.asarray(embedding.dequeue()["a"]), embedding.retrieve()[0]["t"][:2])
    assert embedding.retrieve()[1] == {"t": {}, "frozen": {}}
    assert embedding.describe()["tables"]["t"]["optimizer"] is None
    with pytest.raises(ValueError, match="update: expected an optimizer for every trainable table"):
        embedding.engine.update(embedding.state, embedding.engine.place(features), features)


def test_a_lookup_is_issued_once(monkeypatch):
    """For each state that the queue has seen."""
    made, lookups = make_embedding(pipeline_execution_with_tensor_core=True), []
    lookup = made.engine.lookup
    monkeypatch.setattr(made.engine, "lookup", lambda *given: lookups.append(1) or lookup(*given))
    made.enqueue(batch(0), training=False)
    made.state = made.state
    made.dequeue()
    assert len(lookups) == 2


@pytest.mark.parametrize("when", ["before", "after", "lost"])
def test_what_was_interrupted_is_gone_on_with_or_the_state_is_invalid(when):
    """The batch waits for its gradients until the update is done."""
    made, given = _dequeued()
    keeper = made._keeper
    exchange = made.engine.prepare_update(keeper.now.state, keeper.now.dequeued.batch, given)
    work = exchange._work

    def interrupted(call):
        if when == "after":
            work(call)
        raise KeyboardInterrupt

    exchange._work = interrupted
    with pytest.raises(KeyboardInterrupt):
        keeper.run(
            "apply_gradients", exchange, lambda now, state: now._replace(state=state, dequeued=None)
        )
    exchange._work, state = work, keeper.now.state
    if when == "before":
        assert keeper.settle().state is state
        assert keeper.now.dequeued is not None
    elif when == "after":
        assert int(keeper.settle().state.step) == 2
        assert keeper.now.dequeued is None
        with pytest.raises(RuntimeError):
            np.asarray(jax.tree.leaves(state.tables)[0])
    else:
        jax.tree.map(lambda table: table.delete(), state.tables)
        said = "got one whose arrays were donated to another function, or deleted; load the tables"
        with pytest.raises(RuntimeError, match=said):
            keeper.settled("dequeue")


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.quick(1)
def test_a_failed_lookup_leaves_the_queue(pipelined, monkeypatch):
    embedding = make_embedding(pipeline_execution_with_tensor_core=pipelined)

    def fails(call, *arguments):
        def fail(*_):
            raise ZeroDivisionError

        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):  # noqa: PT012
            patched.setattr(embedding.engine, "lookup", fail)
            call(*arguments)

    if pipelined:  # a new head is looked up at once
        fails(embedding.enqueue, batch(0))
        assert embedding.waiting == 0
    for number in range(2):
        embedding.enqueue(batch(number), training=False)
    fails(embedding.dequeue)
    assert embedding.waiting == 2
    for number in range(2):
        placed = embedding.engine.place(batch(number))
        assert_same(embedding.dequeue(), embedding.engine.lookup(embedding.state, placed))
