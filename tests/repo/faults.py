"""Put faults into the package one at a time, and count those that the tests find.

A fault is a small change of one expression: `<` becomes `<=`, `+` becomes `-`, a 1 becomes a 2, a
slice loses its bound, a sign or a `not` goes, a call whose result nobody uses is dropped. Faults
are drawn from the syntax trees of `core`, `kernels`, `optimizers` and `vocabulary` with a fixed
seed; `faults_made.py` adds faults that were once made and mended. A coverage file with a context
per test says which tests run the changed line: forty of them, one of each test function first, are
run against a copy of the tree; if none fails, three hundred more, and the tests that start
processes, which coverage does not see.

Run by hand; it takes hours. First the tests, with `coverage` and `pytest-cov` installed:

    CI=1 pytest -m "not whole" -n 2 --cov=tpu_embed --cov-branch --cov-context=test --cov-report=
    python tests/repo/faults.py --coverage .coverage --seed 27 --count 100 --workers 2

Input: the tree of this repository. Output: a line per fault, and how many were found.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import copy
import dataclasses
import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core", "kernels", "optimizers", "vocabulary")
STARTERS = (
    "tests/test_processes.py",
    "tests/test_living_processes.py",
    "tests/data/test_prefetch_processes.py",
)
"""Tests that start processes of their own."""
FEW, MANY, SECONDS = 40, 340, 1500

_SWAPPED = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
]
FLIPPED = dict(_SWAPPED) | {second: first for first, second in _SWAPPED}
FLIPPED |= {ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
"""Class of an operator -> class of the operator that replaces it."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One changed file.

    Attributes:
      path: the file, from the root of the repository.
      line: the line of the change.
      what: the change in words.
      source: the file's new text.
    """

    path: str
    line: int
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


# -- drawing faults --------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a node could become, with the name of the kind of change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            yield "operator", ast.Compare(node.left, [FLIPPED[type(op)]()], node.comparators)
        case ast.BinOp(op=op) if type(op) in FLIPPED and not _is_text(node):
            yield "operator", ast.BinOp(node.left, FLIPPED[type(op)](), node.right)
        case ast.BoolOp():
            yield "operator", ast.BoolOp(FLIPPED[type(node.op)](), node.values)
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "sign", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield "index", ast.Constant(node.value + 1)
        case ast.Slice(lower=ast.AST()):
            yield "bound", ast.Slice(None, node.upper, node.step)
        case ast.Slice(upper=ast.AST()):
            yield "bound", ast.Slice(node.lower, None, node.step)
        case ast.Expr(value=ast.Call()):
            yield "dropped call", ast.Pass()


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(n, (ast.JoinedStr, ast.Constant)) and _is_str(n) for n in ast.walk(node))


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _places(tree: ast.Module) -> list[tuple[ast.AST, str, int | None]]:
    """List the places of a module where a change may stand: parent, field, number in a list.

    Annotations, decorators, error messages and what runs at import are left out: there a change is
    a word, or fails every test.
    """
    found: list[tuple[ast.AST, str, int | None]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
                continue
            within = inside or isinstance(node, ast.FunctionDef)
            several = isinstance(value, list)
            for i, one in enumerate(value if several else [value]):
                if isinstance(one, ast.AST):
                    if within and any(changes(one)):
                        found.append((node, field, i if several else None))
                    visit(one, within)

    visit(tree, False)
    return found


def _mutated(path: Path, number: int) -> Fault:
    """Return the fault at one of the places of a file, by its number."""
    tree = ast.parse(path.read_text())
    parent, field, i = _places(tree)[number]
    value = getattr(parent, field)
    old = value if i is None else value[i]
    ((kind, new),) = changes(old)
    was, new = ast.unparse(copy.deepcopy(old)), ast.copy_location(new, old)
    if i is None:
        setattr(parent, field, new)
    else:
        value[i] = new
    what = f"{kind}: {was} → {ast.unparse(new)}"
    line = getattr(old, "lineno", getattr(parent, "lineno", 0))
    text = ast.unparse(ast.fix_missing_locations(tree))
    return Fault(str(path.relative_to(ROOT)), line, what.replace("\n", " "), text)


def drawn(seed: int, count: int) -> list[Fault]:
    """Draw faults, each place with the same probability."""
    files = sorted(f for room in ROOMS for f in (ROOT / "tpu_embed" / room).rglob("*.py"))
    places = [(f, n) for f in files for n in range(len(_places(ast.parse(f.read_text()))))]
    return [_mutated(f, n) for f, n in random.Random(seed).sample(places, count)]


def made() -> list[Fault]:
    """Return the faults of `faults_made.py`."""
    from faults_made import MADE

    result = []
    for path, old, new, what in MADE:
        text = (ROOT / path).read_text()
        if text.count(old) != 1:
            raise ValueError(f"faults_made: {what!r}: the text stands {text.count(old)} times")
        line = text[: text.index(old)].count("\n") + 1
        result.append(Fault(path, line, what, text.replace(old, new)))
    return result


# -- choosing tests --------------------------------------------------------------------------------


def covering(coverage: Path, fault: Fault, span: int = 3) -> list[str]:
    """Return the tests that run a line near the fault, one of each test function first."""
    with sqlite3.connect(coverage) as data:
        query = """
            select distinct context.context from arc
            join file on file.id = arc.file_id join context on context.id = arc.context_id
            where file.path like ? and (arc.tono between ? and ? or arc.fromno between ? and ?)"""
        lines = [fault.line, fault.line + span] * 2
        rows = data.execute(query, ["%" + fault.path, *lines]).fetchall()
    names = sorted({row[0].rpartition("|")[0] for row in rows} - {""})
    random.Random(0).shuffle(names)
    # Tests of the package's own folder come first: they say most of it.
    folder = str(Path(fault.path).parent).replace("tpu_embed", "tests", 1)
    names.sort(key=lambda name: not name.startswith(folder))
    functions = collections.defaultdict(list)
    for name in names:
        functions[name.partition("[")[0]].append(name)
    rounds = itertools.zip_longest(*functions.values())
    found = [name for one in rounds for name in one if name is not None]
    few, rest = found[:FEW], found[FEW:]
    # Then all of the folder, whatever their parameters, before others.
    found = [*few, *sorted(rest, key=lambda name: not name.startswith(folder))]
    while not (ROOT / folder).is_dir():
        folder = str(Path(folder).parent)
    return found or [folder]  # what runs at import has no test of its own


def fails(tree: Path, tests: Sequence[str]) -> str | None:
    """Return the first test that fails in a tree, or None if all pass."""
    if not tests:
        return None
    names = tree / "build" / "names.txt"
    names.write_text("\n".join(tests))
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider -p no:xdist".split()
    compiled = ROOT / "build" / "xla_faults" / tree.name  # programs that a fault does not change
    env = {**os.environ, "PYTHONPATH": str(tree), "CI": "1", "JAX_COMPILATION_CACHE_DIR": compiled}
    try:
        # pytest reads arguments, one a line, from a file whose name follows an @.
        run = subprocess.run(
            [*command, "-m", "not whole", f"@{names}"],
            cwd=tree, env=env, timeout=SECONDS, text=True, capture_output=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    if run.returncode in (0, 5):
        return None
    if run.returncode == 4:
        raise RuntimeError(f"pytest: expected tests that exist, got {tests[:3]}: {run.stderr}")
    lines = [x for x in run.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"exit status {run.returncode}: {run.stderr[-200:]}"


# -- running ---------------------------------------------------------------------------------------


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the repository, with its compiled kernels, to a folder, and return its root."""
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".coverage*")
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    (folder / "build").mkdir()
    return folder


