"""`fit`: the bits of a loop written by hand, reports, evaluations, sources, and what is refused."""

import functools
import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from loop_cases import (
    DENSE,
    Network,
    loss_of_network,
    loss_of_tables,
    mesh,
    of_items,
    plain_engine,
)

import tpu_embed
from tpu_embed import FeatureConfig, RaggedIds, TableConfig, fit
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher
from tpu_embed.loop.reports import ProgressLine


@functools.cache
def engine():
    return plain_engine()


def trained(source=None, loss=loss_of_tables, **options):
    source = of_items(6) if source is None else source
    return fit(engine(), loss, source, **{"progress": False} | options)


def table(report):
    return np.asarray(engine().tables(report.state)["item"])


def by_hand(steps):
    """Train in a loop of our own: a table, a network with dropout and statistics, and Adam."""
    made, state = engine(), engine().init(jax.random.key(3))
    graph, params, others = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    opt_state, losses = DENSE.init(params), []

    @jax.jit(donate_argnums=0)
    def step(state, params, others, opt_state, batch, wanted):
        def loss_fn(params, activations):
            network = nnx.merge(graph, params, others, copy=True)
            loss, metrics = loss_of_network(network, activations, wanted)
            return loss, (metrics, nnx.state(network, nnx.Not(nnx.Param)))

        found = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(params, made.lookup(state, batch))
        (loss, (metrics, others)), (of_params, of_rows) = found
        updates, opt_state = DENSE.update(of_params, opt_state, params)
        params = optax.apply_updates(params, updates)
        return made.update(state, batch, of_rows), params, others, opt_state, loss, metrics

    for ids, wanted in of_items(steps):
        batch = made.place(ids)
        state, params, others, opt_state, *found = step(
            state, params, others, opt_state, batch, wanted
        )
        losses.append(found)
    return state, nnx.merge(graph, params, others), losses


def test_a_network_has_the_bits_of_a_loop_written_by_hand():
    network = Network(nnx.Rngs(0))
    given = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    before = jax.tree.map(np.asarray, given)
    report = trained(loss=loss_of_network, model=network, optimizer=DENSE, seed=3)
    state, expected, losses = by_hand(6)
    np.testing.assert_array_equal(table(report), engine().tables(state)["item"])
    same = jax.tree.map(
        np.array_equal,
        nnx.to_pure_dict(nnx.state(report.model, nnx.Param)),
        nnx.to_pure_dict(nnx.state(expected, nnx.Param)),
    )
    assert jax.tree.all(same)
    assert report.model.dropout.rngs.count[...] == 6
    np.testing.assert_array_equal(report.model.norm.mean[...], expected.norm.mean[...])
    assert report.loss == np.mean([float(loss) for loss, _ in losses])
    assert report.metrics == {"error": np.mean([float(each["error"]) for _, each in losses])}
    # The network that was given is as it was, and its arrays are there.
    after = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    assert jax.tree.all(jax.tree.map(np.array_equal, after, before))


def test_any_pytree_is_a_model():
    def loss(model, activations, wanted):
        return ((activations["item"] @ model["kernel"] + model["bias"] - wanted) ** 2).mean()

    given = {"kernel": np.ones(2, np.float32), "bias": jnp.zeros(())}
    report = trained(loss=loss, model=given, optimizer=optax.sgd(0.1))
    assert set(report.model) == {"kernel", "bias"}
    assert report.model["bias"] != 0
    assert given["bias"] == 0


class Statistics(linen.Module):
    """A linen network with batch statistics, as a reader would write it."""

    @linen.compact
    def __call__(self, rows, train):
        return linen.Dense(1)(linen.BatchNorm(use_running_average=not train)(rows))[:, 0]


def test_the_parameters_of_a_linen_network_are_a_model():
    net = linen.Dense(1)
    given = net.init(jax.random.key(0), np.ones((8, 2), np.float32))["params"]

    def loss(params, activations, wanted):
        return ((net.apply({"params": params}, activations["item"])[:, 0] - wanted) ** 2).mean()

    def by_hand(model, activations, wanted):
        found = activations["item"] @ model["kernel"] + model["bias"]
        return ((found[:, 0] - wanted) ** 2).mean()

    report = trained(loss=loss, model=given, optimizer=DENSE)
    expected = trained(loss=by_hand, model=given, optimizer=DENSE)
    np.testing.assert_array_equal(table(report), table(expected))
    assert jax.tree.all(jax.tree.map(np.array_equal, report.model, expected.model))
    assert report.loss == expected.loss


