"""Compile the CPU kernels where a C++ compiler is found; everything else is in pyproject.toml.

Without a compiler, or where it fails, the install succeeds all the same: the package then runs its
kernels in XLA's own operations, with the same results.

The kernels need the headers of jaxlib. pip builds in an environment of its own, so where the one
that is installed into has a jaxlib, its headers are read there; elsewhere pip is asked for one.
"""

import importlib.metadata
import re
import site
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("tpu_embed/kernels/native")
OLDEST = re.findall(r'"jax>=([0-9.]+)"', Path("pyproject.toml").read_text())[0]
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # the flags of Python may have -g, which would make nine tenths of the file
    "-ffp-contract=off",  # products and sums are rounded one by one, as in the XLA path
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]


def headers() -> list[str]:
    """Return the folder of jaxlib's headers, if one that is new enough is installed."""
    places = [*sys.path, *site.getsitepackages()]
    for found in importlib.metadata.distributions(name="jaxlib", path=places):
        version = tuple(map(int, re.findall(r"\d+", found.version)[:3]))
        folder = Path(str(found.locate_file("jaxlib/include")))
        if version >= tuple(map(int, OLDEST.split("."))) and folder.is_dir():
            return [str(folder)]
    return []


class Build(build_ext):
    """Says what takes long."""

    def build_extension(self, ext: Extension) -> None:
        print(f"compiling {len(ext.sources)} files of kernels, which takes a minute or two")
        super().build_extension(ext)


kernels = Extension(
    "tpu_embed.kernels._native",
    sources=sorted(str(path) for path in NATIVE.glob("*.cc")),
    depends=sorted(str(path) for path in (*NATIVE.glob("*.h"), *NATIVE.glob("*.inc"))),
    include_dirs=headers(),
    extra_compile_args=FLAGS,
    language="c++",
    optional=True,
)

setup(
    ext_modules=[] if sys.platform == "win32" else [kernels],
    cmdclass={"build_ext": Build},
    setup_requires=[] if headers() else [f"jaxlib>={OLDEST}"],
)
