"""The command line: `info` shows the machine, `check` tests it, `plan` sizes a configuration.

`vocabulary` shows the keys of a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import re
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from tpu_embed import planning
from tpu_embed._checks import did_you_mean, refuse
from tpu_embed.check import PARTS, run_parts
from tpu_embed.core.ids import structure
from tpu_embed.core.layout import ExchangeDtype
from tpu_embed.io.checkpoint import explain, statistics_of
from tpu_embed.kernels import cpu, dispatch
from tpu_embed.planning.compiled import Compiled, Estimate, compile_for, estimate
from tpu_embed.planning.host import HitRate
from tpu_embed.planning.profile import profile_step

PACKAGES = ("tpu-embed", "jax", "jaxlib", "optax", "flax", "numpy")


def info() -> str:
    """Return versions, devices, and the kernels that a program on this CPU runs.

    Example:
      >>> "kernels on CPU" in info()
      True
    """
    lines = [f"{name:10} {version}" for name, version in _versions().items()]
    loaded = cpu.load()
    where = "not there: " + loaded.why_not if loaded.path is None else str(loaded.path)
    lines += [
        f"{'Python':10} {platform.python_version()}, {platform.machine()}",
        f"{'devices':10} {_counted(jax.devices())}",
        f"kernels on CPU: {dispatch.kernels_in_use()} ({dispatch.VARIABLE} chooses)",
        f"compiled kernels: {where}",
    ]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _counted(devices: Sequence[Any]) -> str:
    """Return how many devices there are of each kind, as text."""
    # ["cpu", "cpu", "gpu"] -> ["2 × cpu", "1 × gpu"]; dict.fromkeys keeps the order.
    kinds = [f"{device.platform} {device.device_kind}" for device in devices]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


def check_machine(args: argparse.Namespace) -> None:
    """Check that the library computes right on this process's devices, and print how fast.

    Args:
      args: `only`, the parts to run, or None for all; `speed`, whether to measure; `json`;
        `verbose`, whether to show tracebacks; `distributed`, whether there are several hosts.

    Raises:
      SystemExit: a part failed; the exit status is 1.
      ValueError: no part is left to run.
    """
    if args.distributed:
        jax.distributed.initialize()
    devices, chosen = jax.local_devices(), args.only or PARTS
    names = [
        name for name in PARTS if name in chosen and (args.speed or name != "speed")
    ]
    if not names:
        refuse("check", expected="a part to run", got="--only speed --no-speed")
    if not args.json:
        print(info(), end="\n\n", flush=True)
    parts = []
    for part in run_parts(names, devices):
        parts.append(part)
        if not args.json:
            print(part.explain(verbose=args.verbose), flush=True)
    failed = [part.name for part in parts if not part.ok]
    if args.json:
        print(json.dumps({
            "ok": not failed,
            "failed": failed,
            "versions": _versions(),
            "devices": [str(device) for device in devices],
            "device_kind": devices[0].device_kind,
            "kernels_on_cpu": dispatch.kernels_in_use(),
            "parts": [part.to_dict() for part in parts],
        }))  # fmt: skip
    else:
        seconds = sum(part.seconds for part in parts)
        passed = f"passed on {_counted(devices)} in {seconds:.0f} s"
        print(f"\nFAILED: {', '.join(failed)}" if failed else f"\n{passed}")
    if failed:
        sys.exit(1)


def show_plan(args: argparse.Namespace) -> None:
    """Print the plan of a config on a topology, and optionally compile it for that topology.

    Args:
      args: `config`, a Python file that defines `workload() -> (feature_config, optimizer, batch)`;
        `topology`; `memory`; `exchange_dtype`; `lookahead`; `hit_rate`, `sample` and `touched`, of
        tables on the host; `json`; `compile`; `admit`, whether to compile what moves rows, too;
        `cycles`, whether to compile a second time for the cycles of the TensorCore.

    Raises:
      TypeError: the batch has other containers than the features, or ids that are not integers.
      ValueError: the config does not run, the topology is unknown, or the plan does not fit.
      RuntimeError: `compile` was given, but libtpu is not installed, or it wrote no cycles.
    """
    feature_config, optimizer, batch = given = _workload(Path(args.config))
    target = _target(args.topology)
    if isinstance(target, str):
        args.topology = planning.Topology(target).name  # v5p-8 is v5p:2x2x1
    elif args.compile:
        refuse(
            "--compile",
            expected="a topology",
            got=f"{target} device(s)",
            remedy="for example --topology v5p:2x2x1",
        )
    memory = None if args.memory is None else _bytes(args.memory)
    rates, touched = _host_options(args, feature_config)
    options: dict[str, Any] = {
        "hit_rates": rates,
        "exchange_dtype": args.exchange_dtype,
    }
    plan = planning.plan(
        feature_config,
        optimizer,
        target,
        batch,
        touched_rows=touched,
        memory=memory,
        lookahead=args.lookahead,
        **options,
    )
    if not args.json:
        print(plan.explain())
    elif not (args.compile and plan.fits):
        print(plan.to_json())
    plan.check()
    if args.compile:
        # libtpu compiles for a TPU without having one; JAX must not search for one here.
        jax.config.update("jax_platforms", "cpu")
        compiled = compile_for(args.topology, *given, admit=args.admit, **options)
        if not args.json:
            print(compiled.explain(), flush=True)
        found = _estimate(args, compiled)
        print(_as_json(plan, compiled, found) if args.json else found.explain())


def _estimate(args: argparse.Namespace, compiled: Compiled) -> Estimate:
    """Return the estimated time of the compiled step, with the TensorCore's cycles if wanted."""
    if not args.cycles or planning.Topology(args.topology).chip.clock is None:
        return estimate(compiled)
    # The same command again, in a process that may abort.
    again = ["plan", args.config, "--topology", args.topology]
    again += ["--compile", "--no-cycles", "--no-admit"]
    again += ["--exchange-dtype", args.exchange_dtype] if args.exchange_dtype else []
    try:
        profile = profile_step(
            [sys.executable, "-m", "tpu_embed", *again], compiled.text
        )
    except RuntimeError as error:
        raise RuntimeError(f"{error}; --no-cycles leaves them out") from error
    return estimate(compiled, profile)


