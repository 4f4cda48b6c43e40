"""The `data:` section: what is accepted, and what an older one is told."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import run

from wardround.config_file import load_config
from wardround.errors import ConfigError
from wardround.prediction.trained import TrainedModel


def config_of(folder: Path, folders: Any) -> Path:
    """The config.yaml of a run folder, as versions with `data.folders` wrote it."""
    path = folder / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["data"]["folders"] = folders
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_run_folder_that_says_folders_null_still_opens(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1)

    path = config_of(tmp_path / "run", None)

    assert load_config(path).data == result.config.data
    assert TrainedModel.load(tmp_path / "run").config.data == result.config.data


def test_folders_that_are_named_need_a_federation_file(tmp_path: Path) -> None:
    data = {"folders": {"root": "scans", "size": [64, 64]}}

    with pytest.raises(ConfigError, match=r"^data: data\.folders is no longer read.*wardround data init"):
        load_config({"data": data})
    with pytest.raises(ConfigError, match="set data.federation to it"):
        load_config({"data": {**data, "federation": "f.yaml"}})
