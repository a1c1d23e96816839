"""Run every Python snippet of README.md and docs/, file by file, as a reader would type them.

The snippets of one file share one namespace and run in order. `<!-- no-run: reason -->` on the
line before a snippet excludes it; the reason names the hardware or data that it needs.
"""

import re
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


def run(name, text):
    namespace = {"__name__": "__page__"}
    with jax.numpy_dtype_promotion("standard"):  # a reader's; optax needs it, too
        for code in snippets(text):
            exec(compile(code, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(str(page), page.read_text())


PAGE = """
```python
x = 1
```
<!-- no-run: needs a TPU -->
```python
x = 2
```
```
x = 3
```
```python
y = x + 1
```
"""


def test_runner_shares_names_and_leaves_out():
    namespace = run("page", PAGE)
    assert (namespace["x"], namespace["y"]) == (1, 2)


def test_runner_fails_at_the_pages_line():
    with pytest.raises(ZeroDivisionError) as error:
        run("page", PAGE.replace("y = x + 1", "1 / 0"))
    assert error.traceback[-1].lineno == PAGE.splitlines().index("y = x + 1")