def _host_options(
    args: argparse.Namespace, feature_config: Any
) -> tuple[dict[str, HitRate], dict[str, int]]:
    """Return `hit_rates` and `touched_rows` as `plan` takes them.

    Args:
      args: texts: `hit_rate`, `0.9` for all tables on the host, or `TABLE=0.9`, of which later ones
        count; `sample`, `TABLE=FILE`, a file that `count_hits` reads, whose first batch fills the
        places on the devices and is not counted; `touched`, `TABLE=ROWS`.
      feature_config: as for `EmbeddingEngine`.

    Raises:
      ValueError: a text has another form, or `count_hits` refuses a file.
    """
    tables = structure.flatten(feature_config).configs
    stored = {
        name: table.storage
        for name, table in tables.items()
        if table.storage is not None
    }
    rates: dict[str, HitRate] = {}
    for text in args.hit_rate:
        name, _, number = text.rpartition("=")
        rate = _number("--hit-rate", number, "a share such as 0.9, or TABLE=0.9")
        rates |= {name: rate} if name else dict.fromkeys(stored, rate)
    for text in args.sample:
        name, _, path = text.partition("=")
        if name not in stored or not path:
            refuse(
                "--sample",
                expected=f"TABLE=FILE, of the tables on the host {sorted(stored)}",
                got=text,
            )
        rates[name] = planning.count_hits(path, stored[name], warm_up=1)
    touched: dict[str, int] = {}
    for text in args.touched:
        name, _, number = text.partition("=")
        touched[name] = int(
            _number("--touched", number, "TABLE=ROWS, such as items=1e9")
        )
    return rates, touched


def _number(option: str, text: str, expected: str) -> float:
    try:
        found = float(text)
        int(found)  # refuses what is not finite
    except (ValueError, OverflowError) as error:
        refuse(option, expected=expected, got=text or "nothing", cause=error)
    return found