def test_batch_statistics_of_linen_go_along_in_a_bridge():
    """Among a pytree's leaves they get zeros for gradients, and stay as they are."""
    net, rows = Statistics(), np.ones((8, 2), np.float32)
    variables = net.init(jax.random.key(0), rows, True)

    def as_pytree(variables, activations, wanted):
        found, _ = net.apply(variables, activations["item"], True, mutable=["batch_stats"])
        return ((found - wanted) ** 2).mean()

    def as_module(model, activations, wanted, *, rng=None):
        train = rng is not None
        mutable = ["batch_stats"] if train else False
        return ((model(activations["item"], train, mutable=mutable) - wanted) ** 2).mean()

    report = trained(loss=as_pytree, model=variables, optimizer=DENSE)
    before, after = variables["batch_stats"], report.model["batch_stats"]
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))

    bridge = nnx.bridge.lazy_init(nnx.bridge.ToNNX(net, rngs=nnx.Rngs(0)), rows, True)
    evaluated = {"evaluation": list(of_items(1)), "evaluate_every": 6}
    report = trained(loss=as_module, model=bridge, optimizer=DENSE, **evaluated)
    moved = nnx.state(report.model, nnx.BatchStat)["BatchNorm_0"]
    assert np.all(moved["mean"][...] != 0)
    ((ids, wanted),) = of_items(1)
    found = report.model(engine().lookup(report.state, engine().place(ids))["item"], False)
    # Compiled as one program there, and one operation after the other here.
    np.testing.assert_allclose(report.evaluation["loss"], ((found - wanted) ** 2).mean(), rtol=1e-5)


def test_steps_count_the_whole_run_and_a_state_may_be_given():
    first = trained(steps=4)
    rest = itertools.islice(of_items(6), 4, None)
    assert trained(rest, state=first.state).step == 2
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(first.state.step)
    for use in (engine().tables, lambda state: trained(state=state)):
        with pytest.raises(ValueError, match="donated to an earlier call, or deleted; use what"):
            use(first.state)


def test_a_state_that_is_given_is_trained_on():
    state = trained(steps=4).state
    rest = itertools.islice(of_items(6), 4, None)
    np.testing.assert_array_equal(table(trained(rest, state=state)), table(trained()))


def test_jagged_features_and_parts_of_every_kind():
    items = TableConfig(20, 2, name="items")
    features = {"item": FeatureConfig(items), "history": FeatureConfig(items, jagged=True)}
    made = tpu_embed.EmbeddingEngine(features, o.SGD(0.5), mesh=mesh(2))

    def loss(activations, wanted, extra, scale, nothing):
        assert nothing is None
        score = (activations["item"] * activations["history"].means()).sum(axis=-1)
        return (scale * extra["weight"] * (score - wanted["of"]) ** 2).mean()

    history = RaggedIds.from_lists([[7, 3], [], [5], [1, 2, 3, 4]] * 2)
    ids = {"history": history, "item": np.arange(8)}
    extra = {"weight": jnp.ones(8), "day": np.arange(8)}
    source = [(ids, {"of": [1.0] * 8}, extra, 0.5, None)] * 30
    reports = []
    fit(made, loss, source, report_every=10, callback=reports.append, progress=False)
    assert [report.step for report in reports] == [10, 20, 30]
    assert reports[-1].loss < reports[0].loss


def test_weights_belong_to_the_ids():
    weights = {"item": np.tile(np.float32([1, 0]), (8, 1))}
    report = trained(((ids, weights, wanted) for ids, wanted in of_items(6)), weighted=True)
    firsts = (({"item": ids["item"][:, :1]}, wanted) for ids, wanted in of_items(6))
    np.testing.assert_array_equal(table(report), table(trained(firsts)))


def test_a_prefetcher_is_a_source():
    np.testing.assert_array_equal(
        table(trained(Prefetcher(engine(), of_items(6)))), table(trained())
    )
    with pytest.raises(ValueError, match=r"weighted: expected False with a Prefetcher, got True"):
        trained(Prefetcher(engine(), of_items(6)), weighted=True)


# -- reports and evaluations ---------------------------------------------------------------------


def test_reports_have_means_since_the_last_one():
    losses, windows = [], []
    trained(report_every=1, callback=lambda report: losses.append(report.loss))
    trained(report_every=4, callback=windows.append)
    assert len(losses) == 6
    assert [report.step for report in windows] == [4, 6]
    assert [report.loss for report in windows] == [np.mean(losses[:4]), np.mean(losses[4:])]
    assert all(report.steps_per_second > 0 for report in windows)
    assert all(report.evaluation is None for report in windows)


def test_a_callback_ends_the_run_by_true_alone():
    assert trained(report_every=1, callback=lambda report: report.step == 3).step == 3
    assert trained(report_every=1, callback=lambda report: report.step).step == 6


