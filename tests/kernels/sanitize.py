"""Run the compiled CPU kernels on random operands under AddressSanitizer and UBSan.

    python tests/kernels/sanitize.py [--seeds N] [--keep FOLDER]

This compiles `tpu_embed/kernels/native` with the flags of setup.py and the sanitizers. It needs
GCC and takes minutes, but only once if `--keep` names a folder for the library. Then a child
process for each instruction set of this machine calls every kernel. Ids are absent, out of range
and extreme; bags are out of range, segments unsorted, numbers infinite and NaN; eight emulated
devices call at once. Where the operands are valid, results are compared with `reference`. The exit
status is 1 if anything is found.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"
NATIVE = ROOT / "tpu_embed" / "kernels" / "native"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
VARIABLE = "SANITIZE_LOOPS"
LOOPS = ("baseline", "avx2", "avx2 avx512vl avx512bw avx512dq")
"""Instruction sets that a child may use: `loops.cc` then chooses the best of them."""

CHOICE = f"""
#include <stdlib.h>
#include <string.h>
static inline int allowed(const char* set, int here) {{
  return here && strstr(getenv("{VARIABLE}"), set) != NULL;
}}
#define __builtin_cpu_supports(set) allowed(set, __builtin_cpu_supports(set))
"""
"""Included before everything else, so that a child chooses among the loops."""


def flags() -> list[str]:
    """Return the flags of setup.py, then the sanitizers'."""
    statements = ast.parse((ROOT / "setup.py").read_text()).body
    assigned = {s.targets[0].id: s.value for s in statements if isinstance(s, ast.Assign)}
    return [*ast.literal_eval(assigned["FLAGS"]), *SANITIZE]


def compile_into(folder: Path) -> Path:
    """Return the library, built unless it is newer than its sources."""
    library, header = folder / "sanitized.so", folder / "choice.h"
    newest = max(path.stat().st_mtime for path in NATIVE.iterdir())
    if library.exists() and library.stat().st_mtime > newest:
        return library
    header.write_text(CHOICE)
    options = [*flags(), "-fPIC", "-w", f"-I{jax.ffi.include_dir()}", "-include", str(header)]
    objects = []
    for path in sorted(NATIVE.glob("*.cc")):
        objects.append(str(folder / f"{path.stem}.o"))
        subprocess.run(["g++", *options, "-c", str(path), "-o", objects[-1]], check=True)
    subprocess.run(["g++", *SANITIZE, "-shared", *objects, "-o", str(library)], check=True)
    return library


def runtime(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
    return found.stdout.strip()


def run_child(library: Path, loops: str, seeds: int) -> int:
    """Return the exit status of the calls with one set of loops."""
    # libstdc++ too: the sanitizer looks for its functions when it starts, before the kernels load.
    preloaded = " ".join(map(runtime, ("libasan.so", "libubsan.so", "libstdc++.so")))
    environment = os.environ | {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, HELPERS, *HELPERS.glob("*/")])),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        VARIABLE: loops,
    }
    calls = Path(__file__).with_name("sanitized_calls.py")
    command = [sys.executable, str(calls), str(library), str(seeds)]
    return subprocess.run(command, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder in which the library is kept")
    given = parser.parse_args()
    here = Path("/proc/cpuinfo").read_text().split()
    with tempfile.TemporaryDirectory() as folder:
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
        library = compile_into(given.keep or Path(folder))
        for loops in LOOPS:
            if loops != "baseline" and not set(loops.split()) <= set(here):
                print(f"{loops}: not on this machine")
            elif run_child(library, loops, given.seeds):
                print(f"{loops}: a finding, see above")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
