"""Gradients that are not finite: a step is applied completely or not at all, on all devices."""

import guard_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facade_cases import assert_same
from guard_cases import by_feature, engine_of, held_by, logical, spoil


@pytest.mark.whole
@pytest.mark.parametrize("devices", cases.DEVICES)
def test_finite_steps_have_the_bits_of_allow(devices):
    """On any number of devices the bits are those of one."""
    engine, allowed = cases.trained("allow", 1, cases.MET[8])
    other, guarded = cases.trained("skip", devices, cases.MET[devices])
    for expected, found in zip(logical(engine, allowed), logical(other, guarded), strict=True):
        assert_same(found, {name: expected[name] for name in found})
    assert int(guarded.step) == int(allowed.step) == 2
    assert set(allowed.counters) == {"bad_ids", "overflows"}
    assert not any(cases.counts(guarded))


BAD_STEPS = [
    (["kernel"], cases.NAN, 0),
    (["sequence", "again"], cases.INFINITY, cases.BATCH - 1),
    (["kernel"], -cases.INFINITY, 5),
    (["kernel", "every_row", "psum", "each"], cases.NAN, 9),
]


@pytest.mark.parametrize("devices", cases.DEVICES)
@pytest.mark.parametrize(
    ("bad", "value", "example"),
    BAD_STEPS,
    ids=["first", "sequence", "minus infinity", "many"],
)
def test_a_bad_step_changes_nothing(devices, bad, value, example):
    names = cases.MET[devices]
    bad = [name for name in bad if name in names]
    engine, before = cases.trained("skip", devices, names)
    spoilt = spoil(names, bad, value, example)
    after = engine.update(before, engine.place(cases.draw_ids(names, 7)), spoilt)
    assert_same(held_by(after), held_by(before))
    assert by_feature(engine, after) == dict.fromkeys(bad, 1)


def test_allow_applies_what_it_gets_and_leaves_no_trace_in_the_program():
    programs = {}
    for policy in ("allow", "skip"):
        engine, state, batch, gradients = engine_of(["kernel"], 2, policy)
        programs[policy] = str(jax.make_jaxpr(engine.update)(state, batch, gradients))
        after = engine.update(state, batch, spoil(["kernel"], ["kernel"]))
        assert np.isnan(logical(engine, after)[0]["kernel"]).any() == (policy == "allow")
    assert "is_finite" in programs["skip"]
    assert "is_finite" not in programs["allow"]


def test_a_feature_without_gradient_and_a_table_that_is_not_trained_do_not_count():
    engine, before, batch, gradients = engine_of(["kernel", "again", "fixed"], 8)
    gradients = {
        "kernel": None,
        "again": gradients["again"],
        "fixed": cases.NAN * gradients["fixed"],
    }
    with pytest.warns(UserWarning, match="'kernel': None is taken as zeros"):
        after = engine.update(before, batch, gradients)
    assert int(after.step) == 1
    assert not any(cases.counts(after))
    with pytest.warns(UserWarning, match="None is taken as zeros"):
        after = engine.update(after, batch, dict.fromkeys(gradients))
    assert int(after.step) == 2


def test_a_gradient_counts_in_the_dtype_that_the_table_computes_in():
    engine, before, batch, gradients = engine_of(["kernel"], 1)
    half = jnp.asarray(gradients["kernel"], jnp.bfloat16).at[3, 0].set(jnp.inf)
    after = engine.update(before, batch, {"kernel": half})
    assert by_feature(engine, after) == {"kernel": 1}
    assert_same(held_by(after), held_by(before))


# -- every family of rules, packed rows, other meshes --------------------------------------------


@pytest.mark.parametrize(("packing", "name"), [("lanes", "kernel"), ("words", "half")])
@pytest.mark.quick(1)
def test_packed_rows_skip(monkeypatch, packing, name):
    monkeypatch.setattr("tpu_embed.core.layout.layout.packing_of", lambda device: packing)
    engine, before, batch, gradients = engine_of([name], 2)
    assert all(stack.packing == packing for stack in engine.layout.stacks)
    assert_same(held_by(engine.update(before, batch, spoil([name], [name]))), held_by(before))
    after = engine.update(before, batch, gradients)
    assert np.any(logical(engine, before)[0][name] != logical(engine, after)[0][name])


def test_one_device_of_a_mesh_of_two_axes_decides_for_all():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    grid = jax.make_mesh((2, 4), ("data", "model"), axis_types=explicit)
    engine, before, batch, _ = engine_of(["kernel"], 8, grid=grid)
    after = engine.update(before, batch, spoil(["kernel"], ["kernel"]))
    assert_same(held_by(after), held_by(before))
    assert by_feature(engine, after) == {"kernel": 1}
