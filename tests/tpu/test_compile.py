"""Steps compiled by libtpu for chips that need not exist: memory, and bytes moved."""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import programs
import pytest
from programs import OPTIMIZERS, ROOT, SMALL, config_of, dlrm_v4, hosted, quickstart

from tpu_embed import FeatureConfig
from tpu_embed.check import PartReport, parts
from tpu_embed.kernels import sparsecore
from tpu_embed.planning import CHIPS, Topology
from tpu_embed.planning.compiled import compile_for, describe_topology

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make test-tpu-compile"
)
whole = pytest.mark.whole
HAVE_SPARSE_CORES = {name for name, chip in CHIPS.items() if chip.device_kind in sparsecore.KINDS}

FORMS = {
    "v4": ("div", 16, "float32", "sgd"),
    "v5e": ("mod", 64, "float32", "adagrad"),
    "v5p": ("replicated", 128, "bfloat16", "adam"),
    "v6e": ("auto", 24, "float32", "row-wise"),
    "tpu7x": ("mod", 8, "float32", "ftrl"),
}
"""All pairs that matter with few compilations: a chip, a placement, a form, an optimizer."""


def checked(topology, features, optimizer, shapes, **options):
    """Compile a step, and check its memory and movement against its plan."""
    compiled = compile_for(topology, features, optimizer, shapes, **options)
    plan = compiled.plan
    held = sum(plan.held.values())  # small arrays of one axis have smaller tiles than planned
    assert compiled.arguments == pytest.approx(held + plan.passing["ids"], 0.02)
    assert compiled.aliased == pytest.approx(held, 0.02)
    kernels = {"gather_rows", "set_rows", "merge_update"} & compiled.moved.keys()
    if topology.partition(":")[0] in HAVE_SPARSE_CORES:
        assert "gather_rows" in kernels
        assert len(kernels) > 1, "one of two kernels writes rows"
    else:
        assert not kernels
    return compiled


@whole
@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize("keyed", [False, True])
def test_rounding_at_random_is_in_place_and_moves_no_more_rows(chip, keyed):
    """Of rows with numbers of their own, these are read, too. What admit runs may be left out."""
    features, shapes = hosted() if keyed else quickstart(dim=128)

    def compiled(rounding):
        def change(feature):
            options = {"dtype": "bfloat16", "rounding": rounding}
            return FeatureConfig(dataclasses.replace(feature.table, **options))

        changed = jax.tree.map(change, features)
        return compile_for(SMALL[chip], changed, OPTIMIZERS["adagrad"], shapes, admit=False)

    plain, rounded = compiled("nearest"), compiled("stochastic")
    assert rounded.aliased == pytest.approx(sum(rounded.plan.held.values()), 0.02)
    assert sum(rounded.moved.values()) <= 1.02 * sum(plain.moved.values())
    assert rounded.admit == ()


def test_a_step_for_v5p_is_in_place_and_on_sparse_cores():
    features, shapes = quickstart(dim=128)
    compiled = checked("v5p:2x2x1", features, OPTIMIZERS["adagrad"], shapes)
    assert compiled.operations["gather_rows"] == 1  # rows asked for
    assert compiled.operations["merge_update"] == 1
    assert "set_rows" not in compiled.operations
    assert sum(compiled.moved.values()) <= 2 * sum(compiled.plan.moved.values())
    started = re.findall(r"async_execution_thread=\"sparsecore\".*?gather_rows", compiled.text)
    assert len(started) >= 1
    assert "compiled for v5p:2x2x1" in compiled.explain()


def test_the_stateful_door_compiles_for_v6e():
    features, shapes = quickstart(dim=24)
    lookup, update, plan = programs.stateful_programs(
        "v6e:2x2", features, OPTIMIZERS["adam"], shapes
    )
    assert "gather_rows" in lookup.as_text()
    assert "merge_update" in update.as_text()
    memory = update.memory_analysis()
    assert memory.alias_size_in_bytes == pytest.approx(sum(plan.held.values()), 0.02)


def check_admit(compiled, tables):
    """Check that rows of tables on the host move in place, and take room for themselves alone."""
    admit = {one.name: one for one in compiled.admit}
    assert [one.name for one in compiled.admit] == ["write", "exchange"]
    plans = {one.name: one for one in compiled.plan.tables if one.host is not None}
    assert {one.tables for one in compiled.admit} == {tables} == {tuple(plans)}
    held = sum(one.table_bytes + one.slot_bytes for one in plans.values())
    row = next(iter(plans.values())).host.row_bytes
    for one in compiled.admit:
        assert one.aliased == pytest.approx(held, 0.02)
    assert admit["write"].results < 10_000
    moved = admit["exchange"]
    # Rows that are narrower than a line of 128 words may take a whole line each.
    assert row * moved.rows <= moved.results <= 8 * row * moved.rows + 10_000
    assert row * moved.rows <= moved.arguments - moved.aliased <= 9 * row * moved.rows + 10_000
    return admit


