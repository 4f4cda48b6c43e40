"""The report's section about calibration.json."""

import json

import pytest
from helpers import run

from wardround.reporting import build_page, open_source

TITLE = "Confidence and uncertainty"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("report") / "run").folder


def page(folder):
    return build_page([open_source(folder)])


def test_the_page_says_whether_the_model_is_rightly_confident(finished):
    found = json.loads((finished / "calibration.json").read_text())
    text = page(finished)

    assert text.count(TITLE) >= 2  # the heading and the contents
    assert "Accuracy by confidence" in text
    assert "Remaining error when the most uncertain cases are reviewed" in text
    assert f"{found['overall']['before']['ece']:.3f}" in text
    assert "all clients" in text


def test_a_run_without_calibration_has_no_such_section(finished, tmp_path):
    other = tmp_path / "run"
    other.mkdir()
    for name in ("config.yaml", "environment.json", "records.jsonl", "result.json", "cases.csv"):
        (other / name).write_bytes((finished / name).read_bytes())

    assert TITLE not in page(other)


@pytest.mark.parametrize(
    "change",
    [
        {"overall": {"before": None, "after": []}, "clients": 3},
        {"reliability": {"before": [None, {"confidence": "x"}]}, "cases": [{"dice": None}, 4]},
        {"temperature": None, "temperature_note": "<script>alert(1)</script>"},
        {"quantiles": {"<b>": {"case": {"q50": 0.1}}}},
    ],
)
def test_a_damaged_or_hostile_file_is_only_text(finished, tmp_path, change):
    other = tmp_path / "run"
    other.mkdir()
    for name in ("config.yaml", "environment.json", "records.jsonl", "result.json", "cases.csv"):
        (other / name).write_bytes((finished / name).read_bytes())
    found = json.loads((finished / "calibration.json").read_text())
    (other / "calibration.json").write_text(json.dumps({**found, **change}))
    text = page(other)

    assert "<script>alert" not in text and "<b>:" not in text
