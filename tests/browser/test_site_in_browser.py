"""The documentation site in a real browser, opened from the disk (`make docs browser` installs what it needs)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed; run `make browser`"
)
pytest.importorskip("sphinx", reason="Sphinx is not installed; run `make docs`")
pytest.importorskip("latex2mathml", reason="latex2mathml is not installed; run `make docs`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; run `make browser`"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SCRIPT = Path(__file__).parents[2] / "docs/make_site.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, where a warning is an error."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def page(site: Path) -> Iterator[Any]:
    """A page that remembers what it asked for and what went wrong."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1400, "height": 900})
        opened.asked, opened.errors = [], []
        opened.on("request", lambda request: opened.asked.append(request.url))
        opened.on("pageerror", lambda error: opened.errors.append(str(error)))
        yield opened
        browser.close()


def test_search_finds_a_method_from_a_file_and_nobody_is_asked(page: Any, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("Control+K")
    page.keyboard.type("control variates")
    page.keyboard.press("Enter")
    page.wait_for_selector("#search-results li a", timeout=30_000)

    assert page.url.startswith("file:")
    assert "SCAFFOLD" in page.locator("#search-results li a").all_inner_texts()
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    assert page.errors == []


def test_no_page_refers_to_another_host_for_what_it_loads(site: Path) -> None:
    loads = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["'](?:https?:)?//""")

    assert [
        str(path) for path in site.rglob("*.html") if loads.search(path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize(
    "name", ["index", "methods/fedevi", "reference/commands", "reference/api", "gallery"]
)
def test_pages_fit_the_width(page: Any, site: Path, name: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((site / f"{name}.html").as_uri())

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_equations_are_drawn_by_the_browser(page: Any, site: Path) -> None:
    page.goto((site / "methods/fedprox.html").as_uri())
    formula = page.locator("div.formula math").first

    assert formula.locator("mfrac").count() == 1
    assert formula.bounding_box()["height"] > 20