@pytest.mark.parametrize("chip", ["v5e", pytest.param("v5p", marks=whole)])
def test_a_step_with_tables_on_the_host_needs_what_the_devices_hold(chip):
    features, shapes = hosted()
    compiled = checked(SMALL[chip], features, OPTIMIZERS["adagrad"], shapes, hit_rates=0.75)
    assert compiled.arguments < 2**28 < compiled.plan.on_host["rows at home"]
    admit = check_admit(compiled, ("item", "user"))
    # Parcels are rounded up to 64 times 1, 2, 3, 4, 6, 8, …: a quarter may take up to twice that.
    assert admit["exchange"].rows <= admit["write"].rows / 2
    assert "admit exchange" in compiled.explain()


@whole
def test_dlrm_with_tables_on_the_host_fits_four_small_chips():
    features, optimizer, shapes = config_of("dlrm_dcnv2_host").workload()
    compiled = checked("v5e:2x2", features, optimizer, shapes, hit_rates=0.8)
    plan, memory = compiled.plan, compiled.plan.memory
    plan.check()
    assert compiled.arguments + compiled.temporaries + plan.passing["misses"] < 0.95 * memory
    admit = check_admit(compiled, ("t00", "t09", "t19", "t20", "t21"))
    held = sum(plan.held.values())
    assert all(held + one.results + one.temporaries < memory for one in admit.values())


def test_topologies_have_the_hosts_that_libtpu_gives_them():
    for name in ("v3:4x4", "v4:2x2x2", "v5e:2x4", "v5e:4x4", "v5p:4x4x4", "v6e:2x2", "tpu7x:2x2x2"):
        topology = Topology(name)
        found = {device.process_index for device in describe_topology(topology)}
        assert len(found) == topology.hosts


CONFIG = """
from programs import OPTIMIZERS, quickstart

def workload():
    features, shapes = quickstart(dim=16)
    return features, OPTIMIZERS["sgd"], shapes
"""


