"""What a training step should cost on TPUs that are not there, per id: cycles and bytes.

    PYTHONPATH=build/libtpu:. JAX_PLATFORMS=cpu python benchmarks/tpu_cycles.py [--only NAME]

Each line compiles a step with libtpu. On v5p and v6e a second process compiles it again, for the
TensorCore's cycles by operation (`tpu_embed.planning.profile`) and the SparseCores' programs. On
other chips libtpu aborts before that profile is whole, so only operations that move rows are shown,
with the bytes that they move. At the end stands a table of all lines, in Markdown.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from tpu_embed import FeatureConfig, RaggedIds, TableConfig, optimizers
from tpu_embed.planning import Topology
from tpu_embed.planning.compiled import compile_for, estimate
from tpu_embed.planning.profile import profile_step, scopes_of

RULES = {
    "Adagrad": optimizers.Adagrad(0.1),
    "Adam": optimizers.Adam(0.1),
    "FTRL": optimizers.FTRL(0.1),
}
DLRM = runpy.run_path(str(Path(__file__).parents[1] / "configs/dlrm_dcnv2.py"))["CONFIG"]
PUBLISHED = "66 ms: jax-tpu-embedding on 16 v7x chips, measured (torchrec #4597)"
HEADER = (
    *("line", "ids per device", "cycles per id", "bytes per id", "cycles of these bytes"),
    *("moved ÷ must", "SparseCore bundles", "estimate, ms"),
)


@dataclasses.dataclass(frozen=True)
class Line:
    """One step: tables of so many rows, and of so many ids per bag; a bag of each per example."""

    target: str = "v5p:2x2x1"
    tables: tuple[tuple[int, int], ...] = ((1_000_000, 10),) * 8
    dim: int = 128
    batch: int = 1024
    rule: str = "Adagrad"
    combiner: str = "sum"
    weighted_bags: bool = False
    placed: bool = True
    exchange_dtype: str | None = None
    dtype: str = "float32"
    rounding: str = "nearest"
    published: str = ""

    @property
    def ids(self) -> int:
        """Ids of one device."""
        return self.batch * sum(hot for _, hot in self.tables) // Topology(self.target).devices

    def compile(self):
        """Return the compiled step."""
        options = {"combiner": self.combiner, "dtype": self.dtype, "rounding": self.rounding}
        tables = [
            TableConfig(rows, self.dim, name=f"t{i}", placement="auto", **options)
            for i, (rows, _) in enumerate(self.tables)
        ]
        features = {table.name: FeatureConfig(table) for table in tables}
        draw = np.random.default_rng(0)
        batch = {f"t{i}": self.bags(rows, hot, draw) for i, (rows, hot) in enumerate(self.tables)}
        rule, options = RULES[self.rule], {"exchange_dtype": self.exchange_dtype}
        return compile_for(self.target, features, rule, batch, placed=self.placed, **options)

    def bags(self, rows, hot, draw):
        """Return a feature's batch: shapes, or weighted bags of 0 to 2·hot ids, hot on average."""
        if not self.weighted_bags:
            return jax.ShapeDtypeStruct((self.batch, hot), np.int32)
        lengths = draw.integers(0, 2 * hot + 1, self.batch // 2)
        splits = np.concatenate([[0], lengths, 2 * hot - lengths]).cumsum()
        values = draw.integers(0, rows, splits[-1])
        return RaggedIds(values, splits, draw.random(len(values), np.float32))


def rival(target):
    """Return DLRM-v2 with 4,096 samples of 214 ids per chip, its tables cut to 1e6 rows."""
    rows = [min(rows, 1_000_000) for rows in DLRM.rows]
    tables = tuple(zip(rows, DLRM.hots, strict=True))
    return Line(target, tables, batch=16 * 4096, published=PUBLISHED)


LINES = {
    "v5p": Line(),
    "v6e": Line("v6e:2x2"),
    "v5p large": Line(tables=((1_000_000, 20),) * 8, batch=4096),
    "v5p D 16": Line(dim=16),
    "v5p Adam": Line(rule="Adam"),
    "v5p FTRL": Line(rule="FTRL"),
    "v5p mean": Line(combiner="mean"),
    "v5p ragged, weighted": Line(weighted_bags=True),
    "v5p, exchange in bfloat16": Line(exchange_dtype="bfloat16"),
    "v5p, tables and exchange in bfloat16": Line(
        exchange_dtype="bfloat16", dtype="bfloat16", rounding="stochastic"
    ),
    "v6e, exchange in bfloat16": Line("v6e:2x2", exchange_dtype="bfloat16"),
    "tpu7x, exchange in bfloat16": Line("tpu7x:2x2x1", exchange_dtype="bfloat16"),
    "v5p traced": Line(placed=False),
    "v4": Line("v4:2x2x1"),
    "v5e": Line("v5e:2x2"),
    "tpu7x": Line("tpu7x:2x2x1"),
    "DLRM-v2 as the rival ran it, tpu7x": rival("tpu7x:2x2x4"),
    "DLRM-v2 as the rival ran it, v5p": rival("v5p:2x2x4"),
}


def measure(name, most):
    """Print what a line costs, and return its row of the table."""
    line = LINES[name]
    clock = Topology(line.target).chip.clock
    compiled = line.compile()
    profile, kernels = None, []
    if clock is not None:
        with tempfile.TemporaryDirectory() as folder:
            # The child's libtpu reads the flag, and adds what `profile_step` asks for.
            os.environ["LIBTPU_INIT_ARGS"] = f"--xla_sc_dump_bundles_to={folder}"
            profile = profile_step([sys.executable, __file__, "--child", name], compiled.text)
            kernels = read_kernels(folder, compiled.text)
    found = estimate(compiled, profile)
    print(f"\n{name}: {describe(line)}\n{found.explain()}")
    if line.published:
        print(f"  published    {line.published}")
    show_rows(compiled)
    if profile is not None:
        show_operations(profile, line, most)
        show_kernels(kernels)
    return [name, f"{line.ids:,}", *figures(line, compiled, found, profile, kernels, clock)]


def describe(line):
    """Return a line's step in words."""
    ids = sum(hot for _, hot in line.tables)
    bags = "weighted bags" if line.weighted_bags else "bags"
    return (
        f"{line.target}, {len(line.tables)} tables of up to {max(line.tables)[0]:,} × {line.dim}, "
        f"batch {line.batch:,} of {ids} ids in {bags}, {line.rule}, {line.combiner}"
    )


def figures(line, compiled, found, profile, kernels, clock):
    """Return the cells of the table that are figures per id."""
    must = sum(compiled.plan.moved.values())
    cells = [f"{found.moved / line.ids:,.0f}", "–", f"{found.moved / must:.2f}", "–"]
    cycles = "–"
    if profile is not None:
        lost = f" + {profile.missing} op." if profile.missing else ""
        cycles = f"{profile.cycles / line.ids:.1f}{lost}"
        cells[1] = f"{found.bounds['memory'] * clock * 1e9 / line.ids:.1f}"
        cells[3] = f"{sum(one.bundles for one in kernels):,}"
    return [cycles, *cells, f"{found.seconds * 1e3:.2f}"]


def show_rows(compiled):
    """Print the operations that move rows, and the bytes that they move."""
    print("  | operation | times | MB moved |\n  |---|---|---|")
    for name, moved in sorted(compiled.moved.items(), key=lambda item: -item[1]):
        print(f"  | {name} | {compiled.operations[name]} | {moved / 1e6:.1f} |")


def show_operations(profile, line, most):
    """Print the most expensive operations of the TensorCore."""
    print("\n  | cycles | per id | times | operation | stage |\n  |---|---|---|---|---|")
    for one in profile.operations[:most]:
        cells = [f"{one.total:,}", f"{one.total / line.ids:.2f}", one.count, one.name]
        print("  | " + " | ".join(map(str, [*cells, stage(one.scope)])) + " |")


def show_kernels(kernels):
    """Print the programs of the SparseCores."""
    print(
        "\n  | SparseCore kernel | stage | bundles | of its innermost loops |\n  |---|---|---|---|"
    )
    for one in kernels:
        kernel = one.scope.split("/")[-2] if "/" in one.scope else ""
        loops = ", ".join(map(str, one.loops))
        print(f"  | {kernel} | {stage(one.scope)} | {one.bundles} | {loops} |")


SECTION = re.compile(r"^tec\n(.*?)(?=^[a-z]+\n|\Z)", re.DOTALL | re.MULTILINE)
LABEL = re.compile(r"^(?P<label>\.LBB\w+):")
BUNDLE = re.compile(r"^0x[0-9a-f]+: \{")
BRANCH = re.compile(r"\bsbr\.rel .*?(?P<label>\.LBB\w+)-")
DELAY = 2
"""Bundles after a branch that run before it is taken."""


class Kernel(NamedTuple):
    """The program that a kernel runs on each vector subcore of the SparseCores.

    A bundle is what a subcore starts in one cycle; `loops` has those of each innermost loop. How
    often a loop runs, and how long a bundle waits for a DMA, is not in the program.
    """

    scope: str
    bundles: int
    loops: list[int]


def read_kernels(directory, text):
    """Return the programs of vector subcores that libtpu wrote, in the order of their names."""
    scopes, found = scopes_of(text), []
    for path in sorted(Path(directory).glob("*_bundles.txt")):
        # NAME_MICROSECONDS_bundles.txt. A file without a section `tec` has no vector program.
        section = SECTION.search(path.read_text())
        if section:
            scope = scopes.get(path.name.rsplit("_", 2)[0], "")
            found.append(Kernel(scope, *bundles_of(section[1])))
    return found


def bundles_of(section):
    """Return how many bundles a program has, and each of its innermost loops.

    `.LBB0_1:`, bundle, bundle with a branch to `.LBB0_1`, two bundles that run before it is taken:
    a loop of four bundles.
    """
    count, starts, loops = 0, {}, []
    for line in section.splitlines():
        label, branch = LABEL.match(line), BRANCH.search(line)
        if label:
            starts[label["label"]] = count
        count += bool(BUNDLE.match(line))
        if branch and branch["label"] in starts:  # its bundle is the last one counted
            loops.append((starts[branch["label"]], count + DELAY))
    inner = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    ]
    return count, [b - a for a, b in inner]


def stage(scope):
    """Return the part of a named scope that says which stage of the step it is."""
    known = re.search(r"(lookup|update)/[^/]+(/(route|combine|dedup|merge|rule|psum))?", scope)
    return known[0] if known else ""


def main():
    """Measure all lines, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=LINES, help="one line")
    parser.add_argument("--most", type=int, default=12, help="operations to show of each")
    parser.add_argument("--child", choices=LINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        LINES[args.child].compile()
        return
    versions = [f"{one} {importlib.metadata.version(one)}" for one in ("jax", "libtpu")]
    print(f"{', '.join(versions)}: estimates by libtpu's compiler; no TPU was there")
    rows = [measure(name, args.most) for name in ([args.only] if args.only else LINES)]
    print("\n| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
