"""A loss may ask for the number of its step, and for random numbers that are new in each step."""

import functools

import jax
import numpy as np
import optax
import pytest
from fit_cases import with_network
from flax import nnx
from loop_cases import loss_of_network, of_items, plain_engine

from tpu_embed import fit
from tpu_embed.loop.network import split_model


def trained(loss, steps=4, devices=2, **options):
    engine, reports = plain_engine(devices), []
    options = {"report_every": 1, "callback": reports.append, "progress": False} | options
    fit(engine, loss, of_items(steps), **options)
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
    reports = trained(drawing, devices=1, seed=7)
    assert numbers(reports) == expected
    assert numbers(reports, "step") == [0, 1, 2, 3]
    options = {"devices": 8, "seed": 7, "directory": tmp_path}
    for steps, these in ((2, expected[:2]), (4, expected[2:])):
        assert numbers(trained(drawing, steps=steps, **options)) == these


def test_evaluations_have_the_step_of_the_run_and_no_random_numbers():
    evaluation = {"evaluation": list(of_items(2)), "evaluate_every": 2, "report_every": 9}
    found = [report.evaluation for report in trained(drawing, **evaluation)]
    assert [(each["step"], each["drawn"]) for each in found] == [(2, -1), (4, -1)]


def test_each_part_of_a_batch_has_random_numbers_of_its_own():
    def loss(activations, wanted, *, rng):
        return 0 * activations["item"].sum(), {"drawn": jax.random.uniform(rng)}

    (first, _) = trained(loss, steps=2, micro_batches=2)
    key = jax.random.fold_in(jax.random.key(0), 0)
    parts = [float(jax.random.uniform(jax.random.fold_in(key, part))) for part in range(2)]
    assert first.metrics["drawn"] == pytest.approx(np.mean(parts))


@pytest.mark.parametrize(
    ("loss", "keywords"),
    [
        (drawing, ("step", "rng")),
        (lambda activations, *, rng=None: 0, ("rng",)),
        (lambda activations, *, step=5, rng: 0, ("rng",)),
        (functools.partial(drawing, step=3), ("rng",)),
        (functools.partial(drawing, wanted=np.ones(3)), ("step", "rng")),
        (lambda activations, step: 0, ()),
        (max, ()),  # it has no signature
    ],
)
def test_a_loss_gets_what_it_has_keyword_only_and_no_value_for(loss, keywords):
    objective, _ = split_model(loss, None)
    assert objective.given(1, 2) == {n: {"step": 1, "rng": 2}[n] for n in keywords}


def test_a_keyword_that_would_never_come_is_refused():
    with pytest.raises(TypeError, match=r"fit: loss: expected 'rng' as a keyword-only .*\*, rng=N"):
        trained(lambda activations, wanted, rng=None: 0)


# -- dropout that repeats ------------------------------------------------------------------------


def copied(network, activations, wanted):
    """Call a copy of the network, as `nnx.merge` in a function of one device does."""
    return loss_of_network(nnx.merge(*nnx.split(network), copy=True), activations, wanted)


def test_a_copy_of_the_model_that_drops_is_warned_of():
    with pytest.warns(UserWarning, match="model: dropout 'dropout': expected random numbers drawn"):
        trained(steps=1, **with_network() | {"loss": copied})


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
    trained(steps=1, **options)
