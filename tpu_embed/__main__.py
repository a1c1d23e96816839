"""The command line: `python -m tpu_embed info` says what runs here."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import jax

from tpu_embed.kernels import cpu, dispatch

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


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(prog="python -m tpu_embed", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("info", help="versions, devices, and the kernels in use")
    command.set_defaults(run=info)
    print(parser.parse_args().run())


if __name__ == "__main__":
    main()
