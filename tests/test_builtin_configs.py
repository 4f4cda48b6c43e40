"""Configurations of the package are found by name; what the user has under that name is never mistaken."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

import wardround as wr
from wardround import builtin_configs
from wardround.builtin_configs import find_comparison, find_config, list_configs, list_paths, require
from wardround.comparison.run import plan_comparison
from wardround.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_configuration_of_the_repository_is_listed_with_how_to_run_it() -> None:
    commands = {config.name: config.command for config in list_configs()}

    assert commands["quickstart"] == "wardround train quickstart"
    assert commands["compare-quickstart"] == "wardround compare quickstart"
    assert commands["safcf-table2"] == "wardround papers run safcf-table2 --data FOLDER"
    assert len(commands) == len(list((ROOT / "configs").rglob("*.yaml")))
    assert all(config.about.endswith(".") for config in list_configs())


def test_quick_starts_come_first_and_table_2_before_table_10() -> None:
    names = list(list_paths())

    assert names[:3] == ["quickstart", "quickstart-3d", "compare-quickstart"]
    assert names.index("safcf-table2") < names.index("safcf-table10")


@pytest.mark.parametrize("name", [c.name for c in list_configs() if " train " in c.command])
def test_a_name_is_a_valid_configuration(name: str) -> None:
    assert wr.load_config(name).name == name
    assert wr.load_config(Path(name), ["rounds=3"]).rounds == 3


def test_a_comparison_by_name_is_the_one_of_its_file_unless_rows_are_given() -> None:
    grid, folder = plan_comparison("quickstart", {})
    assert len(grid.cells) == 18 and folder == Path("runs/compare-quickstart")
    grid, folder = plan_comparison("quickstart", {"methods": ["fedavg", "fedprox"]})
    assert len(grid.cells) == 2 and folder == Path("runs/quickstart")


def test_a_file_or_folder_of_exactly_that_name_is_a_path(here: Path) -> None:
    (here / "quickstart").mkdir()

    assert find_config("quickstart") == Path("quickstart") == find_comparison("quickstart")


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_a_file_that_could_be_meant_is_refused(here: Path, suffix: str) -> None:
    (here / f"quickstart{suffix}").write_text("rounds: 3")

    with pytest.raises(ConfigError, match=f"Write quickstart{suffix} for yours"):
        wr.load_config("quickstart")
    assert wr.load_config(f"quickstart{suffix}").rounds == 3


def test_paths_are_never_taken_for_names(here: Path) -> None:
    for path in ("quickstart.yaml", "./quickstart", "some/quickstart", str(here / "quickstart")):
        assert find_config(path) == Path(path)
    with pytest.raises(ConfigError, match="quickstart.yaml does not exist. .* wardround configs"):
        wr.load_config("quickstart.yaml")


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        require("quikstart")


def test_files_of_the_package_come_before_those_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builtin_configs.find_folder() == ROOT / "configs"
    packaged = tmp_path / "configs"
    packaged.mkdir()
    shutil.copy(ROOT / "configs" / "quickstart.yaml", packaged)
    monkeypatch.setattr(builtin_configs, "PACKAGED", packaged)

    assert list(list_paths()) == ["quickstart"]


def test_the_wheel_takes_them_along() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    place = builtin_configs.PACKAGED.relative_to(ROOT / "src").as_posix()

    assert build["wheel"]["force-include"] == {"configs": place}
    assert "configs" in build["sdist"]["include"]
