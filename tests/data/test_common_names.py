"""Common names over a federation.yaml: renamed, reordered, left out."""

from pathlib import Path

import pytest

from deploy.planted import plant_one
from wardround.data.common_names import OwnNames
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError


def open_named(file: Path, names: OwnNames | None) -> RealData:
    return RealData(file, DataSettings(federation=file), names=names)


def test_classes_keep_their_own_values_under_common_names(tmp_path: Path) -> None:
    file = plant_one(tmp_path, "east", 6)

    found = open_named(file, OwnNames({"lesion": "Lesion", "gland": "Gland"}))

    assert found.file.labels == {"lesion": (2,), "gland": (1,)}
    assert found.regions == {"lesion": (1,), "gland": (2,)}


def test_channels_are_taken_in_the_common_order(tmp_path: Path) -> None:
    file = plant_one(tmp_path, "east", 6)
    own = open_named(file, None)

    found = open_named(file, OwnNames({"lesion": "Lesion"}, {"t2": "t2", "adc": "adc"}))

    assert found.file.channels == ("t2", "adc")
    assert found.listing.entries[0].images == own.listing.entries[0].images[::-1]


def test_a_class_that_is_left_out_counts_as_background_and_costs_no_case(tmp_path: Path) -> None:
    file = plant_one(tmp_path, "south", 6)

    found = open_named(file, OwnNames({"lesion": "lesion", "gland": "gland"}))
    prepared = found.prepare()["south"]

    assert found.file.background == (3,)
    assert len(prepared.paths) == 6


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = plant_one(tmp_path, "north", 6)

    with pytest.raises(ConfigError, match="want class 'tumour', which federation.yaml does not have"):
        open_named(file, OwnNames({"lesion": "tumour"}))
