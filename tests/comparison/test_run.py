"""Comparisons from a file: what it names is found from wherever it is read."""

from pathlib import Path

from pytest import MonkeyPatch

from wardround.comparison.run import read_settings


def test_data_federation_is_found_beside_the_file_that_names_it_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    (home / "grid.yaml").write_text("data: {federation: federation.yaml}\nsweep: {methods: [fedavg]}\n")
    (home / "federation.yaml").write_text("sources: [{path: a}]\n")
    monkeypatch.chdir(elsewhere)
    found = read_settings(home / "grid.yaml", [])["data"]["federation"]
    assert found == str(home / "federation.yaml")
    (home / "federation.yaml").rename(elsewhere / "federation.yaml")
    assert read_settings(home / "grid.yaml", [])["data"]["federation"] == "federation.yaml"
    chosen = read_settings(home / "grid.yaml", ["data.federation=other.yaml"])["data"]["federation"]
    assert chosen == "other.yaml"
