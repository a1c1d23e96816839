"""The command line: `python -m tpu_embed info` says what runs here, `plan` what a config takes."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import runpy
import sys
from pathlib import Path

import jax

from tpu_embed import planning
from tpu_embed._checks import message
from tpu_embed.kernels import cpu, dispatch
from tpu_embed.planning.compiled import compile_for

PACKAGES = ("tpu-embed", "jax", "jaxlib", "optax", "flax", "numpy")


def info() -> str:
    """Return versions, devices, and which kernels a program on this CPU runs.

    Example:
      >>> "kernels on CPU" in info()
      True
    """
    lines = [f"{name:10} {importlib.metadata.version(name)}" for name in PACKAGES]
    devices = [f"{device.platform} {device.device_kind}" for device in jax.devices()]
    counted = [f"{devices.count(kind)} × {kind}" for kind in dict.fromkeys(devices)]
    loaded = cpu.load()
    where = "not there: " + loaded.why_not if loaded.path is None else str(loaded.path)
    lines += [
        f"{'Python':10} {platform.python_version()}, {platform.machine()}",
        f"{'devices':10} {', '.join(counted)}",
        f"kernels on CPU: {dispatch.kernels_in_use()} ({dispatch.VARIABLE} chooses)",
        f"compiled kernels: {where}",
    ]
    return "\n".join(lines)


def show_plan(args: argparse.Namespace) -> None:
    """Print the plan of a config on a topology, and what a compiler says of it.

    Args:
      args: `config`, a Python file that defines `workload() -> (feature_config, optimizer, batch)`;
        `topology`; `json`; `compile`.

    Raises:
      ValueError: no such file or function, a topology that is none, or a plan that does not fit.
      RuntimeError: `compile`, without libtpu.
    """
    path = Path(args.config)
    workload = runpy.run_path(str(path)).get("workload") if path.is_file() else None
    if workload is None:
        expected = "a Python file that defines workload()"
        remedy = "for example configs/dlrm_dcnv2.py"
        raise ValueError(message("config", expected=expected, got=str(path), remedy=remedy))
    feature_config, optimizer, batch = workload()
    target = int(args.topology) if args.topology.isdigit() else args.topology
    plan = planning.plan(feature_config, optimizer, target, batch)
    print(plan.to_json() if args.json else plan.explain())
    plan.check()
    if args.compile:
        jax.config.update("jax_platforms", "cpu")  # compiles for a TPU, and needs none
        print(compile_for(args.topology, feature_config, optimizer, batch).explain())


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(prog="python -m tpu_embed", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("info", help="versions, devices, and the kernels in use")
    command.set_defaults(run=lambda args: print(info()))
    command = commands.add_parser("plan", help="memory and traffic of a config on a topology")
    command.add_argument("config", help="a Python file that defines workload()")
    command.add_argument("--topology", required=True, help="v5p:4x4x4, or a number of devices")
    command.add_argument(
        "--compile", action="store_true", help="compile for it, too (needs libtpu)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=show_plan)
    args = parser.parse_args()
    try:
        args.run(args)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
