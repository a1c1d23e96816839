"""`python -m tpu_embed plan`: its output and its refusals."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tpu_embed import __main__ as command
from tpu_embed import planning
from tpu_embed.planning.compiled import Compiled
from tpu_embed.planning.profile import Operation, Profile

CONFIG = """
import jax
import numpy as np

import tpu_embed

def workload():
    table = tpu_embed.TableConfig(40_000_000, 128, name="films")
    batch = {"seen": jax.ShapeDtypeStruct((1024, 2), np.int32)}
    return {"seen": tpu_embed.FeatureConfig(table)}, tpu_embed.optimizers.Adagrad(0.1), batch
"""


@pytest.fixture
def command_line(monkeypatch, capsys):
    def run(*args):
        """Return what a command prints."""
        monkeypatch.setattr(sys, "argv", ["tpu_embed", *args])
        command.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def run(command_line, config):
    """Return what plans the configuration for a target, and returns what it prints."""
    return lambda target, *args: command_line("plan", str(config), "--topology", target, *args)


def test_targets(run):
    """A topology, a number of devices, an accelerator type."""
    assert "v5p:2x2x1: 4 device(s), global batch 1,024, 1 table(s)" in run("v5p:2x2x1")
    assert json.loads(run("8", "--json"))["devices"] == 8
    assert "v5p:4x4x4: 64 device(s)" in run("v5p-128")


def test_an_exchange_in_bfloat16_is_planned(run):
    exact, rounded = (
        json.loads(run("v5p:2x2x1", "--json", *options))["sent"]["rows"]
        for options in ((), ("--exchange-dtype", "bfloat16"))
    )
    assert exact == 2 * rounded


MISSPELT = {
    r"option of plan: .* --topolgy; did you mean --topology\?": "plan x.py --topolgy 8",
    r"option of plan: .* --jsn; did you mean --json\?": "plan x.py --jsn 8",
    r"got --topolgy; did you mean --topology\?$": "plan x.py --topolgy=8",
    r"error: command: .* got pln; did you mean plan\?": "pln x.py",
    r"error: option of info: .* got --verbose$": "info --verbose",
}


def test_what_is_misspelt_is_named(command_line, config):
    for said, line in MISSPELT.items():
        with pytest.raises(SystemExit, match=said):
            command_line(*line.split())
    command_line("plan", str(config), "--topo", "8")  # argparse completes what is not ambiguous


def test_what_does_not_fit_is_shown(run, capsys):
    with pytest.raises(SystemExit, match=r"error: plan for v5e:1x1: expected at most 15\.8 GiB"):
        run("v5e:1x1")
    assert "does NOT fit" in capsys.readouterr().out


ERRORS = {
    "topology: expected a chip among": ["v99:2x2", "", "1e3", "²", "9" * 5000],
    "target: expected .*, got .*; for": ["0", "-1"],
    "batch size: expected a positive multiple of 3": ["3"],
    "accelerator type v5p-100: expected a number of": ["v5p-100"],
}


def test_targets_that_are_none(run):
    for words, targets in ERRORS.items():
        for target in targets:
            with pytest.raises(SystemExit, match=f"error: .*{words}"):
                run(target)


CONFIGS = {
    r"a Python file that defines workload\(\), got none": "",
    r"a Python file that defines workload\(\), got workload = 3": "workload = 3",
    r"workload\(\) -> \(.*\), got 2 values": "def workload(): return 1, 2",
    r"workload\(\) -> \(.*\), got None": "def workload(): pass",
    r"one that runs, got TypeError: workload\(\) missing": "def workload(x): pass",
    "one that runs, got KeyError: 'y' at line 2": "x = 1\nraise KeyError('y')",
    "ZeroDivisionError: division by zero at line 2": "def workload():\n  return 1 / 0",
    r"SyntaxError: .*line 1": "def workload(:",
    "integer dtype": CONFIG.replace("np.int32", "np.float32"),
    "a mapping, got a list": CONFIG.replace("batch = {", "batch = [0] or {"),
}


def test_configs_that_are_none(run, config):
    for said, text in CONFIGS.items():
        config.write_text(text)
        with pytest.raises(SystemExit, match=f"^error: .*expected .*{said}"):
            run("8")


def test_a_config_that_is_no_file(command_line, tmp_path):
    for path in (tmp_path, tmp_path / "missing.py"):
        with pytest.raises(SystemExit, match=f"error: config {path}: expected .*, got no file"):
            command_line("plan", str(path), "--topology", "8")


def test_compiling_asks_for_a_topology_before_it_plans(run, capsys):
    with pytest.raises(SystemExit, match="error: --compile: expected a topology, got 8 device"):
        run("8", "--compile")
    assert capsys.readouterr().out == ""


@pytest.mark.whole
def test_a_terminal_of_few_characters_and_a_reader_that_leaves(config):
    python = [sys.executable, "-m", "tpu_embed", "plan", str(config), "--topology", "v5p:2x2x1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    reading, writing = os.pipe()
    os.close(reading)
    for out in (subprocess.PIPE, writing):
        options = {"stdout": out, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(python, env=environment, **options)
        assert (done.returncode, done.stderr) == (0, "")
    os.close(writing)


@pytest.fixture
def compiled(monkeypatch):
    """Say what a compiler would; return the commands whose profile was asked for, at most one."""
    commands = []

    def compile_for(topology, features, optimizer, batch, **_):
        planned = planning.plan(features, optimizer, topology, batch)
        return Compiled(planned, 1.5, 2, 3, 4, {"gather": 1}, {"gather": 2765}, "HloModule")

    def profile_step(argv, text):
        commands.append(argv)
        if len(commands) == 2:
            raise RuntimeError("profile of the TensorCore: expected estimates by libtpu, got none")
        return Profile([Operation("sort", 1750, 2)], 0)

    monkeypatch.setattr(command, "compile_for", compile_for)
    monkeypatch.setattr(command, "profile_step", profile_step)
    monkeypatch.setattr(command.jax.config, "update", lambda name, value: None)
    return commands


def test_json_is_one_object_with_what_the_compiler_says(run, capsys, compiled):
    read = json.loads(run("v5p:2x2x1", "--json", "--compile", "--no-cycles"))
    said = {"seconds": 1.5, "arguments": 2, "temporaries": 3, "aliased": 4, "admit": []}
    assert read["compiled"] == said | {"operations": {"gather": 1}, "moved": {"gather": 2765}}
    assert read["devices"] == 4
    assert read["estimate"]["bounds"] == {"memory": 1e-9}
    assert not compiled
    with pytest.raises(SystemExit, match=r"error: plan for v5e:1x1: expected at most 15\.8 GiB"):
        run("v5e:1x1", "--json", "--compile")
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_the_estimate_compiles_again_in_a_process_of_its_own(run, capsys, compiled):
    read = json.loads(run("v5p:2x2x1", "--json", "--compile"))["estimate"]
    assert read["bounds"] == {"memory": 1e-9, "TensorCore": 2e-6}
    assert (read["seconds"], read["cycles"]) == (2e-6, 3500)
    assert compiled[0][1:3] == ["-m", "tpu_embed"]
    assert {"--compile", "--no-cycles", "--no-admit", "v5p:2x2x1"} <= set(compiled[0])
    with pytest.raises(SystemExit, match=r"error: .*got none; --no-cycles leaves them out"):
        run("v5p:2x2x1", "--compile")
    printed = capsys.readouterr().out
    assert "compiled for v5p:2x2x1" in printed  # what is known is shown before the error
    said = "estimated time of a step: at least 0.000 ms, the bound by the memory"
    assert said in run("v4:2x2x1", "--compile")
    assert len(compiled) == 2  # no profile for this chip


HOST_CONFIG = """
import jax
import numpy as np

