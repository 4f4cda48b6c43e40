"""Which methods, objectives and networks work, and what the others are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers import config
from pytest import mark, raises

from wardround.engine.host import Host
from wardround.errors import ConfigError
from wardround.methods import METHODS
from wardround.privacy import PrivacySettings
from wardround.privacy.checks import explain_method

CLIENT = {
    "fedavg", "fedprox", "feddyn", "fedsam", "moon", "fedrcl", "safcf", "fsf3a", "fedma", "ldawa", "fedavgm",
    "fedadam", "fedyogi", "fedadagrad", "trimmed_mean", "median", "krum", "multikrum", "geometric_median",
    "fedper", "ditto",
}  # fmt: skip
CASE = CLIENT - {"fedsam", "moon", "fedrcl", "fedper", "ditto"}


@mark.parametrize("level, expected", [("client", CLIENT), ("case", CASE)])
def test_methods_that_send_updates_alone_work(level: Any, expected: set[str]) -> None:
    settings = PrivacySettings(level=level)
    works = {name for name, method in METHODS.items() if explain_method(settings, method) is None}

    assert works == expected


@mark.parametrize(
    "changes, reason",
    [
        ({"method": {"name": "scaffold"}}, "method 'scaffold' does not work with privacy.level: client: beside the model it sends the change of its control variate.* is feddyn"),
        ({"method": {"name": "fedbn"}, "model": {"name": "unet2d", "norm": "batch"}}, "method 'fedbn' .* is fedper"),
        ({"method": {"name": "local"}}, "it is a reference"),
        ({"method": {"name": "fedsam"}, "privacy": {"level": "case"}}, "changes the training step"),
        ({"objective": {"name": "infonce"}, "privacy": {"level": "case"}}, "objective 'infonce' .* is dice_bce"),
        ({"method": {"name": "ditto"}, "privacy": {"level": "client", "scores": "show"}}, "would not be covered"),
    ],
)  # fmt: skip
def test_others_are_refused_by_name_with_the_nearest_that_works(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with raises(ConfigError, match=reason):
        config(tmp_path, **{"privacy": {"level": "client"}, **changes})


@mark.parametrize("level", ["client", "case"])
def test_running_statistics_are_refused_by_layer(tmp_path: Path, level: str) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    with raises(ConfigError, match=r"layer '.*' \(BatchNorm2d\) keeps running statistics"):
        Host(config(tmp_path, model=model, privacy={"level": level}), tmp_path / "clients", ["north"])
