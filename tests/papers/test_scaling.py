"""`--scale`: one number, or part by part; never below what runs."""

from __future__ import annotations

import pytest

from wardround.errors import ConfigError
from wardround.papers.presets import load
from wardround.papers.scaling import WHOLE, Scale


def test_one_number_reduces_rounds_epochs_and_filters() -> None:
    scaled = Scale.parse("0.1").settings(load("safcf-table1").settings)
    assert (scaled["rounds"], scaled["local_epochs"], scaled["model"]["base_filters"]) == (10, 4, 3)
    assert scaled["optimizer"] == load("safcf-table1").settings["optimizer"]


def test_named_parts_leave_the_others_whole() -> None:
    scale = Scale.parse("rounds=0.1, size=0.5")
    scaled = scale.settings(load("fedevi-table1").settings)
    assert (scaled["rounds"], scaled["local_epochs"], scaled["model"]["base_filters"]) == (20, 2, 16)
    assert scale.size((384, 384)) == (192, 192) and scale.count("cases", 700) == 700
    assert str(scale) == "rounds 0.1, size 0.5" and str(Scale.parse("0.1")) == "0.1"


def test_nothing_shrinks_below_what_runs_or_grows() -> None:
    scale = Scale.parse("0.001")
    assert scale.size((384, 384)) == (32, 32) and scale.size((16, 16)) == (16, 16)
    assert (scale.count("cases", 500), scale.count("cases", 4), scale.count("clients", 80)) == (6, 4, 2)
    assert WHOLE.size((100, 90)) == (100, 90)


@pytest.mark.parametrize(
    ("text", "message"),
    [("0", "above 0"), ("two", "'two'"), ("1.5", "up to 1"), ("round=0.1", "Did you mean 'rounds'")],
)
def test_what_is_no_share_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scale.parse(text)
