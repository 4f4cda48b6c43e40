"""The report in a real browser: Debian's chromium, driven by Playwright (`make browser` installs both).

Skipped, with the reason, where one of them is missing.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run, settings
from PIL import Image, ImageStat

import wardround as wr
from wardround.reporting import write_report
from wardround.reporting.live_view import serve
from wardround.storage import StoredTensors, save_tensors

playwright = pytest.importorskip(
    "playwright.sync_api", reason="Playwright is not installed; run `make browser`"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; run `make browser`"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

VOLUMES = {"phantom": {"hospitals": 2, "dimensions": 3, "size": 16, "cases": 8}}
EVIL = "</script><img src=x onerror=\"document.title='broken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: Any) -> Path:
    """Two runs over volumes; a case with a hostile name."""
    folder = tmp_path_factory.mktemp("browser")
    for method in ("fedavg", "local"):
        run(
            folder / method,
            name=method,
            data=VOLUMES,
            model={"name": "unet3d", "base_filters": 2, "levels": 2},
            method={"name": method},
            evaluate={"metrics": ["dice", "hd95"], "overlays": 3, "cross_site": True},
        )
    path = folder / "fedavg/clients/north/pictures.safetensors"
    stored = StoredTensors(path)
    names = json.loads(stored.metadata["names"])
    names[0] = EVIL
    tensors = {key: stored[key] for key in stored}
    save_tensors(path, tensors, {**stored.metadata, "names": json.dumps(names)})
    return write_report([folder / "fedavg", folder / "local"], folder / "report.html")


class Opened:
    """A page with everything it complained of and asked for."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    with Opened(browser, report.as_uri(), viewport={"width": 1280, "height": 900}) as found:
        yield found


def first_figure(page: Any) -> Any:
    return page.locator("article:not([hidden]) figure.case").first


def test_nothing_is_complained_of_and_nobody_is_asked(opened: Opened, report: Path) -> None:
    opened.page.wait_for_timeout(300)

    assert opened.complaints == []
    others = [url for url in opened.requests if not url.startswith(("data:", report.as_uri()))]
    assert others == []


def test_a_hostile_name_is_only_text(opened: Opened) -> None:
    assert "wardround" in opened.page.title() and "broken" not in opened.page.title()
    assert opened.page.locator("img").count() == 0
    assert opened.page.get_by_text("<img").count() >= 1


def test_the_slider_moves_the_slice(opened: Opened) -> None:
    figure = first_figure(opened.page)
    strip, slider = figure.locator(".strip-image").first, figure.locator("input[type=range]")
    slider.scroll_into_view_if_needed()
    before, seen = strip.get_attribute("y"), figure.locator(".scan").first.screenshot()
    slider.focus()
    for _ in range(3):
        opened.page.keyboard.press("ArrowLeft")

    assert strip.get_attribute("y") != before
    assert figure.locator(".scan").first.screenshot() != seen
    place = int(slider.input_value()) + 1
    assert (
        figure.locator("output").inner_text()
        == f"slice {place} of 16"
        == slider.get_attribute("aria-valuetext")
    )
    assert figure.locator(".scan").first.locator("g.slice:not(.off)").count() == 1


def test_outlines_can_be_hidden(opened: Opened) -> None:
    outline = opened.page.locator("article:not([hidden]) .slice:not(.off) path.outline.truth").first
    box = opened.page.locator("article:not([hidden]) input[data-outline=truth]").first

    assert outline.is_visible()
    box.uncheck()
    assert not outline.is_visible()


def test_tables_sort_by_click_and_by_keyboard(opened: Opened) -> None:
    table = opened.page.locator("table.sortable").first
    head = table.locator("thead th").nth(1)

    def column() -> list[float]:
        return [float(text.split()[0]) for text in table.locator("tbody td:nth-child(2)").all_inner_texts()]

    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert column() == sorted(column(), reverse=True)
    head.locator("button").focus()
    opened.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    assert column() == sorted(column())
    assert "ascending" in opened.page.locator("#told").inner_text()


def test_one_run_is_shown_at_a_time(opened: Opened) -> None:
    page = opened.page

    assert page.locator("article.run:visible").count() == 1
    page.locator(".picker input").nth(1).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert (
        page.locator("article.run:visible").get_attribute("id")
        == page.locator(".picker input:checked").input_value()
    )


def test_values_appear_under_the_pointer(opened: Opened) -> None:
    band = opened.page.locator(".band").first
    band.scroll_into_view_if_needed()
    band.hover(force=True)

    assert "round 1" in opened.page.locator("#tip").inner_text()


def test_what_to_do_next_is_in_the_contents_and_the_bar_has_numbers(opened: Opened) -> None:
    opened.page.locator("nav a", has_text="What to do next").click()

    assert opened.page.locator("#r0-next li").first.is_visible()
    key = opened.page.locator("article:not([hidden]) .scale-key").first.inner_text().split("\n")
    assert "confident 0" in key[0] and "1 even guess" in key[-1]


