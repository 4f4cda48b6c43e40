"""Make the picture of the report in the README: python docs/make_report_picture.py [--write] [RUN].

The picture is of the run `fedavg` of `wardround demo`: synthetic hospitals, so that nobody's scan is shown.
Needs what `make browser` installs. Without --write, only says whether the picture is there.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from wardround.reporting import write_report

TARGET = Path(__file__).resolve().parent / "images" / "report-cases.png"
WIDTH, SCALE = 1100, 1.25
SHOWN = "#r0-curves, #r0-pictures"  # learning curves, then cases with truth, prediction and uncertainty
CLIENTS = 2  # whose cases are shown


def draw(run: Path, target: Path) -> None:
    """The two sections of the run's report, below each other."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page = write_report([run], Path(folder) / "report.html")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        size = {"width": WIDTH, "height": 1600}
        opened = browser.new_page(viewport=size, device_scale_factor=SCALE, color_scheme="light")
        opened.goto(page.as_uri())
        opened.evaluate(
            """([shown, clients]) => {
              const kept = [...document.querySelectorAll(shown)];
              for (const part of kept[0].parentNode.children) part.hidden = !kept.includes(part);
              const all = (what) => [...document.querySelectorAll(what)];
              const others = all("nav, header, footer, main > section");
              [...others, ...all(".client-cases").slice(clients)].forEach((part) => part.remove());
              kept.forEach((part) => {
                part.style.border = part.style.margin = part.style.padding = 0;
                part.querySelectorAll(".lead, details").forEach((one) => one.remove());
              });
              document.querySelector(".layout").style.display = "block";
              document.querySelector("main").style.padding = "24px";
            }""",
            [SHOWN, CLIENTS],
        )
        opened.locator("main").screenshot(path=target)
        browser.close()


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:] if not word.startswith("--")]
    if "--write" in sys.argv:
        draw(given[0] if given else Path("runs/demo/fedavg"), TARGET)
    elif not TARGET.exists():
        sys.exit(f"{TARGET} is missing; run wardround demo, then this with --write")
