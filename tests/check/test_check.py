"""The check passes on 1 and 8 devices, and names what was made wrong on purpose."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from tpu_embed import __main__ as command
from tpu_embed import optimizers
from tpu_embed.check import PARTS, PartReport, parts, run_parts
from tpu_embed.core.layout import Layout
from tpu_embed.kernels import dispatch


def part(name, devices=1):
    """Return the report of one part on so many devices."""
    (found,) = run_parts([name], jax.devices()[:devices])
    return found


DEVICES = {"kernels": 8, "inputs": 8, "placements": 1, "mesh": 8}
DEVICES |= {"traced": 2, "rules": 1, "bits": 2, "speed": 1}
"""On how many devices `make test` runs each part; `test_the_command_passes` runs all on 1 and 8."""


@pytest.mark.parametrize(("name", "devices"), DEVICES.items())
@pytest.mark.quick(1)
def test_a_part_finds_nothing(name, devices, monkeypatch):
    monkeypatch.setattr(parts, "_CPU_BYTES", 2**22)
    monkeypatch.setattr(parts, "_ROUNDS", 4)
    found = part(name, devices)
    assert found.ok, found.explain(verbose=True)
    assert found.what
    assert bool(found.figures) == (name == "speed")


def test_every_rule_and_every_part_is_there():
    known = {name for name in optimizers.__all__ if name[0].isupper()}
    interfaces = {"LearningRateKind", "RowOptimizer", "SlotShape", "TableOptimizer"}
    assert {type(rule).__name__ for rule in parts.rules()} >= known - interfaces
    assert list(DEVICES) == list(PARTS)


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_command_passes(devices):
    flag = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    python = [sys.executable, "-m", "tpu_embed", "check", "--json"]
    done = subprocess.run(python, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["failed"]) == (True, [])
    assert [one["name"] for one in found["parts"]] == list(PARTS)
    assert not any(one["faults"] for one in found["parts"])
    assert len(found["devices"]) == devices


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*args):
        """Return the exit status of the command, and what it printed."""
        monkeypatch.setattr(sys, "argv", ["tpu_embed", "check", *args])
        status = 0
        try:
            command.main()
        except SystemExit as stop:
            status = stop.code
        return status, capsys.readouterr().out

    return run


def test_no_speed_leaves_it_out(run, monkeypatch):
    ran = []
    for name in PARTS:
        monkeypatch.setitem(PARTS, name, lambda devices, report, name=name: ran.append(name) or "")
    assert run("--no-speed")[0] == 0
    assert ran == [name for name in PARTS if name != "speed"]
    said = "error: check: expected a part to run, got --only speed --no-speed"
    assert run("--no-speed", "--only", "speed") == (said, "")


def test_hosts_find_each_other_first(run, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda: calls.append("start"))
    monkeypatch.setitem(PARTS, "mesh", lambda devices, report: calls.append("part") or "")
    for options in (["--distributed"], []):
        assert run("--only", "mesh", *options)[0] == 0
    assert calls == ["start", "part", "part"]


@pytest.fixture
def spoil(monkeypatch):
    """Return what changes the results of a kernel, given these and its arguments."""

    def replace(name, change):
        right = getattr(dispatch, name)

        def wrong(*args, **kwargs):
            return change(right(*args, **kwargs), *args)

        monkeypatch.setattr(dispatch, name, wrong)

    return replace


def test_a_wrong_kernel_is_named(run, spoil):
    spoil("gather_sum", lambda found, *_: tuple(sums * 1.001 for sums in found))
    status, out = run("--only", "kernels")
    assert status == 1
    assert out.endswith("FAILED: kernels\n")
    assert "kernel gather_sum, D = 7, float32, by device" in out
    assert "kernel set_rows" not in out


def test_rows_of_one_number_are_tried(spoil):
    spoil("gather_rows", lambda rows, table, _: rows * 0 if table.shape[1:] == (1,) else rows)
    found = part("kernels")
    assert {fault.where.split(", ")[1] for fault in found.faults} == {"D = 1"}


def test_one_wrong_device_is_found(spoil):
    def change(found, _):
        here = jax.lax.axis_index("devices") == 3
        return found[0] + here.astype(found[0].dtype), found[1]

    spoil("sort_rows", change)
    (fault,) = part("kernels", 4).faults
    assert fault.where.startswith("kernel sort_rows, rows, by device: 300 of 1200 numbers differ")


def test_a_wrong_rule_is_named(monkeypatch):
    two = [optimizers.SGD(parts.RATE), optimizers.Lion(parts.RATE)]
    monkeypatch.setattr(parts, "rules", lambda: two)
    right = optimizers.Lion.apply_rule

    def wrong(self, w, slots, g, **how):
        return right(self, w, slots, g, **how)[0], slots

    monkeypatch.setattr(optimizers.Lion, "apply_rule", wrong)
    found = part("rules")
    assert found.faults
    assert all("table 'rule_1', Lion" in fault.where for fault in found.faults)
    assert "table 'rule_1', Lion, slot 'momenta'" in found.explain()


@pytest.mark.whole
def test_sums_in_another_order_are_found(monkeypatch):
    # As many blocks as devices, whatever `sum_blocks` says.
    monkeypatch.setattr(Layout, "blocks", property(lambda layout: layout.axes.replicas))
    found = part("bits", 2)
    assert found.faults
    assert all(" on 2 device(s)" in fault.where for fault in found.faults)


def test_an_exception_is_a_fault_of_its_part(run, monkeypatch):
    def fails(devices, report):
        raise KeyError("lost")

    monkeypatch.setitem(PARTS, "inputs", fails)
    monkeypatch.setitem(PARTS, "mesh", lambda devices, report: "nothing")
    status, out = run("--only", "inputs", "--only", "mesh")
    assert status == 1
    assert "KeyError: 'lost'" in out
    assert "Traceback" not in out
    assert out.index("inputs      FAILED") < out.index("mesh        ok")
    assert "Traceback" in run("--only", "inputs", "--verbose")[1]
    status, out = run("--only", "inputs", "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["failed"]) == (1, False, ["inputs"])
    (fault,) = found["parts"][0]["faults"]
    assert fault["where"] == "part 'inputs'"
    assert fault["trace"].startswith("Traceback")


def test_what_compare_finds():
    findings, right = PartReport("any"), np.array([[1.0, -0.0], [np.nan, 100.0]])
    findings.compare("same", right[:1], right[:1].copy(), tolerance=1e-4)
    findings.compare("same bits", right, right.copy(), tolerance=0)
    assert not findings.faults
    findings.compare("sign of zero", right[:1], np.array([[1.0, 0.0]]), tolerance=0)
    findings.compare("NaN", np.ones(2), np.array([1.0, np.nan]))
    findings.compare("shape", np.ones(2), np.ones(3))
    findings.compare("one", np.ones(3), np.array([1.0, 1.1, 1.0]))
    assert [fault.where for fault in findings.faults] == [
        "sign of zero: 1 of 2 numbers differ, first at (0, 1)",
        "NaN: 1 of 2 numbers differ, first at (1,)",
        "shape, shape",
        "one: 1 of 3 numbers differ, first at (1,)",
    ]