def _workload(path: Path) -> tuple[Any, Any, Any]:
    """Return what `workload()` of a Python file returns.

    Raises:
      ValueError: the file or the function does not exist, fails, or returns something else.
    """
    what, expected = f"config {path}", "a Python file that defines workload()"
    remedy = "for example configs/dlrm_dcnv2.py"
    if not path.is_file():
        refuse(what, expected=expected, got="no file", remedy=remedy)
    try:
        workload = runpy.run_path(str(path)).get("workload")
        found = workload() if callable(workload) else None
    except (
        Exception,
        SystemExit,
    ) as error:  # a config that ends the program is no config
        # The line of the user's file, not the line of the library function that raised.
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename == str(path)
        ]
        line = f" at line {frames[-1].lineno}" if frames else ""
        refuse(
            what,
            expected="one that runs",
            got=f"{type(error).__name__}: {error}{line}",
            cause=error,
        )
    if not callable(workload):
        got = "none" if workload is None else f"workload = {workload!r}"
    elif isinstance(found, (tuple, list)) and len(found) == 3:
        return tuple(found)
    else:
        expected = "workload() -> (feature_config, optimizer, batch)"
        got = (
            f"{len(found)} values" if isinstance(found, (tuple, list)) else repr(found)
        )
    refuse(what, expected=expected, got=got, remedy=remedy)


def _bytes(text: str) -> int:
    """Return a number of bytes, such as "80GiB", "16 GB" or "8e9".

    Raises:
      ValueError: it is none.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    try:
        number, unit, binary = found.groups() if found else ("", "", "")
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " ")
    except ValueError:
        size = 0
    if not 1 <= size < 2**63:
        refuse(
            "--memory",
            expected="bytes of memory per device",
            got=text,
            remedy="for example --memory 80GiB",
        )
    return int(size)


def _target(topology: str) -> str | int:
    """Return a number of devices as an int, and a topology such as "v5p:4x4x4" as it is."""
    try:
        return int(topology)
    except ValueError:
        return topology


def _as_json(plan: planning.Plan, compiled: Compiled, found: Estimate) -> str:
    """Return the plan as a JSON object, with the compiler's figures under "compiled"."""
    names = [field.name for field in dataclasses.fields(compiled)]
    said = {
        name: getattr(compiled, name) for name in names if name not in ("plan", "text")
    }
    more = {"compiled": said, "estimate": found.figures()}
    return json.dumps(json.loads(plan.to_json()) | more, default=dataclasses.asdict)


def _add_check(commands: Any) -> None:
    """Add the subcommand `check` to the command line."""
    command = commands.add_parser(
        "check", help="test the library on the devices of this machine"
    )
    command.add_argument(
        "--only", action="append", choices=PARTS, help="run this part alone"
    )
    command.add_argument(
        "--no-speed",
        dest="speed",
        action="store_false",
        help="do not measure the speed",
    )
    command.add_argument("--json", action="store_true", help="print JSON, at the end")
    command.add_argument("--verbose", action="store_true", help="show tracebacks")
    command.add_argument(
        "--distributed",
        action="store_true",
        help="on several hosts: start jax.distributed",
    )
    command.set_defaults(run=check_machine)


def _add_plan(commands: Any) -> None:
    """Add the subcommand `plan` to the command line."""
    command = commands.add_parser(
        "plan", help="memory and traffic of a config on a topology"
    )
    command.add_argument("config", help="a Python file that defines workload()")
    command.add_argument(
        "--topology", required=True, help="v5p:4x4x4, v5p-128, or a number of devices"
    )
    command.add_argument(
        "--memory", help="of each device, such as 80GiB; a topology has its own"
    )
    words = get_args(ExchangeDtype)
    command.add_argument(
        "--exchange-dtype", choices=words, help="as for EmbeddingEngine (float32)"
    )
    ahead = "as for EmbeddingEngine (0); 1 for a pipelined TPUEmbedding"
    command.add_argument("--lookahead", type=int, default=0, help=ahead)
    _add_host_options(command)
    command.add_argument(
        "--compile", action="store_true", help="compile for it, too (needs libtpu)"
    )
    command.add_argument(
        "--no-cycles",
        dest="cycles",
        action="store_false",
        help="with --compile: do not compile a second time for the cycles of the TensorCore",
    )
    command.add_argument(
        "--no-admit",
        dest="admit",
        action="store_false",
        help="with --compile: not the programs that move rows of tables on the host",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=show_plan)


