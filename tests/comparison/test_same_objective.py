"""One objective for all rows: that of the reference, or one that every method can use."""

from typing import Any

from pytest import MonkeyPatch, raises

from wardround.comparison.run import plan_comparison
from wardround.errors import ConfigError
from wardround.methods.fedevi import Evidential
from wardround.methods.fedprox import FedProx

BASE: dict[str, Any] = {
    "rounds": 1,
    "data": {"phantom": {"hospitals": 2, "size": 16, "cases": 8}},
    "model": {"name": "unet2d", "base_filters": 2, "levels": 2},
}


def objectives(values: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
    grid, _ = plan_comparison({**BASE, **values}, {"same_objective": True, **options})  # type: ignore[typeddict-item]
    found = {cell.row: cell.settings["objective"] for cell in grid.cells}
    return found, list(grid.notes)


def test_all_rows_get_the_objective_of_the_reference() -> None:
    own = {"label": "mine", "method": {"name": "fedprox"}, "objective": {"name": "focal_tversky"}}
    found, notes = objectives({"sweep": {"methods": ["fedavg", own]}})

    assert {row: entry["name"] for row, entry in found.items()} == {"fedavg": "dice_bce", "mine": "dice_bce"}
    assert notes == ["All rows have the objective of 'fedavg', dice_bce (--same-objective)."]


def test_another_reference_brings_its_objective_with_its_settings() -> None:
    own = {"label": "mine", "method": {"name": "fedprox"}, "objective": {"name": "dice", "smooth": 0.5}}
    found, _ = objectives({"sweep": {"methods": ["fedavg", own]}}, reference="mine")

    assert found["fedavg"] == found["mine"] == {"name": "dice", "smooth": 0.5}


def test_a_method_that_needs_its_own_objective_gives_it_to_all() -> None:
    found, notes = objectives({"sweep": {"methods": ["fedavg", "fedevi"]}})

    assert found["fedavg"]["name"] == found["fedevi"]["name"] == "evidential"
    assert "of 'fedevi', evidential" in notes[0]


def test_rows_that_no_objective_suits_are_refused(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(FedProx, "check", refuse_evidential)
    with raises(ConfigError, match="--same-objective: no row's objective suits all rows. row 'fedevi'"):
        objectives({"sweep": {"methods": ["fedprox", "fedevi"]}})


def refuse_evidential(self: FedProx, config: Any, objective: Any) -> None:
    if isinstance(objective, Evidential):
        raise ConfigError("method 'fedprox' has no evidence here.")


def test_objectives_that_are_compared_cannot_be_one() -> None:
    with raises(ConfigError, match="choose --same-objective or several objectives, not both"):
        objectives({"sweep": {"methods": ["fedavg"], "objectives": ["dice", "dice_bce"]}})


def test_without_the_option_rows_keep_their_own() -> None:
    grid, _ = plan_comparison({**BASE, "sweep": {"methods": ["fedavg", "fedevi"]}}, {})

    assert all("objective" not in cell.settings for cell in grid.cells) and not grid.notes