def test_an_evaluation_reads_its_source_from_the_beginning_each_time():
    begun, reports = [], []

    def source():
        begun.append(True)
        return of_items(3)

    options = {"model": Network(nnx.Rngs(0)), "optimizer": DENSE, "loss": loss_of_network}
    trained(evaluation=source, evaluate_every=2, callback=reports.append, **options)
    assert [report.step for report in reports] == [2, 4, 6]
    assert len(begun) == 3
    last = reports[-1]
    # By hand, without dropout and with the statistics of training.
    network, found = last.model, []
    network.eval()
    for ids, wanted in of_items(3):
        activations = engine().lookup(last.state, engine().place(ids, training=False))
        found.append(
            [
                float(value)
                for value in jax.tree.leaves(loss_of_network(network, activations, wanted))
            ]
        )
    # One program has rounded differently from another.
    loss, error = np.mean(found, axis=0)
    np.testing.assert_allclose(
        [last.evaluation[name] for name in ("loss", "error")], [loss, error], rtol=1e-5
    )


def test_without_an_interval_there_is_one_evaluation_at_the_end():
    reports = []
    report = trained(evaluation=list(of_items(1)), report_every=4, callback=reports.append)
    assert [each.evaluation is None for each in reports] == [True, False]
    assert report.evaluation["loss"] == reports[-1].evaluation["loss"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_is_rewritten_on_a_terminal_and_written_elsewhere(monkeypatch):
    written = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        line = ProgressLine(shows=True)
        line.show("step 10")
        line.show("step")
        line.close()
        written[stream.isatty()] = stream.getvalue()
    assert written == {True: "\rstep 10\rstep   \n", False: "step 10\nstep\n"}


def test_the_line_goes_to_stderr(capsys):
    trained(progress=True, report_every=3, evaluation=list(of_items(1)))
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line.split("  ") for line in err.splitlines()]
    assert [parts[0] for parts in lines] == ["step 3", "step 6", "step 6"]
    assert ["steps/s" in parts[-1] for parts in lines] == [True, True, False]


# -- what is refused -----------------------------------------------------------------------------


def no_number(activations, wanted):
    return activations["item"]


def with_layers():
    return tpu_embed.nn.Embed(4, 2, optimizer=o.SGD(0.1), rngs=nnx.Rngs(0))