def show_vocabulary(args: argparse.Namespace) -> None:
    """Print how the dynamic vocabularies of a checkpoint fare.

    Args:
      args: `checkpoint`, its directory; `table`, the only one to show, or None; `hottest`, how many
        keys to list in each order; `json`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      ValueError: a file is damaged; no vocabulary lives, or none of this name.
    """
    # Another process may hold the accelerator, and nothing is computed here.
    jax.config.update("jax_platforms", "cpu")
    found = statistics_of(args.checkpoint, hottest=args.hottest, table=args.table)
    print(json.dumps(found) if args.json else explain(found))


def _add_vocabulary(commands: Any) -> None:
    """Add the subcommand `vocabulary` to the command line."""
    command = commands.add_parser(
        "vocabulary", help="the keys of a checkpoint's tables"
    )
    command.add_argument(
        "checkpoint", help="the directory that io.save or io.save_modules wrote"
    )
    command.add_argument("--table", help="show this table alone")
    command.add_argument(
        "--hottest",
        type=int,
        default=10,
        help="how many keys to list in each order (10)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=show_vocabulary)


def _add_host_options(command: argparse.ArgumentParser) -> None:
    """Add what is said of tables on the host."""
    of_tables: dict[str, Any] = {"action": "append", "default": []}
    command.add_argument(
        "--hit-rate",
        metavar="[TABLE=]SHARE",
        help="of tables on the host: the share of a batch's rows that the devices hold",
        **of_tables,
    )
    command.add_argument(
        "--sample",
        metavar="TABLE=FILE",
        help="count it on a .npy file of batches of ids; the first one is not counted",
        **of_tables,
    )
    command.add_argument(
        "--touched",
        metavar="TABLE=ROWS",
        help="how many rows of a table on the host training touches",
        **of_tables,
    )


def _check_spelling(
    arguments: list[str], commands: Mapping[str, argparse.ArgumentParser]
) -> None:
    """Check that the command and its options exist, and name what was probably meant.

    Raises:
      ValueError: there is no such command or option.
    """
    command = next(iter(arguments), "-")
    if command.startswith("-"):
        return
    if command not in commands:
        refuse(
            "command",
            expected=f"one of {', '.join(commands)}",
            got=command,
            remedy=did_you_mean(command, commands),
        )
    options = set(re.findall(r"--[a-z][a-z-]*", commands[command].format_help()))
    for argument in arguments[1:]:
        name = argument.partition("=")[0]
        if name.startswith("--") and not any(one.startswith(name) for one in options):
            refuse(
                f"option of {command}",
                expected=f"one of {', '.join(sorted(options))}",
                got=name,
                remedy=did_you_mean(name, options),
            )


def main() -> None:
    """Run the subcommand that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tpu_embed", description=__doc__)
    parser.add_argument(
        "--version",
        action="version",
        version=f"tpu_embed {importlib.metadata.version('tpu-embed')}",
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "info", help="versions, devices, and the kernels in use"
    )
    command.set_defaults(run=lambda args: print(info()))
    _add_check(commands)
    _add_plan(commands)
    _add_vocabulary(commands)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may lack the bars' characters.
        sys.stdout.reconfigure(errors="replace")
    try:
        _check_spelling(sys.argv[1:], commands.choices)
        args = parser.parse_args()
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output, `head` for example, has closed it. Python would fail to flush
        # standard output at exit, so it is redirected to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TypeError, ValueError, RuntimeError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
