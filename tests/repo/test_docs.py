"""Run every Python snippet of README.md and docs/, file by file, as a reader would type them.

The snippets of one file share one namespace and run in order. `<!-- no-run: reason -->` on the
line before a snippet excludes it; the reason names the hardware or data that it needs.
"""

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<no_run><!-- no-run: .+ -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def snippets(text):
    """Yield the runnable snippets, each after as many empty lines as precede it in the page."""
    for match in FENCE.finditer(text):
        if not match["no_run"]:
            yield "\n" * text.count("\n", 0, match.start("code")) + match["code"]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
@pytest.mark.quick(3)
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    left_out = text.count("<!-- no-run: ")
    assert len(list(snippets(text))) + left_out == len(re.findall("^```python$", text, re.M))
    with jax.numpy_dtype_promotion("standard"):  # a reader's; optax needs it, too
        namespace = {"__name__": "__page__"}
        for code in snippets(text):
            exec(compile(code, str(page), "exec"), namespace)


def test_a_parquet_file_becomes_a_served_model_in_35_lines():
    """`test_page` runs them; here they must be a whole program, which uses no other snippet."""
    page = (ROOT / "docs/from-your-data.md").read_text()
    (program,) = [code for code in snippets(page) if "pq.ParquetFile(path)" in code]
    assert len([line for line in program.splitlines() if line.strip()]) <= 35
    calls = ("hash_ids(", "fit(", "directory=", "export_model(", "load_")
    assert all(call in program for call in calls)
    undefined_names = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-"]
    subprocess.run(undefined_names, input=program, text=True, check=True)


PARTS = "check data initializers io loop metrics nn optimizers planning retrieval training".split()
NOT_SHOWN = {  # modules, names shown under their own module, names for our other packages
    "tpu_embed": "RowIdInitializer ShardInfo initializers optimizers training",
    "tpu_embed.initializers": "check resolve wants_shard_info",
    "tpu_embed.optimizers": "LearningRateKind OptaxOptimizer SlotShape TableOptimizer "
    "as_table_optimizer learning_rate_kind",
}


@functools.cache
def shown():
    """Return the names on the pages of the reference."""
    pages = [path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md"))]
    return set(re.findall(r"^::: (.+)$", "\n".join(pages), re.MULTILINE))


def test_reference_shows_names_that_there_are():
    index = (ROOT / "docs/reference.md").read_text()
    assert set(re.findall(r"\]\[(.+?)\]", index)) == shown()
    for module, _, name in (path.rpartition(".") for path in shown()):
        found = importlib.import_module(module)
        assert hasattr(found, name), f"{module}.{name}"
        assert name in getattr(found, "__all__", [name]), f"{module}.{name} is not public"


@pytest.mark.parametrize("module", ["tpu_embed", *(f"tpu_embed.{name}" for name in PARTS)])
def test_reference_shows_every_public_name(module):
    names = set(importlib.import_module(module).__all__)
    for name in names.difference(NOT_SHOWN.get(module, "").split()):
        # `planning.plan` is a function and, for mkdocstrings, the module that it is in.
        paths = {f"{module}.{name}", f"{module}.{name}.{name}", f"tpu_embed.{name}"}
        assert paths & shown(), name


def test_pages_for_users_name_no_class_that_they_cannot_look_up():
    """What is not in the reference belongs to the page about the inside of the package."""
    sources = "\n".join(path.read_text() for path in (ROOT / "tpu_embed").rglob("*.py"))
    inside = set(re.findall(r"^class ([A-Z]+[a-z]+[A-Z]\w*)", sources, re.MULTILINE))
    for page in (ROOT / "docs/reference").glob("*.md"):
        inside -= set(re.findall(r"\w+", page.read_text()))
    assert len(inside) > 80
    for page in PAGES:
        named = inside & {*re.findall(r"\w+", page.read_text())}
        assert page.name == "architecture.md" or not named, page


STAGES = "ids,batch,exchange,lookup,activations,your model,gradients,update,state".split(",")


def test_the_diagram_and_the_pictures_name_the_stages():
    diagram = (ROOT / "tpu_embed/__init__.py").read_text().split('"""')[1]
    assert all(re.search(rf"\b{name}\b", diagram) for name in STAGES)
    pictures = [ROOT / f"docs/images/path-{scheme}.svg" for scheme in ("light", "dark")]
    light, dark = (path.read_text() for path in pictures)
    assert re.findall('<text class="stage"[^>]*>(.*)</text>', light) == STAGES
    assert light != dark
    assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
    for page in ("README.md", "docs/index.md"):
        assert all(path.name in (ROOT / page).read_text() for path in pictures)


def undonated(code):
    """Yield the lines where what calls `engine.update` is jitted without donating anything."""
    tree = ast.parse(code)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    jits = [(how, function) for function in functions.values() for how in function.decorator_list]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    jits += [(call, functions.get(getattr(call.args[0], "id", ""), call.args[0])) for call in calls]
    for jit, function in jits:
        text = ast.unparse(jit)
        is_bare = re.match(r"(functools\.partial\()?\w+\.jit\b", text) and "donate" not in text
        if is_bare and re.search(r"engine\.update\(|fused_value_and_grad", ast.unparse(function)):
            yield jit.lineno


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda p: str(p.relative_to(ROOT)))
def test_jitted_updates_donate(page):
    """Otherwise every step copies the tables."""
    text = page.read_text()
    codes = [match["code"] for match in FENCE.finditer(text)] if page.suffix == ".md" else [text]
    for code in codes:
        lines = [code.splitlines()[number - 1] for number in undonated(code)]
        assert not [line for line in lines if "# not donated" not in line]


NOT_DONATED = [
    "@jax.jit\ndef step(s):\n    return engine.update(s)",
    "@functools.partial(jax.jit, static_argnums=1)\ndef f(s):\n    return engine.update(s)",
    "step = jax.jit(lambda s: engine.update(s))",
]


@pytest.mark.parametrize("code", NOT_DONATED)
def test_updates_that_do_not_donate_are_found(code):
    assert len(list(undonated(code))) == 1
    assert not list(undonated(code.replace("engine.update", "engine.lookup").replace("fused", "x")))
