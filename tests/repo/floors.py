"""Find what in the AST of a source file breaks the rules of the architecture."""

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

PACKAGE = "tpu_embed"

_STANDING = [
    "_types _checks _jaxprs _calls _stop",
    "kernels optimizers initializers columns key_hashes ngrams processes",
    "config vocabulary storage",
    "core",
    "hashing sparse touched engine_layer",
    "training io planning nn metrics data retrieval",
    "stateful loop",
    "check __main__ __init__",
]
FLOORS = {name: floor for floor, names in enumerate(_STANDING) for name in names.split()}
"""What stands directly in `tpu_embed/` -> its floor. Imports go to the same or a lower one."""

SIBLINGS = 5
"""The floor whose packages do not import each other."""

ORDERS = {
    "core": "ids layout exchange batch place state rows lookup update engine".split(),
    "io": "store files schema commits directory quantize checkpoint delta serving".split(),
    "vocabulary": "config map batch_keys table_maps timeline vocabularies".split(),
    "loop": "step reports run fit".split(),
    "training": "replicas autodiff update optimizer interception".split(),
}
"""The rooms of a package in order: each imports only those before it."""

DEVICE_WORK = tuple(
    "jax.numpy jax.random jax.devices jax.local_devices jax.device_count jax.local_device_count "
    "jax.process_index jax.process_count jax.default_backend jax.device_put jax.make_mesh "
    "jax.config jax.distributed logging.basicConfig os.putenv os.environ print".split()
)
"""Calls that must not run at import (a prefix of the dotted name)."""
HARMLESS = ("jax.numpy.dtype", "jax.numpy.finfo", "jax.numpy.iinfo", "os.environ.get")


def module_name(path: PurePosixPath) -> str:
    """Return the dotted name of a file: `tpu_embed/core/ids.py` is `tpu_embed.core.ids`."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(
    path: PurePosixPath, tree: ast.Module, modules: set[str]
) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, where its name was looked up) for each module of ours that is imported.

    Both are the same but in `from tpu_embed.core import layout`, which looks into `tpu_embed.core`.
    """
    here = path.parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) + 1 - node.level]) if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            inner = [f"{stem}.{alias.name}" for alias in node.names]
            found = dict.fromkeys(name if name in modules else stem for name in inner)
            names = [(name, stem) for name in found]
        else:
            continue
        for name, stem in names:
            if name.split(".")[0] == PACKAGE:
                yield node.lineno, name, stem


def floor(module: str) -> int:
    """Return a module's floor; an unknown one is an error that names the remedy."""
    parts = module.split(".")
    first = parts[1] if len(parts) > 1 else "__init__"
    if first not in FLOORS:
        raise ValueError(f"{module} has no floor: name it in FLOORS of tests/repo/floors.py")
    return FLOORS[first]


def room(module: str) -> tuple[str, int]:
    """Return a module's package and the number of its room there; a package itself comes last."""
    _, package, *rest = [*module.split("."), ""]
    order = ORDERS.get(package, [])
    if not order or not rest[0]:
        return package, len(order)
    if rest[0] not in order:
        raise ValueError(f"{module} has no place: name it in ORDERS of tests/repo/floors.py")
    return package, order.index(rest[0])


def import_faults(path: PurePosixPath, tree: ast.Module, modules: set[str]) -> list[str]:
    """List the imports that go up, sideways where that is forbidden, or past a package's names."""
    me = module_name(path)
    (package, number), mine, faults = room(me), floor(me), []
    for line, other, stem in imports(path, tree, modules):
        where = f"{path}:{line}: {me} imports {other}"
        its_package, its_number = room(other)
        if floor(other) > mine:
            faults.append(f"{where}, which stands on a higher floor")
        elif package == its_package and its_number > number:
            faults.append(f"{where}, which comes later in {package}")
        elif mine == floor(other) == SIBLINGS and package != its_package:
            faults.append(f"{where}, its sibling")
        elif len(stem.split(".")) > 3 and me.split(".")[1:3] != other.split(".")[1:3]:
            faults.append(f"{where}, which is inside of a package: import from the package")
    return faults


def circles(paths: dict[PurePosixPath, ast.Module], modules: set[str]) -> list[str]:
    """Return the modules that import themselves by way of others; packages' `__init__` aside."""
    found = {
        module_name(path): {name for _, name, _ in imports(path, tree, modules)}
        for path, tree in paths.items()
        if path.name != "__init__.py"
    }
    # What imports none of the rest is on no circle. What remains is on one, or leads to one.
    while ends := [name for name, others in found.items() if not others & found.keys()]:
        found = {name: others for name, others in found.items() if name not in ends}
    return sorted(found)


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


def docstring_faults(path: PurePosixPath, tree: ast.Module) -> list[str]:
    """List public methods without a docstring of their own; of a class with bases they inherit it.

    Ruff asks for those of modules, classes and functions.
    """
    return [
        f"{path}:{method.lineno}: {node.name}.{method.name} has no docstring"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.bases and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not ast.get_docstring(method)
        if "overload" not in map(ast.unparse, method.decorator_list)
    ]
