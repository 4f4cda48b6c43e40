"""A comparison in pictures: sections of its page, and PNG files beside it."""

import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers import settings
from PIL import Image

import wardround as wr
from wardround.comparison.outcome import write_comparison
from wardround.comparison.run import plan_comparison
from wardround.papers.presets import Figure
from wardround.reporting import write_report
from wardround.reporting.figures import draw_lines

METHODS = ["fedavg", "safcf"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("figures") / "grid"
    evaluate = {"metrics": ["dice"], "overlays": 1}
    grid, _ = plan_comparison(settings(folder, evaluate=evaluate), {"methods": METHODS, "seeds": 1}, folder)
    for cell in grid.cells:  # in this process: quicker than one for each
        wr.run({**cell.settings, "output": str(folder / "cells" / cell.name)})
    write_comparison(folder, grid, {})
    write_report([folder])
    return folder


def test_the_page_of_a_comparison_shows_cost_losses_weights_and_the_same_cases(compared: Path) -> None:
    page = (compared / "report.html").read_text(encoding="utf-8")

    for words in ("Dice against the time of a round", "seconds a round", "MB sent by clients"):
        assert words in page
    assert "Training loss, mean over clients" in page
    assert "Weights: fedavg" in page and "Weights: safcf" in page
    assert 'href="#g0-panel"' in page and page.count("Deepest features;") == 2 * page.count(
        "outline of the truth;"
    )


def test_every_picture_is_a_file_beside_the_page(compared: Path) -> None:
    found = sorted(path.stem for path in (compared / "figures").iterdir())

    assert found == sorted(get_args(Figure))  # what a preset may name
    for path in (compared / "figures").iterdir():
        with Image.open(path) as picture:
            assert picture.width >= 400 and len(set(picture.convert("L").tobytes())) > 8


def test_a_picture_without_anything_to_show_does_not_stay(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    for path in (tmp_path / "grid/cells").glob("*/clients/*/pictures.safetensors"):
        path.unlink()
    write_report([tmp_path / "grid"])

    assert "The same cases" not in (tmp_path / "grid/report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "grid/figures/cases.png").exists()
    assert (tmp_path / "grid/figures/cost.png").exists()


def test_a_page_elsewhere_leaves_no_pictures_behind(compared: Path, tmp_path: Path) -> None:
    write_report([compared], tmp_path / "page.html")

    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_axis_of_one_round_has_no_fractions_of_it() -> None:
    figure = draw_lines({"a": [(1, 0.5)], "b": [(1, 0.6)]}, "loss")

    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [1.0]
