"""Compile the CPU kernels where a C++ compiler is found; everything else is in pyproject.toml.

Without a compiler, or where it fails, the install succeeds all the same: the package then runs its
kernels in XLA's own operations, with the same results.
"""

import sys
from pathlib import Path

import jax
from setuptools import Extension, setup

NATIVE = Path("tpu_embed/kernels/native")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # the flags of Python may have -g, which would make nine tenths of the file
    "-ffp-contract=off",  # products and sums are rounded one by one, as in the XLA path
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]

kernels = Extension(
    "tpu_embed.kernels._native",
    sources=sorted(str(path) for path in NATIVE.glob("*.cc")),
    depends=sorted(str(path) for path in (*NATIVE.glob("*.h"), *NATIVE.glob("*.inc"))),
    include_dirs=[jax.ffi.include_dir()],
    extra_compile_args=FLAGS,
    language="c++",
    optional=True,
)

setup(ext_modules=[] if sys.platform == "win32" else [kernels])
