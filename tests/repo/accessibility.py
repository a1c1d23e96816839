"""Look at every page of the site with axe in Chromium: light and dark, wide and narrow.

    python tests/repo/accessibility.py

It prints what axe calls serious or critical, pages that are wider than the window, requests that
leave the site, and a search that finds nothing; if there is any, the exit status is 1. It needs
the extra `accessibility`, and Chromium: the one that `CHROMIUM` names, or else the first of
`chromium` and `google-chrome` on the path.
"""

import collections
import functools
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
SCHEMES = "light", "dark"
WIDTHS = 1280, 390
GRAVE = "serious", "critical"
SEARCHED = "checkpoint"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *args):
        pass


def serve():
    """Serve the site on a free port of this machine, in a thread."""
    handler = functools.partial(Quiet, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def find_chromium():
    """Return the path of the browser.

    Raises:
      SystemExit: there is none.
    """
    names = [os.environ["CHROMIUM"]] if "CHROMIUM" in os.environ else ["chromium", "google-chrome"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        sys.exit(f"accessibility: no browser named {' or '.join(names)}; CHROMIUM=path names one")
    return found


def findings(page, axe):
    """Yield what is wrong with the page that is shown: a line for each rule and reason."""
    places = collections.defaultdict(list)
    for violation in axe.run(page).response["violations"]:
        for node in violation["nodes"] if violation["impact"] in GRAVE else ():
            why = " ".join(each["message"] for each in node["any"] + node["all"])
            where = " ".join(map(str, node["target"]))
            places[violation["id"], violation["impact"], why].append(where)
    for (rule, impact, why), found in places.items():
        yield f"{rule} ({impact}), {len(found)} times, first at {found[0]}: {why}"
    width = page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
    if width > 0:
        yield f"{width} pixels wider than the window"


def search(page, address):
    """Search for a word, as a reader does; return what is wrong, or None."""
    page.goto(address)
    page.keyboard.press("/")  # opens it, whatever the width
    page.keyboard.type(SEARCHED)
    try:
        page.locator(".md-search-result__link").first.wait_for()
    except Exception as error:  # whose class is in a package that may not be there
        return f"search for {SEARCHED!r} finds nothing: {str(error).splitlines()[0]}"
    return None


def look(browser, address, names):
    """Yield what is wrong with any page, a line for each; print how far it is."""
    from axe_playwright_python.sync_playwright import Axe

    axe, outside = Axe(), collections.Counter()

    def note(request):
        if not request.url.startswith((address, "data:", "blob:")):
            outside[request.url] += 1

    for scheme in SCHEMES:
        with browser.new_context(color_scheme=scheme) as context:
            context.on("request", note)
            page = context.new_page()
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                for name in names:
                    page.goto(address + name)
                    for finding in findings(page, axe):
                        yield f"{name} {scheme} {width}: {finding}"
                print(f"{len(names)} pages, {scheme}, {width} pixels", file=sys.stderr)
                wrong = search(page, address + "index.html")
                if wrong is not None:
                    yield f"index.html {scheme} {width}: {wrong}"
    yield from (f"{count} requests leave the site: {url}" for url, count in outside.items())


def main():
    """Look at all pages; return how many findings there are, at most 1."""
    names = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
    if not names:
        sys.exit(f"accessibility: no page in {SITE}; `make docs` first")
    from playwright.sync_api import sync_playwright

    address = f"http://127.0.0.1:{serve().server_port}/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium())
        count = 0
        for finding in look(browser, address, names):
            print(finding, flush=True)
            count += 1
        browser.close()
    print(f"{count} findings on {len(names)} pages")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