import tpu_embed

def workload():
    storage = tpu_embed.HostStorage(device_rows=1_000)
    tables = [tpu_embed.TableConfig(2**40, 8, name=name, storage=storage) for name in "ab"]
    batch = [jax.ShapeDtypeStruct((64,), np.int32)] * 2
    features = [tpu_embed.FeatureConfig(table) for table in tables]
    return features, tpu_embed.optimizers.Adagrad(0.1), batch
"""


@pytest.fixture
def run_of_host(run, config):
    config.write_text(HOST_CONFIG)
    return run


def test_hits_of_tables_on_the_host_are_given_or_counted(run_of_host, tmp_path):
    ids = np.arange(40).reshape(2, 20)
    ids[1, :15] = ids[0, :15]
    np.save(tmp_path / "ids.npy", ids)
    options = ["--hit-rate", "0.5", "--sample", f"b={tmp_path}/ids.npy", "--touched", "a=1e3"]
    a, b = (table["host"] for table in json.loads(run_of_host("8", "--json", *options))["tables"])
    assert (a["hit_rate"], a["rows_in"], a["touched_rows"]) == (0.5, 32, 1000)
    # The second batch has 15 rows of the first, and 5 that were never seen: none comes from home.
    assert (b["hit_rate"], b["rows_in"], b["touched_rows"]) == (0.75, 0, 2**40)
    assert "misses of b are not counted" in run_of_host("8", "--hit-rate", "a=0.25")


def test_batches_ahead_are_planned(run_of_host):
    found = json.loads(run_of_host("8", "--json", "--lookahead", "1"))
    assert (found["lookahead"], found["tables"][0]["lookahead_rows"]) == (1, 128)
    assert found["passing"]["ahead"] > 0


OPTIONS = {
    "--hit-rate much": "--hit-rate: expected .*, got ",
    "--touched a": "--touched: expected .*, got ",
    "--touched a=inf": "--touched: expected .*, got inf",
    "--sample c=ids.npy": "--sample: expected .*, got ",
    "--lookahead 65537": "lookahead: expected at most 65536, got 65537; so many",
    "--lookahead -1": "lookahead: expected an integer >= 0",
}


def test_values_that_are_none(run_of_host):
    for options, said in OPTIONS.items():
        with pytest.raises(SystemExit, match=f"error: .*{said}"):
            run_of_host("8", *options.split())
