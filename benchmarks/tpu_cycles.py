"""TensorCore cycles of a training step on TPUs that are not there, by operation and per id.

    PYTHONPATH=build/libtpu JAX_PLATFORMS=cpu python benchmarks/tpu_cycles.py [--only NAME]

libtpu's compiler estimates the cycles (`tpu_embed.planning.profile`): the work of the TensorCores,
without waits for memory, other chips or SparseCores. Beside them stand the bytes that the step
moves in memory, and how many cycles these take at the chip's bandwidth. libtpu may abort after it
has written its profile, so each line compiles in a process of its own, and once more without the
profile, for the names of the stages.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np

from tpu_embed import EmbeddingEngine, FeatureConfig, TableConfig, optimizers
from tpu_embed.planning import hlo, plan, profile
from tpu_embed.planning.chips import Topology
from tpu_embed.planning.compiled import abstract_state, compile_for, describe_topology

GIGAHERTZ = {"v5p": 1.75, "v6e": 1.75}
"""TensorCore clocks that the cycles are turned into milliseconds with."""
BYTES_PER_SECOND = {"v5p": 2.765e12, "v6e": 1.638e12}
RULES = {
    "Adagrad": optimizers.Adagrad(0.1),
    "Adam": optimizers.Adam(0.1),
    "FTRL": optimizers.FTRL(0.1),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One step: tables of 1e6 rows, a bag of each per example."""

    target: str = "v5p:2x2x1"
    devices: int = 4
    tables: int = 8
    rows: int = 1_000_000
    dim: int = 128
    batch: int = 1024
    hot: int = 10
    rule: str = "Adagrad"
    combiner: str = "sum"
    traced: str = ""  # ids traced inside the jit: "worst" or "planned" capacities; "": placed ids

    @property
    def ids(self) -> int:
        """Ids of one device."""
        return self.tables * self.batch * self.hot // self.devices

    @property
    def chip(self) -> str:
        """The kind of chip."""
        return self.target.split(":")[0]

    def compile(self):
        """Return the text of the compiled step, and the bytes that it moves."""
        tables = [
            TableConfig(self.rows, self.dim, combiner=self.combiner, name=f"t{i}")
            for i in range(self.tables)
        ]
        features = {table.name: FeatureConfig(table) for table in tables}
        shape = jax.ShapeDtypeStruct((self.batch, self.hot), np.int32)
        shapes = dict.fromkeys(features, shape)
        if self.traced:
            text = self._compile_traced(features, shapes)
            return text, sum(hlo.moved(hlo.Program(text)).values())
        compiled = compile_for(self.target, features, RULES[self.rule], shapes)
        return compiled.text, sum(compiled.moved.values())

    def _compile_traced(self, features, shapes):
        """Return the text of a step whose ids are traced: the program routes them itself."""
        devices = describe_topology(Topology(self.target))
        mesh = jax.sharding.Mesh(np.array(devices).reshape(-1), ("devices",))
        engine = EmbeddingEngine(features, RULES[self.rule], mesh=mesh)
        planned = plan(features, RULES[self.rule], self.target, shapes).spec
        spec = planned if self.traced == "planned" else None

        def step(state, ids):
            activations = engine.lookup(state, ids, spec=spec)
            # The gradient of half the sum of the activations' squares.
            return engine.update(state, ids, activations, spec=spec)

        batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
        ids = {
            name: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=batch)
            for name, one in shapes.items()
        }
        lowered = jax.jit(step, donate_argnums=0).lower(abstract_state(engine), ids)
        return lowered.compile().as_text()


LINES = {
    "v5p": Line(),
    "v6e": Line(target="v6e:2x2"),
    "v5p traced": Line(traced="worst"),
    "v5p traced, spec": Line(traced="planned"),
    "v5p large": Line(batch=4096, hot=20),
    "v5p D 16": Line(dim=16),
    "v5p Adam": Line(rule="Adam"),
    "v5p FTRL": Line(rule="FTRL"),
    "v5p mean": Line(combiner="mean"),
    "DLRM-v2 per chip, v5p": Line(tables=26, batch=4 * 4096, hot=8),
}
"""Names and steps; the last has about as many ids per chip as DLRM-v2 (214 per sample)."""


def measure(name):
    """Return the operations of a line's step, the bytes that it moves, and its text."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"LIBTPU_INIT_ARGS": f"{profile.FLAG}={folder}"}
        run_child(name, flags)  # it may abort once the profile is written
        plain = run_child(name, {})
        if plain.returncode:
            raise RuntimeError(f"{name}: libtpu did not compile it:\n{plain.stderr[-2000:]}")
        told = json.loads(plain.stdout.splitlines()[-1])
        return profile.read_profile(folder, told["text"]), told["moved"], told["text"]


def run_child(name, more):
    """Compile a line in a process of its own."""
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", **more}
    command = [sys.executable, __file__, "--child", name]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def stage(scope):
    """Return the part of a named scope that says which stage of the step it is."""
    known = re.search(r"(lookup|update)/[^/]+(/(route|combine|dedup|merge|rule|psum))?", scope)
    return known[0] if known else ""


def row_operations(text, dim):
    """Return the names of the operations that make rows: floats whose last dimension is D."""
    types = re.finditer(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) [\w\-]+\(", text, re.MULTILINE)
    rows = re.compile(rf"\b(?:f32|bf16)\[[\d,]*\b{dim}\]")
    return {name for name, type_ in (one.groups() for one in types) if rows.search(type_)}


def show(name, line, operations, moved, text, most):
    """Print a line's total and its most expensive operations.

    What runs only if given capacities are too small is not counted. libtpu lists equal operations
    once, so operations with an equal one there may be missing as well.
    """
    operations = [one for one in operations if "/overflow/" not in one.scope]
    rows = row_operations(text, line.dim)
    numbers = sum(one.total for one in operations if one.name not in rows)
    total = sum(one.total for one in operations)
    in_memory = moved / BYTES_PER_SECOND[line.chip] * GIGAHERTZ[line.chip] * 1e9
    print(
        f"\n{name}: {line.tables} tables of {line.rows:,} × {line.dim}, batch {line.batch} of ",
        end="",
    )
    print(
        f"{line.hot} ids, {line.rule}, {line.combiner}; {line.target}, {line.ids:,} ids per device"
    )
    print(f"  {total:,} cycles, {total / line.ids:.1f} per id, about ", end="")
    print(
        f"{total / GIGAHERTZ[line.chip] / 1e6:.2f} ms; {moved / 1e6:.1f} MB moved in memory: ",
        end="",
    )
    print(f"{in_memory / line.ids:.1f} cycles per id")
    print(f"  {numbers / line.ids:.1f} cycles per id are of numbers, all others of rows")
    print("  | cycles | per id | times | operation | stage |\n  |---|---|---|---|---|")
    for one in operations[:most]:
        cells = [f"{one.total:,}", f"{one.total / line.ids:.2f}", one.count, one.name]
        print("  | " + " | ".join(map(str, [*cells, stage(one.scope)])) + " |")


def main():
    """Measure all lines, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=LINES, help="one line")
    parser.add_argument("--most", type=int, default=12, help="operations to show of each")
    parser.add_argument("--child", choices=LINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        text, moved = LINES[args.child].compile()
        print(json.dumps({"text": text, "moved": moved}))
        return
    versions = [f"{one} {importlib.metadata.version(one)}" for one in ("jax", "libtpu")]
    print(f"{', '.join(versions)}: cycles that libtpu estimates; no TPU was there")
    for name in [args.only] if args.only else LINES:
        show(name, LINES[name], *measure(name), args.most)


if __name__ == "__main__":
    main()