@whole
def test_the_command_line_estimates_the_time_of_a_step(tmp_path):
    """In two processes: JAX must not have been started, and libtpu may abort in the second."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "tpu_embed", "plan", str(config), "--json", "--compile"]
    command += ["--topology", "v5p:2x2x1"]
    search = [str(ROOT), str(ROOT / "tests/tpu"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    read = json.loads(subprocess.check_output(command, env=environment))
    found = read["estimate"]
    assert found["moved"] == sum(read["compiled"]["moved"].values())
    assert found["bounds"]["memory"] == found["moved"] / 2.765e12
    assert found["bounds"]["TensorCore"] == found["cycles"] / 1.75e9 > 0
    assert found["seconds"] == max(found["bounds"].values())


@whole
@pytest.mark.parametrize("chip", SMALL)
def test_both_apis_compile_everywhere(chip):
    placement, dim, dtype, optimizer = FORMS[chip]
    features, shapes = quickstart(placement, dim, dtype)
    compiled = checked(SMALL[chip], features, OPTIMIZERS[optimizer], shapes)
    # The host has routed the ids: no list of numbers is indexed or sorted. (On SparseCores the
    # bounds of the workers' shares are looked up, a few dozen numbers.)
    lists = re.findall(r" = \(?\w+\[\d+\]\S* (?:gather|scatter|sort)\(", compiled.text)
    assert not lists or chip in HAVE_SPARSE_CORES
    programs.stateful_programs(SMALL[chip], features, OPTIMIZERS[optimizer], shapes)


@whole
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_every_family_of_optimizers_compiles(chip, optimizer):
    features, shapes = quickstart()
    checked(SMALL[chip], features, OPTIMIZERS[optimizer], shapes)


@whole
@pytest.mark.parametrize("topology", ["v5p:4x4x4", "v6e:16x16"])
def test_dlrm_at_full_scale_is_as_planned(topology):
    compiled = checked(topology, *config_of("dlrm_dcnv2").workload())
    plan = compiled.plan
    plan.check()
    needed = compiled.arguments + compiled.temporaries
    assert needed == pytest.approx(plan.bytes_per_device, 0.1)
    assert sum(compiled.moved.values()) <= 2 * sum(plan.moved.values())


def checked_jagged(topology, *workload):
    """Compile a step; check that its memory is what jagged activations and their exchange need.

    They need room for the activations and as much for their gradients, one row per place, and for
    the fullest stage of the exchange (`costs.passing`): here the sums of gradients that are sent,
    those that arrive, and the rows to update. Ids are arguments.
    """
    compiled = checked(topology, *workload)
    plan = compiled.plan
    assert compiled.arguments == pytest.approx(sum(plan.held.values()) + plan.passing["ids"], 0.01)
    needed = plan.passing["activations"] + plan.passing["exchange"]
    assert compiled.temporaries <= 1.3 * needed
    return compiled


def test_jagged_histories_need_no_more_than_their_events():
    workload = dlrm_v4(1_000_000, batch_size=64, events=1024)
    compiled = checked_jagged("tpu7x:2x2x1", *workload)
    # Each of 8 devices has 8 histories; padded, they would have 4,096 positions each.
    assert not re.search(r"f32\[(8,4096|32768),512\]", compiled.text)


@whole
def test_dlrm_v4_at_full_scale_is_as_planned():
    checked_jagged("tpu7x:4x4x4", *dlrm_v4()).plan.check()


@whole
def test_kernels_and_collectives_grow_with_stacks_and_not_with_tables():
    few, more = (
        compile_for("v5p:2x2x1", features, OPTIMIZERS["adagrad"], shapes).operations
        for features, shapes in map(programs.many, (26, 260))
    )
    for name in ("gather_rows", "merge_update", "all-to-all", "sort"):
        assert more[name] == few[name]


@whole
def test_the_next_lookup_runs_beside_other_work():
    """Which work that is, the compiler decides."""
    features, shapes = quickstart(dim=128)
    text = programs.pipelined_step("v5p:2x2x1", features, OPTIMIZERS["adagrad"], shapes)
    entry = text[text.index("\nENTRY") :].splitlines()
    calls = [line for line in entry if " call-start(" in line and "gather_rows" in line]
    assert len(calls) == 1
    name = calls[0].split()[0]
    started = entry.index(calls[0])
    done = next(i for i, line in enumerate(entry) if f"call-done({name})" in line)
    assert sum(" fusion(" in line for line in entry[started:done]) >= 5


@whole
@pytest.mark.parametrize("placed", [True, False])
def test_an_exchange_in_bfloat16_sends_half_the_bytes(placed):
    """What crosses the links are words of two numbers each, for XLA to convert nothing behind."""
    features, shapes = quickstart(dim=64)
    given = "v5p:2x2x1", features, OPTIMIZERS["adagrad"], shapes
    exact, rounded = (
        compile_for(*given, placed=placed, exchange_dtype=dtype) for dtype in (None, "bfloat16")
    )
    numbers = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* all-to-all(?:-start)?\(")
    sizes = []
    for compiled in (exact, rounded):
        # Row numbers, if the devices route, are int32.
        sent = [shape for dtype, shape in numbers.findall(compiled.text) if dtype != "s32"]
        assert len(sent) == 2
        sizes.append(sum(math.prod(map(int, shape.split(","))) for shape in sent))
    assert sizes[0] == 2 * sizes[1]
    # Rounding is no pass of its own: no rows are in memory in float32 before they are rounded.
    assert rounded.operations["gather_rounded_rows"] == 1
    assert "gather_rows" not in rounded.operations
    assert sum(rounded.moved.values()) < 0.85 * sum(exact.moved.values())
    assert {dtype for dtype, _ in numbers.findall(rounded.text)} <= {"u32", "s32"}


# -- Steps inside of loops and branches ------------------------------------------------------------
#
# libtpu ends the process where it cannot compile a program, so a failure here ends the worker.

CHIP = "v5p:2x2x1"


def lower(kind, engine, state, batch):
    """Lower three steps, or one that may be left out; return what `jax.jit` lowers."""

    def run(state, batch, flag):
        def step(state):
            return engine.update(state, batch, engine.lookup(state, batch))

        if kind == "loop":
            return jax.lax.fori_loop(0, 3, lambda _, state: step(state), state)
        return jax.lax.cond(flag, step, lambda state: state, state)

    flag = jax.ShapeDtypeStruct((), bool)
    return jax.jit(run, donate_argnums=0).lower(state, batch, flag)


@pytest.mark.parametrize("kind", ["branch", "loop"])
@pytest.mark.parametrize("optimizer", ["adagrad", "row-wise", "adam", "ftrl", "sgd"])
@pytest.mark.quick(1)
def test_steps_of_placed_batches(optimizer, kind):
    features, shapes = quickstart(dim=128)
    lowering = functools.partial(lower, kind)
    compiled = compile_for(CHIP, features, OPTIMIZERS[optimizer], shapes, lower=lowering)
    assert ("merge_update" in compiled.text) == (optimizer != "ftrl")


@pytest.mark.parametrize("optimizer", ["ftrl", "adagrad"])
@pytest.mark.quick(1)
def test_a_step_of_traced_ids(optimizer):
    features, shapes = quickstart(dim=128)
    given = {"items": features["items"]}, OPTIMIZERS[optimizer], {"items": shapes["items"]}
    compiled = compile_for(CHIP, *given, placed=False)
    assert ("merge_update" in compiled.text) == (optimizer != "ftrl")


# -- The programs of `python -m tpu_embed check` ---------------------------------------------------


@whole
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2"])
def test_kernels_of_the_check_compile(topology, monkeypatch):
    compiled, on_each = [], parts.on_each

    def compile_only(devices, kernel):
        program = on_each(devices, kernel)

        def zeros(*operands):
            compiled.append("sparsecore" in program.lower(*operands).compile().as_text())
            return jax.tree.map(
                lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(program, *operands)
            )

        return zeros

    monkeypatch.setattr(parts, "on_each", compile_only)
    report = PartReport("kernels")
    parts.check_kernels(describe_topology(Topology(topology)), report)
    assert not [fault.trace for fault in report.faults if fault.trace]
    # Those of `TRIALS`, and the sort.
    assert compiled == [*[topology.startswith("v5p")] * len(parts.TRIALS), False]
