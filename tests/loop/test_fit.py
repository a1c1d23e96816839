"""`fit`: the bits of a loop written by hand, reports, evaluations, sources, and what is refused."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_cases import engine, table, trained, with_network
from flax import linen, nnx
from loop_cases import DENSE, Network, loss_of_network, loss_of_tables, mesh, of_items

from tpu_embed import EmbeddingEngine, FeatureConfig, RaggedIds, TableConfig, fit, nn
from tpu_embed import optimizers as o
from tpu_embed.data import Prefetcher


def by_hand(steps):
    """Train in a loop of our own: a table, a network with dropout and statistics, and Adam."""
    made, losses = engine(), []
    graph, params, others = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)
    carry = made.init(jax.random.key(3)), params, others, DENSE.init(params)

    @jax.jit
    def step(carry, batch, wanted):
        state, params, others, opt_state = carry

        def loss_fn(params, activations):
            network = nnx.merge(graph, params, others, copy=True)
            loss, metrics = loss_of_network(network, activations, wanted)
            return loss, (metrics, nnx.state(network, nnx.Not(nnx.Param)))

        found = jax.value_and_grad(loss_fn, (0, 1), has_aux=True)(params, made.lookup(state, batch))
        (loss, (metrics, others)), (of_params, of_rows) = found
        updates, opt_state = DENSE.update(of_params, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (made.update(state, batch, of_rows), params, others, opt_state), loss, metrics

    for ids, wanted in of_items(steps):
        carry, *found = step(carry, made.place(ids), wanted)
        losses.append(found)
    return carry[0], nnx.merge(graph, *carry[1:3]), losses


def parameters(network):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(network, nnx.Param)))


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_network_has_the_bits_of_a_loop_written_by_hand():
    options = with_network()
    before = parameters(options["model"])
    report = trained(seed=3, **options)
    state, expected, losses = by_hand(6)
    np.testing.assert_array_equal(table(report), engine().tables(state)["item"])
    assert_same(parameters(report.model), parameters(expected))
    assert report.model.dropout.rngs.count[...] == 6
    np.testing.assert_array_equal(report.model.norm.mean[...], expected.norm.mean[...])
    assert report.loss == np.mean([float(loss) for loss, _ in losses])
    assert report.metrics == {"error": np.mean([float(each["error"]) for _, each in losses])}
    # The network that was given is as it was, and its arrays are there.
    assert_same(parameters(options["model"]), before)


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


def test_batch_statistics_of_linen_go_along_in_a_bridge():
    def loss(model, activations, wanted, *, rng=None):
        train = rng is not None
        mutable = ["batch_stats"] if train else False
        return ((model(activations["item"], train, mutable=mutable) - wanted) ** 2).mean()

    bridge = nnx.bridge.ToNNX(Statistics(), rngs=nnx.Rngs(0))
    bridge = nnx.bridge.lazy_init(bridge, np.ones((8, 2), np.float32), True)
    report = trained(loss=loss, model=bridge, optimizer=DENSE, evaluation=list(of_items(1)))
    moved = nnx.state(report.model, nnx.BatchStat)["BatchNorm_0"]
    assert np.all(moved["mean"][...] != 0)
    ((ids, wanted),) = of_items(1)
    found = report.model(engine().lookup(report.state, engine().place(ids))["item"], False)
    # Compiled as one program there, and one operation after the other here.
    np.testing.assert_allclose(report.evaluation["loss"], ((found - wanted) ** 2).mean(), rtol=1e-5)


def test_a_state_that_is_given_is_trained_on_and_steps_count_the_run():
    first = trained(steps=4)
    report = trained(itertools.islice(of_items(6), 4, None), state=first.state)
    assert report.step == 2
    np.testing.assert_array_equal(table(report), table(trained()))
    for use in (engine().tables, lambda state: trained(state=state)):
        with pytest.raises(ValueError, match="donated to an earlier call, or deleted; use what"):
            use(first.state)


def test_jagged_features_and_parts_of_every_kind():
    items = TableConfig(20, 2, name="items")
    features = {"item": FeatureConfig(items), "history": FeatureConfig(items, jagged=True)}
    made = EmbeddingEngine(features, o.SGD(0.5), mesh=mesh(2))

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
    report = trained(Prefetcher(engine(), of_items(6)))
    np.testing.assert_array_equal(table(report), table(trained()))
    with pytest.raises(ValueError, match=r"weighted: expected False with a Prefetcher, got True"):
        trained(Prefetcher(engine(), of_items(6)), weighted=True)
    with pytest.raises(ValueError, match="fit: depth: expected an integer >= 1, got -1"):
        trained(Prefetcher(engine(), of_items(6)), depth=-1)
    with pytest.raises(ValueError, match="several times, got Prefetcher, which can be read once"):
        trained(evaluation=Prefetcher(engine(), of_items(1)))


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
    """Of Python or of NumPy, as `np.isnan(report.loss)` returns it; not by another number."""
    for ends, last in ((lambda step: step == 3, 3), (lambda step: np.isfinite(step), 1), (int, 6)):
        report = trained(report_every=1, callback=lambda report, ends=ends: ends(report.step))
        assert report.step == last


def test_an_evaluation_reads_its_source_from_the_beginning_each_time():
    begun, reports = [], []

    def source():
        begun.append(True)
        return of_items(3)

    trained(evaluation=source, evaluate_every=2, callback=reports.append, **with_network())
    assert [report.step for report in reports] == [2, 4, 6]
    assert len(begun) == 3
    last = reports[-1]
    # By hand, without dropout and with the statistics of training.
    network, found = last.model, []
    network.eval()
    for ids, wanted in of_items(3):
        activations = engine().lookup(last.state, engine().place(ids, training=False))
        loss, metrics = loss_of_network(network, activations, wanted)
        found.append([float(metrics["error"]), float(loss)])
    # One program has rounded differently from another.
    got = [last.evaluation[name] for name in ("error", "loss")]
    np.testing.assert_allclose(got, np.mean(found, axis=0), rtol=1e-5)


def test_without_an_interval_there_is_one_evaluation_at_the_end():
    reports = []
    report = trained(evaluation=list(of_items(1)), report_every=4, callback=reports.append)
    assert [each.evaluation is None for each in reports] == [True, False]
    assert report.evaluation["loss"] == reports[-1].evaluation["loss"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_goes_to_stderr_and_is_rewritten_on_a_terminal(terminal, monkeypatch, capsys):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", stream)
    trained(progress=True, report_every=3, evaluation=list(of_items(1)))
    assert capsys.readouterr().out == ""
    written = stream.getvalue()
    assert (written.count("\r"), written.count("\n")) == ((3, 1) if terminal else (0, 3))
    lines = written[terminal:-1].split("\r" if terminal else "\n")
    assert [line.split("  ")[0] for line in lines] == ["step 3", "step 6", "step 6"]
    assert ["steps/s" in line for line in lines] == [True, True, False]
    assert not terminal or len(lines[2]) >= len(lines[1])  # nothing is left of a longer line


# -- what is refused -----------------------------------------------------------------------------


TEXT = [(ids, ["a"] * 8) for ids, _ in of_items(1)]
SECOND = {"loss": lambda *given: (loss_of_tables(*given), {"loss": 7.0})}
LINEN = (
    r"fit: model: expected a flax nnx module, or a pytree of .*, got Dense, a flax linen "
    r"module.*; give net\.init\(…\)\[\"params\"\], and call net\.apply"
)
REFUSED = {
    "optimizer: expected both or neither, got a model": {"model": {"w": np.ones(2)}},
    "expected both or neither, got an optimizer": {"optimizer": DENSE},
    r"transformation of optax, got SGD; .*as_optax": {"model": {}, "optimizer": o.SGD(0.1)},
    "loss: expected a function, got int": {"loss": 3},
    r"what loss returned: expected a number.*got \(8, 2\)": {"loss": lambda rows, _: rows["item"]},
    r"part 1 after the features: expected numbers, got dtype <U1": {"source": TEXT},
    "fit: source: expected at least one batch, got none": {"source": []},
    "state: expected a TableState, got int": {"state": 3},
    "metrics with names of their own, got one named 'loss'": SECOND,
    "fit: steps: expected an integer >= 1, got 0": {"steps": 0},
    "evaluate_every: expected an evaluation beside it, got 2 alone": {"evaluate_every": 2},
    "several times, got generator, which can be read once": {"evaluation": of_items(1)},
    "evaluation: expected at least one batch, got none": {"evaluation": []},
    "fit: engine: expected an EmbeddingEngine, got dict": {"engine": {}},
    LINEN: {"model": linen.Dense(1), "optimizer": DENSE},
    r"fit: model\[0\]: expected .*, got Dense, a": {"model": [linen.Dense(1)], "optimizer": DENSE},
    r"'f'\]: .*, got custom_jvp; give the par": {"model": {"f": jax.nn.relu}, "optimizer": DENSE},
    r"'n'\]: .* floating-point .*, got int32": {"model": {"n": np.int32(0)}, "optimizer": DENSE},
    r"0\]: expected .*, got PRNGKeyArray": {"model": [jax.random.key(0)], "optimizer": DENSE},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    given = {"engine": engine(), "loss": loss_of_tables, "source": of_items(6)} | REFUSED[words]
    with pytest.raises((TypeError, ValueError), match=words):
        fit(**given, progress=False)


def test_a_model_with_embedding_layers_is_refused():
    model = nn.Embed(4, 2, optimizer=o.SGD(0.1), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="without embedding layers, got Embed"):
        trained(model=model, optimizer=DENSE)


def test_a_run_that_is_done_stays_as_it_is(tmp_path, capsys):
    first = trained(directory=tmp_path, steps=4)
    more = {"steps": 4, "evaluation": list(of_items(2)), "progress": True}
    again = trained([], directory=tmp_path, **more)  # nothing is left to read
    begun, done = capsys.readouterr().err.splitlines()
    assert begun == f"{tmp_path}: going on from step 4"
    assert done.startswith("step 4 of 4  nothing left to train on  evaluation: loss ")
    np.testing.assert_array_equal(table(first), table(again))
    assert (again.step, np.isnan(again.loss)) == (4, True)
    assert again.evaluation["loss"] > 0
    with pytest.raises(ValueError, match=r"steps: expected at least 4, as the latest .* got 3"):
        trained(directory=tmp_path, steps=3)
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