TEXT = [(ids, ["a"] * 8) for ids, _ in of_items(1)]
REFUSED = {
    "a model alone": (
        {"model": {"w": np.ones(2)}},
        "optimizer: expected both or neither, got a model",
    ),
    "an optimizer alone": (
        {"optimizer": optax.sgd(1.0)},
        "expected both or neither, got an optimizer",
    ),
    "a rule": (
        {"model": {}, "optimizer": o.SGD(0.1)},
        r"transformation of optax, got SGD; .*as_optax",
    ),
    "a linen module": (
        {"model": linen.Dense(1), "optimizer": DENSE},
        r"fit: model: expected a flax nnx module, or a pytree of .*, got Dense, a flax linen "
        r"module.*; give net\.init\(…\)\[\"params\"\], and call net\.apply",
    ),
    "a linen module and its variables": (
        {"model": (linen.Dense(1), {"kernel": np.ones((2, 1))}), "optimizer": DENSE},
        r"fit: model\[0\]: expected .*, got Dense, a flax linen module",
    ),
    "a function": (
        {"model": {"w": np.ones(2), "f": jax.nn.relu}, "optimizer": DENSE},
        r"fit: model\['f'\]: expected .*, got custom_jvp; give the parameters alone",
    ),
    "integers": (
        {"model": {"params": np.ones(2), "step": jnp.zeros((), int)}, "optimizer": DENSE},
        r"fit: model\['step'\]: expected .* of floating-point arrays, got int32",
    ),
    "a Python integer": ({"model": 3, "optimizer": DENSE}, "fit: model: expected .*, got int32"),
    "a key": (
        {"model": lambda: [np.ones(2), jax.random.key(0)], "optimizer": DENSE},
        r"fit: model\[1\]: expected .*, got PRNGKeyArray",
    ),
    "layers": ({"model": with_layers, "optimizer": DENSE}, "without embedding layers, got Embed"),
    "no function": ({"loss": 3}, "loss: expected a function, got int"),
    "no number": ({"loss": no_number}, r"what loss returned: expected a number.*got \(8, 2\)"),
    "text": ({"source": TEXT}, r"part 1 after the features: expected numbers, got dtype <U1"),
    "no source": ({"source": 3}, "batches: expected an iterable, got int"),
    "no batch": ({"source": []}, "fit: source: expected at least one batch, got none"),
    "no state": ({"state": 3}, "state: expected a TableState, got int"),
    "callback": ({"callback": 3}, "fit: callback: expected a function, got int"),
    "a second loss": (
        {"loss": lambda *given: (loss_of_tables(*given), {"loss": 7.0})},
        "metrics with names of their own, got one named 'loss'",
    ),
    "steps": ({"steps": 0}, "fit: steps: expected an integer >= 1, got 0"),
    "report_every": ({"report_every": 1.5}, "fit: report_every: expected an integer >= 1"),
    "evaluate_every": ({"evaluate_every": 0}, "fit: evaluate_every: expected an integer >= 1"),
    "save_every": ({"save_every": 0}, "fit: save_every: expected an integer >= 1, got 0"),
    "nothing to evaluate on": (
        {"evaluate_every": 2},
        "evaluate_every: expected an evaluation beside it, got 2 alone",
    ),
    "read once": (
        {"evaluation": of_items(1)},
        "several times, got generator, which can be read once",
    ),
    "prefetcher": (
        {"evaluation": lambda: Prefetcher(engine(), of_items(1))},
        "several times, got Prefetcher, which can be read once",
    ),
    "no evaluation": ({"evaluation": 3}, "evaluation: expected an iterable, or a function"),
    "empty": ({"evaluation": []}, "evaluation: expected at least one batch, got none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, text = REFUSED[case]
    made = {"layers": "model", "a key": "model", "prefetcher": "evaluation"}.get(
        case
    )  # when the test runs
    options = options | ({made: options[made]()} if made else {})
    with pytest.raises((TypeError, ValueError), match=text):
        trained(**options)


def test_an_engine_is_needed():
    with pytest.raises(TypeError, match="fit: engine: expected an EmbeddingEngine, got dict"):
        fit({}, loss_of_tables, of_items(1))


def test_a_run_that_is_done_stays_as_it_is(tmp_path, capsys):
    first = trained(directory=tmp_path / "run", steps=4)
    more = {"steps": 4, "evaluation": list(of_items(2)), "progress": True}
    again = trained(directory=tmp_path / "run", **more)
    begun, done = capsys.readouterr().err.splitlines()
    assert begun == f"{tmp_path / 'run'}: going on from step 4"
    assert done.startswith("step 4 of 4  nothing left to train on  evaluation: loss ")
    np.testing.assert_array_equal(table(first), table(again))
    assert (again.step, np.isnan(again.loss)) == (4, True)
    assert again.evaluation["loss"] > 0
    assert trained([], directory=tmp_path / "run", steps=4).step == 4  # nothing is left to read
    with pytest.raises(ValueError, match=r"steps: expected at least 4, as the .*run has, got 3"):
        trained(directory=tmp_path / "run", steps=3)


def test_a_resumed_run_gives_jagged_features_the_same_room(tmp_path):
    """The first batch is long, and what comes after it keeps the room."""
    room = []

    def loss(activations, wanted):
        history = activations["seen"]
        room.append(history.values.shape[1])
        return ((history.sums().sum(axis=-1) - wanted) ** 2).mean()

    def source():
        for number, length in enumerate([300, 3, 2, 4, 3, 2]):
            rng = np.random.default_rng(number)
            ids = RaggedIds(rng.integers(0, 40, 8 * length), np.arange(9) * length)
            yield {"seen": ids}, rng.random(8, np.float32)

    def run(directory, steps):
        seen = FeatureConfig(TableConfig(40, 2, name="seen"), jagged=True)
        engine = tpu_embed.EmbeddingEngine({"seen": seen}, o.SGD(0.01), mesh=mesh(1))
        report = fit(engine, loss, source(), steps=steps, directory=directory, progress=False)
        return engine.tables(report.state)["seen"]

    expected = run(tmp_path / "whole", 6)
    rooms = set(room)
    run(tmp_path / "stopped", 2)
    room.clear()
    np.testing.assert_array_equal(run(tmp_path / "stopped", 6), expected)
    assert set(room) == rooms
    assert len(rooms) == 1


def test_a_bool_of_numpy_ends_the_run():
    """As `np.isnan(report.loss)` returns it."""
    assert trained(callback=lambda report: np.isfinite(report.loss), report_every=1).step == 1


def test_a_finished_run_is_had_again_without_its_data(tmp_path):
    done = trained(steps=4, directory=tmp_path)
    again = trained([], steps=4, directory=tmp_path)
    assert again.step == 4
    np.testing.assert_array_equal(table(again), table(done))
    for steps in (5, None):
        with pytest.raises(ValueError, match="expected 4 batches before the next one"):
            trained([], steps=steps, directory=tmp_path)
    assert trained(steps=6, directory=tmp_path).step == 6


def test_a_run_that_diverged_is_not_called_done(capsys):
    options = {"evaluation": list(of_items(1)), "report_every": 3, "progress": True}
    options["on_nonfinite"] = "continue"
    trained(loss=lambda activations, *rest: loss_of_tables(activations, *rest) * np.nan, **options)
    lines = capsys.readouterr().err.splitlines()
    assert "nothing left" not in "".join(lines)
    assert "loss nan  evaluation" in lines[-1]
