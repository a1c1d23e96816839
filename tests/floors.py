"""List what in a source file's AST breaks the architecture's rules; `test_floors.py` decides."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

PACKAGE = "tpu_embed"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40

FLOORS = {
    "_types": 0,
    "_checks": 0,
    "_snapshot": 0,
    "interrupts": 0,
    "kernels": 1,
    "optimizers": 1,
    "initializers": 1,
    "hashing": 1,
    "config": 2,
    "core": 2,
    "training": 3,
    "io": 3,
    "planning": 3,
    "nn": 3,
    "metrics": 3,
    "enqueue": 3,
    "tpu_embedding": 4,
    "__main__": 5,
    "__init__": 5,
}
"""What stands directly in `tpu_embed/` -> its floor. Imports go to the same or a lower one."""

CORE_ORDER = [
    "calls",
    "inputs",
    "structure",
    "padding",
    "weights",
    "rescale",
    "valid_ids",
    "ids",
    "collectives",
    "stack_names",
    "layout",
    "resolve",
    "describe",
    "batch_spec",
    "located",
    "batch",
    "capacity",
    "departures",
    "processes",
    "place",
    "traced",
    "intake",
    "gradients",
    "guard",
    "tables",
    "fields",
    "norms",
    "state_checks",
    "logical",
    "retrieve",
    "init",
    "dedup",
    "route",
    "combine",
    "lookup",
    "reads",
    "apply",
    "occurrences",
    "sums",
    "update",
    "jaxprs",
    "in_place",
    "engine",
    "holder",
    "touched",
    "arguments",
    "indexed_slices",
    "reach",
    "sparse_lookup",
    "joined",
    "engine_lookup",
    "taps",
    "tapped_program",
    "sparse_grad",
]
"""The files of `core/` in the order of a batch's path: each imports only files above it."""

DEVICE_WORK = (
    "jax.numpy",
    "jax.random",
    "jax.devices",
    "jax.local_devices",
    "jax.device_count",
    "jax.local_device_count",
    "jax.process_index",
    "jax.process_count",
    "jax.default_backend",
    "jax.device_put",
    "jax.make_mesh",
    "jax.config",
    "jax.distributed",
    "logging.basicConfig",
    "os.putenv",
    "os.environ",
    "print",
)
"""Calls that must not run at import (a prefix of the dotted name)."""
HARMLESS = ("jax.numpy.dtype", "jax.numpy.finfo", "jax.numpy.iinfo", "os.environ.get")


def module_name(path: PurePosixPath) -> str:
    """Return the dotted name of a file: `tpu_embed/core/ids.py` is `tpu_embed.core.ids`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: PurePosixPath, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for each module of ours that the file imports, at any depth."""
    here = path.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) + 1 - node.level]) if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            inner = [f"{stem}.{alias.name}" for alias in node.names]
            names = list(dict.fromkeys(name if name in modules else stem for name in inner))
        else:
            continue
        for name in names:
            if name.split(".")[0] == PACKAGE:
                yield node.lineno, name


def floor(module: str) -> int:
    """Return a module's floor; an unknown one is an error that names the remedy."""
    parts = module.split(".")
    first = parts[1] if len(parts) > 1 else "__init__"
    if first not in FLOORS:
        raise ValueError(f"{module} has no floor: name it in FLOORS of tests/floors.py")
    return FLOORS[first]


def core_rank(module: str) -> int:
    """Return a core module's place in the batch's path; `core` itself and config.py stand above."""
    parts = module.split(".")
    if len(parts) < 3:
        return -1
    if parts[2] not in CORE_ORDER:
        raise ValueError(f"{module} has no place: name it in CORE_ORDER of tests/floors.py")
    return CORE_ORDER.index(parts[2])


def import_faults(path: PurePosixPath, tree: ast.Module, modules: set[str]) -> list[str]:
    """List the imports that go up, or sideways where that is forbidden."""
    me = module_name(path)
    mine = floor(me)
    faults = []
    for line, other in imports(path, tree, modules):
        where = f"{path}:{line}: {me} imports {other}"
        if floor(other) > mine:
            faults.append(f"{where}, which stands on a higher floor")
        elif mine == floor(other) == 2 and other != me and core_rank(other) >= core_rank(me):
            faults.append(f"{where}, which comes later on the batch's path")
        elif mine == floor(other) == 3 and me.split(".")[1] != other.split(".")[1]:
            faults.append(f"{where}, its sibling")
    return faults


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: all but the bodies of functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            outer = [*child.decorator_list, *child.args.defaults, *child.args.kw_defaults]
            for expression in filter(None, outer):
                yield from _at_import(expression)
        elif not isinstance(child, ast.Lambda):
            yield from _at_import(child)


def _aliases(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def _starts(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def import_work(path: PurePosixPath, tree: ast.Module) -> list[str]:
    """List the calls and environment writes that would run at import."""
    aliases = _aliases(tree)
    faults = []
    for node in _at_import(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func, aliases)
            if _starts(name, DEVICE_WORK) and not _starts(name, HARMLESS):
                faults.append(f"{path}:{node.lineno}: {name} is called at import")
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if _starts(_dotted(node.value, aliases), ("os.environ",)):
                faults.append(f"{path}:{node.lineno}: the environment is written at import")
    return faults


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(node, clean=False)
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return lines - (docstring.count("\n") + 1 if docstring else 0)


def size_faults(path: PurePosixPath, source: str, tree: ast.Module) -> list[str]:
    """List the file if it is too long, and its functions that are."""
    lines = source.count("\n")
    faults = [f"{path}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return faults + [
        f"{path}:{node.lineno}: {node.name} has {length} lines without its docstring, "
        f"at most {MAX_FUNCTION_LINES}"
        for node in functions
        if (length := _length(node)) > MAX_FUNCTION_LINES
    ]


def docstring_faults(path: PurePosixPath, tree: ast.Module) -> list[str]:
    """List public things without a docstring; a method may inherit its own from a base class."""
    definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    wanted: list[tuple[str, ast.AST]] = [("the module", tree)]
    for node in tree.body:
        if isinstance(node, definition) and not node.name.startswith("_"):
            wanted.append((node.name, node))
            if isinstance(node, ast.ClassDef) and not node.bases:
                wanted += [
                    (f"{node.name}.{m.name}", m)
                    for m in node.body
                    if isinstance(m, definition) and not m.name.startswith("_")
                ]
    return [
        f"{path}:{getattr(node, 'lineno', 1)}: {name} has no docstring"
        for name, node in wanted
        if not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