def judge(tree: Path, coverage: Path, fault: Fault) -> str | None:
    """Return what finds a fault, or None."""
    path = tree / fault.path
    before = path.read_text()
    path.write_text(fault.source)
    try:
        tests = covering(coverage, fault)
        return fails(tree, tests[:FEW]) or fails(tree, [*tests[FEW:MANY], *STARTERS])
    finally:
        path.write_text(before)


def main() -> None:
    """Draw faults, run tests against each, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--coverage", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--only-made", action="store_true", help="those of faults_made.py alone")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    faults = [*made(), *([] if options.only_made else drawn(options.seed, options.count))]
    trees, numbers = threading.local(), itertools.count()
    found = []

    with tempfile.TemporaryDirectory() as folder:

        def one(fault: Fault) -> None:
            if not hasattr(trees, "mine"):
                trees.mine = copy_of_the_tree(Path(folder) / f"tree{next(numbers)}")
            begin = time.monotonic()
            by = judge(trees.mine, options.coverage.resolve(), fault)
            found.append(by is not None)
            verdict = f"found   {by}" if by else "SURVIVED"
            print(f"{time.monotonic() - begin:5.0f} s  {fault}\n         {verdict}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(one, faults))
    print(f"{sum(found)} of {len(found)} faults found")


if __name__ == "__main__":
    main()