def test_colours_are_shown_and_planes_are_named(browser: Any, report: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(report.parent / "local", folder)
    path = folder / "clients/north/pictures.safetensors"
    stored = StoredTensors(path)
    tensors = {key: stored[key] for key in stored}
    for key in [key for key in tensors if key.endswith("/image")]:
        grey = tensors[key]
        tensors[key] = torch.stack([grey.clamp_min(120), grey // 8, grey // 8], dim=-1)  # red
    facts = [{**entry, "plane": "axial"} for entry in json.loads(stored.metadata["cases"])]
    save_tensors(path, tensors, {**stored.metadata, "cases": json.dumps(facts)})
    page = write_report([folder], tmp_path / "report.html")
    with Opened(browser, page.as_uri()) as shown:
        figure = shown.page.locator("figure.case", has_text="north-").first
        figure.locator("input[type=range]").focus()
        shown.page.keyboard.press("ArrowLeft")
        red, green, _ = (
            Image.open(io.BytesIO(figure.locator(".scan").first.screenshot())).convert("RGB").split()
        )

        assert figure.locator("output").inner_text().startswith("axial slice ")
        assert ImageStat.Stat(red).mean[0] > 60 + ImageStat.Stat(green).mean[0]
        assert shown.complaints == []


def test_the_picture_of_the_readme_is_drawn(report: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "docs" / "make_report_picture.py"
    code = f"import runpy; runpy.run_path({str(script)!r})['draw'](Path({str(report.parent / 'fedavg')!r}), Path('p.png'))"
    subprocess.run([sys.executable, "-c", f"from pathlib import Path; {code}"], cwd=tmp_path, check=True)

    width, height = Image.open(tmp_path / "p.png").size
    assert width > 1000 and 0.4 < height / width < 1.5


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_width_and_text_has_contrast(browser: Any, report: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 844}
    with Opened(browser, report.as_uri(), viewport=size, color_scheme=scheme) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.page.evaluate(CONTRAST) == []


CONTRAST = """() => {
  const lum = (c) => c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; })
    .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
  const rgb = (t) => (t.match(/[\\d.]+/g) || []).map(Number);
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor); if (c.length === 3 || c[3] === 1) return c.slice(0, 3); }
    return [255, 255, 255]; };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.getClientRects().length || e.closest("script,style,.absent")) continue;
    const s = getComputedStyle(e);
    const [a, b] = [lum(rgb(e.closest("svg") ? s.fill : s.color).slice(0, 3)), lum(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(`${e.tagName}.${e.getAttribute("class")}: ${walker.currentNode.data.trim().slice(0, 30)}`);
  }
  return bad;
}"""


def test_names_of_rows_are_not_broken_on_a_phone(browser: Any, report: Path) -> None:
    page = report.with_name("long.html")
    page.write_text(report.read_text(encoding="utf-8").replace(">local<", ">centralised<"), encoding="utf-8")
    height = "row => row.querySelector('th').getBoundingClientRect().height"
    with Opened(browser, page.as_uri(), viewport={"width": 390, "height": 844}) as shown:
        rows = shown.page.locator("main tbody tr", has=shown.page.locator("th"))
        short = rows.filter(has_text="fedavg").first.evaluate(height)
        long = rows.filter(has_text="centralised").first.evaluate(height)

    assert long == pytest.approx(short, abs=2)


def test_without_a_script_the_page_is_still_complete(browser: Any, report: Path) -> None:
    with Opened(browser, report.as_uri(), java_script_enabled=False) as opened:
        assert opened.page.locator("article.run").count() == 2
        assert first_figure(opened.page).is_visible()


def test_it_prints(opened: Opened) -> None:
    assert opened.page.pdf(format="A4").startswith(b"%PDF")


def test_print_has_the_colours_of_paper_whatever_the_screen_has(browser: Any, report: Path) -> None:
    """Series and warnings too: pale ones cannot be read on white."""
    asked = """() => {
      const style = getComputedStyle(document.documentElement);
      return ["--paper", "--warn", "--s0", "--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7"]
        .map((key) => style.getPropertyValue(key).trim());
    }"""
    colours = {}
    for scheme in ("light", "dark"):
        with Opened(browser, report.as_uri(), color_scheme=scheme) as shown:
            screen = shown.page.evaluate(asked)
            shown.page.emulate_media(media="print", color_scheme=scheme)
            colours[scheme] = (screen, shown.page.evaluate(asked))

    assert colours["dark"][1] == colours["light"][1]
    assert colours["light"][1][2:] == colours["light"][0][2:] != colours["dark"][0][2:]


def test_the_live_page_follows_the_run(browser: Any, tmp_path: Path) -> None:
    with serve(tmp_path / "run", until_done=False) as served, Opened(browser, served.url) as opened:
        assert "Waiting for the run" in opened.page.inner_text("main")
        training = threading.Thread(target=lambda: wr.run(settings(tmp_path / "run")))
        training.start()
        opened.page.wait_for_selector("text=Mean test Dice", timeout=20_000)
        training.join()

        assert opened.complaints == []
        assert all(url.startswith((served.url, "data:")) for url in opened.requests)


def test_the_server_ends_after_the_last_page_was_seen(browser: Any, tmp_path: Path) -> None:
    run(tmp_path / "run")
    served = serve(tmp_path / "run", until_done=True)
    with Opened(browser, served.url):
        started = time.monotonic()
        served.wait()

    assert time.monotonic() - started < 10
