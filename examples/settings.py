"""What some examples are run with: options of the command line, and a file of numbers."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parser(description: str | None, config: str) -> argparse.ArgumentParser:
    """Return the options that all of them share; `config` is a file of `configs/`."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--config", default=CONFIGS / config, help="hyperparameters")
    options.add_argument("--devices", type=int, help="emulate this many CPU devices")
    options.add_argument("--seed", type=int, help="instead of the config's")
    return options


def movielens_parser(description: str | None, config: str) -> argparse.ArgumentParser:
    """Return these options, and those that the MovieLens examples share."""
    options = parser(description, config)
    options.add_argument(
        "--data", help="directory of MovieLens-100K; without it pip fetches it once"
    )
    options.add_argument("--epochs", type=int, help="instead of the config's")
    return options


def read(options: argparse.ArgumentParser) -> tuple[argparse.Namespace, SimpleNamespace]:
    """Return the arguments and the hyperparameters, and emulate devices if they are asked for.

    An argument that is named like a number of the file is taken instead of it.
    """
    args = options.parse_args()
    if args.devices:  # before anything asks JAX for its devices
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    numbers = runpy.run_path(str(args.config))
    given = {k: v for k, v in vars(args).items() if k in numbers and v is not None}
    return args, SimpleNamespace(**numbers | given)
