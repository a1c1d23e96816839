"""A directory of another run: `fit` refuses to go on in it, and leaves what is there."""

import functools

import jax
import optax
import pytest
from fit_cases import engine, trained, with_network
from loop_cases import loss_of_tables, mesh, of_items

import tpu_embed
from tpu_embed import FeatureConfig, TableConfig, fit
from tpu_embed import optimizers as o


def test_checkpoints_of_others_are_refused(tmp_path):
    with tpu_embed.io.CheckpointManager(tmp_path / "run", engine()) as manager:
        manager.save(3, engine().init(jax.random.key(0)), position={"batches": 3})
    with pytest.raises(ValueError, match="checkpoints that fit has written, got one with position"):
        trained(directory=tmp_path / "run")


def test_a_run_of_another_model_is_refused_with_a_remedy(tmp_path):
    trained(directory=tmp_path / "run", steps=1)
    with pytest.raises(FileNotFoundError, match="none of model") as refused:
        trained(directory=tmp_path / "run", **with_network())
    assert "to begin a new run instead, name another directory" in "".join(refused.value.__notes__)


def test_a_network_of_another_dtype_is_refused_with_what_fit_has(tmp_path):
    def loss(model, activations, wanted):
        return loss_of_tables(activations, wanted) + model["w"].astype("float32").sum()

    def run(dtype):
        model = {"w": jax.numpy.ones(2, dtype)}
        options = {"model": model, "optimizer": optax.sgd(0.5), "steps": 2}
        return trained(loss=loss, directory=tmp_path, **options)

    run("float32")
    with pytest.raises(ValueError, match=r"expected dtype bfloat16, got .*32; go on with") as error:
        run("bfloat16")
    assert "convert=" not in str(error.value)


def with_rule(rule):
    item = FeatureConfig(TableConfig(40, 2, name="item"))
    return tpu_embed.EmbeddingEngine({"item": item}, rule, mesh=mesh(2))


@pytest.mark.parametrize("rules", [(o.Adam(0.5), o.SGD(0.5)), (o.SGD(0.5), o.Adagrad(0.5))])
def test_another_rule_is_refused_with_what_fit_has(rules, tmp_path):
    first, second = map(with_rule, rules)
    run = functools.partial(fit, loss=loss_of_tables, directory=tmp_path / "run", progress=False)
    run(first, source=of_items(4), steps=2, keep=1)
    with pytest.raises(ValueError, match=r"expected slots of .*, got those .*; go on with") as one:
        run(second, source=of_items(4), steps=4, keep=1)
    said = "".join([str(one.value), *one.value.__notes__])
    assert "state=" in said
    assert not any(argument in said for argument in ("key=", "convert=", "leave_out="))
    assert run(first, source=of_items(4), steps=4).step == 4
    # What the message says: another engine restores, and a run begins with its state.
    state = tpu_embed.io.restore(tmp_path / "run" / "4", second, key=jax.random.key(0)).state
    more = {"directory": tmp_path / "other", "state": state, "steps": 1}
    assert run(second, source=of_items(4), **more).step == 1


def test_a_run_does_not_go_on_without_its_network(tmp_path):
    trained(directory=tmp_path / "run", steps=2, keep=1, **with_network())
    with pytest.raises(ValueError, match=r"fit: model: expected one, as it is in .*, got None; "):
        trained(directory=tmp_path / "run", steps=4, keep=1)
    assert trained(directory=tmp_path / "run", steps=4, **with_network()).step == 4
