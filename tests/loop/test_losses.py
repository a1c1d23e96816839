"""What a loss may ask for, the step and random numbers; and what one that is not finite ends."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from fit_cases import steps_in, table, trained, with_network
from flax import nnx
from loop_cases import loss_of_network, loss_of_tables, mesh, of_items, plain_engine

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, fit
from tpu_embed.loop.step import split_model
from tpu_embed.optimizers import SGD


def source(bad, read=None):
    """Yield batches without an end, of which the one of step `bad` makes the loss NaN."""
    ((ids, wanted),) = of_items(1)
    for step in itertools.count(1):
        if read is not None:
            read.append(step)
        yield ids, np.full(8, np.nan, np.float32) if step == bad else wanted


WORDS = r"fit: loss of step 5: expected a finite number, got nan; .*on_nonfinite=.continue"


@pytest.mark.parametrize("depth", [1, 3])
def test_it_ends_the_run_at_most_depth_steps_later(depth):
    read = []
    with pytest.raises(FloatingPointError, match=WORDS):
        trained(source(5, read), depth=depth)
    assert 5 <= len(read) <= 5 + depth + depth  # steps that followed, and what was placed ahead


@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_last_checkpoint_is_from_before_it(every, tmp_path):
    with pytest.raises(FloatingPointError, match=WORDS) as error:
        trained(source(5), directory=tmp_path, save_every=every, keep=None)
    before = [step for step in range(1, 5) if step % every == 0]
    assert steps_in(tmp_path) == before
    last = f"has step {before[-1]}; the same call goes on" if before else "there is no checkpoint"
    assert last in error.value.__notes__[-1]
    assert trained(source(0), directory=tmp_path, steps=8).step == 8


def failing():
    yield from itertools.islice(source(5), 5)
    raise OSError("disk gone")


@pytest.mark.parametrize("how", ["report", "end", "error"])
def test_whatever_comes_first_its_state_is_neither_reported_nor_saved(how, tmp_path):
    """The loss of step 5 is not looked at yet when the run is reported, ends, or fails."""
    options = {"report": {"report_every": 5}, "end": {"steps": 5}, "error": {}}[how]
    given, reports = failing() if how == "error" else source(5), []
    with pytest.raises((FloatingPointError, OSError)) as error:
        trained(given, directory=tmp_path, depth=9, callback=reports.append, **options)
    assert "loss of step 5" in " ".join([str(error.value), *error.value.__notes__])
    assert reports == []
    assert steps_in(tmp_path) == []


def test_continue_goes_on():
    reports = []
    options = {"on_nonfinite": "continue", "report_every": 1, "callback": reports.append}
    assert trained(source(2), steps=4, **options).step == 4
    assert [bool(np.isfinite(report.loss)) for report in reports] == [True, False, False, False]
    with pytest.raises(ValueError, match=r"expected 'stop' \| 'continue', got 'skip'"):
        trained(source(0), on_nonfinite="skip")


def test_with_skip_the_tables_are_those_without_the_step():
    """As the message proposes."""
    item = FeatureConfig(TableConfig(40, 2, name="item"))
    made = EmbeddingEngine({"item": item}, SGD(0.5), mesh=mesh(2), on_bad_gradient="skip")
    options = {"on_nonfinite": "continue", "progress": False}
    found = made.tables(fit(made, loss_of_tables, source(2), steps=3, **options).state)["item"]
    np.testing.assert_array_equal(found, table(trained(source(0), steps=2)))


def reports_of(loss, steps=4, devices=2, report_every=1, **options):
    reports, options = [], {"report_every": report_every, "progress": False} | options
    fit(plain_engine(devices), loss, of_items(steps), callback=reports.append, **options)
    return reports


def drawing(activations, wanted, *, step, rng):
    loss = ((activations["item"].sum(axis=-1) - wanted) ** 2).mean()
    drawn = -1.0 if rng is None else jax.random.uniform(rng, (8,))[5]
    return loss, {"step": step, "drawn": drawn}


def numbers(reports, name="drawn"):
    return [report.metrics[name] for report in reports]


def test_random_numbers_are_those_of_the_seed_and_the_step(tmp_path):
    """On any number of devices, and in a run that goes on."""
    keys = [jax.random.fold_in(jax.random.key(7), step) for step in range(4)]
    expected = [float(jax.random.uniform(key, (8,))[5]) for key in keys]
    assert len(set(expected)) == 4
    reports = reports_of(drawing, devices=1, seed=7)
    assert numbers(reports) == expected
    assert numbers(reports, "step") == [0, 1, 2, 3]
    options = {"devices": 8, "seed": 7, "directory": tmp_path}
    for steps, these in ((2, expected[:2]), (4, expected[2:])):
        assert numbers(reports_of(drawing, steps=steps, **options)) == these


def test_evaluations_have_the_step_of_the_run_and_no_random_numbers():
    evaluation = {"evaluation": list(of_items(2)), "evaluate_every": 2, "report_every": 9}
    found = [report.evaluation for report in reports_of(drawing, **evaluation)]
    assert [(each["step"], each["drawn"]) for each in found] == [(2, -1), (4, -1)]


def test_each_part_of_a_batch_has_random_numbers_of_its_own():
    def loss(activations, wanted, *, rng):
        return 0 * activations["item"].sum(), {"drawn": jax.random.uniform(rng)}

    (first, _) = reports_of(loss, steps=2, micro_batches=2)
    key = jax.random.fold_in(jax.random.key(0), 0)
    parts = [float(jax.random.uniform(jax.random.fold_in(key, part))) for part in range(2)]
    assert first.metrics["drawn"] == pytest.approx(np.mean(parts))


LOSSES = [
    (drawing, ("step", "rng")),
    (lambda activations, *, rng=None: 0, ("rng",)),
    (lambda activations, *, step=5, rng: 0, ("rng",)),
    (functools.partial(drawing, step=3), ("rng",)),
    (functools.partial(drawing, wanted=np.ones(3)), ("step", "rng")),
    (lambda activations, step: 0, ()),
    (max, ()),  # it has no signature
]


@pytest.mark.parametrize(("loss", "keywords"), LOSSES)
def test_a_loss_gets_what_it_has_keyword_only_and_no_value_for(loss, keywords):
    objective, _ = split_model(loss, None)
    assert objective.given(1, 2) == {n: {"step": 1, "rng": 2}[n] for n in keywords}


def test_a_keyword_that_would_never_come_is_refused():
    with pytest.raises(TypeError, match=r"fit: loss: expected 'rng' as a keyword-only .*\*, rng=N"):
        reports_of(lambda activations, wanted, rng=None: 0)


# -- dropout that repeats ------------------------------------------------------------------------


def copied(network, activations, wanted):
    """Call a copy of the network, as `nnx.merge` in a function of one device does."""
    return loss_of_network(nnx.merge(*nnx.split(network), copy=True), activations, wanted)


def test_a_copy_of_the_model_that_drops_is_warned_of():
    with pytest.warns(UserWarning, match="model: dropout 'dropout': expected random numbers drawn"):
        reports_of(steps=1, **with_network() | {"loss": copied})


def reseeded(network, activations, wanted, *, rng):
    copy = nnx.merge(*nnx.split(network), copy=True)
    if rng is not None:
        nnx.reseed(copy, dropout=rng)
    else:
        copy.eval()
    return loss_of_network(copy, activations, wanted)


def without_module(model, activations, wanted):
    return ((activations["item"] @ model["w"] - wanted) ** 2).mean()


@pytest.mark.parametrize("loss", [loss_of_network, reseeded, copied, without_module])
def test_nobody_is_warned_without_a_reason(loss):
    """Warnings are errors in these tests."""
    options = with_network() | {"loss": loss, "evaluation": list(of_items(1))}
    if loss is copied:
        options["model"].dropout.rate = 0.0
    if loss is without_module:
        options |= {"model": {"w": np.ones(2)}, "optimizer": optax.sgd(0.1)}
    reports_of(steps=1, **options)
