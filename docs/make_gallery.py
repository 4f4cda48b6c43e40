"""Make the pictures of docs/gallery.md from a run and a comparison, which are made as that page says.

    python docs/make_gallery.py RUN COMPARISON

Synthetic hospitals, so that nobody's scan is shown. Needs what `make browser` installs.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent / "images" / "gallery"
SECTIONS = {
    "run": ["r0-curves", "r0-pictures", "r0-cases", "r0-calibration", "r0-confidence", "r0-traffic"],
    "comparison": ["g0-result", "g0-beside", "g0-panel"],
}
TALLEST = 800  # pixels; what is longer is cut


def draw(reports: dict[str, Path], folder: Path) -> None:
    """One picture a section, in 128 colours."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, report in reports.items():
            page = browser.new_page(viewport={"width": 1300, "height": 1200}, color_scheme="light")
            page.goto(report.resolve().as_uri())
            for section in SECTIONS[name]:
                picture = Image.open(io.BytesIO(page.locator(f"#{section}").screenshot())).convert("RGB")
                cut = picture.crop((0, 0, picture.width, min(picture.height, TALLEST)))
                target = folder / f"{name}-{section.partition('-')[2]}.png"
                cut.quantize(128).save(target, optimize=True)
        browser.close()


if __name__ == "__main__":
    draw(dict(zip(SECTIONS, (Path(folder) / "report.html" for folder in sys.argv[1:3]), strict=True)), FOLDER)
