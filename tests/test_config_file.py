"""Configuration files: what they name is found from wherever they are read."""

from pathlib import Path

from pytest import MonkeyPatch, raises

from wardround.config_file import load_config
from wardround.errors import ConfigError


def test_data_federation_is_found_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "run.yaml").write_text("data: {federation: federation.yaml}\n")
    (home / "federation.yaml").write_text("sources: [{path: a}]\n")
    monkeypatch.chdir(elsewhere)
    assert load_config(home / "run.yaml").data.federation == home / "federation.yaml"
    (elsewhere / "federation.yaml").write_text("sources: [{path: b}]\n")
    with raises(ConfigError, match="in the working directory and beside"):
        load_config(home / "run.yaml")
    (home / "federation.yaml").unlink()
    assert load_config(home / "run.yaml").data.federation == Path("federation.yaml")
