"""site.yaml: its template, its mistakes, and which client of the data a hospital is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pytest import fixture, mark, raises

from wardround.deploy import site_file
from wardround.deploy.rules import SURVEY
from wardround.deploy.site_file import SiteFile, find_client, load_site, render_template
from wardround.errors import ConfigError
from wardround.methods import METHODS

Load = Callable[..., SiteFile]


@fixture
def load(tmp_path: Path) -> Load:
    def loaded(**settings: Any) -> SiteFile:
        path = tmp_path / "site.yaml"
        path.write_text(yaml.safe_dump(settings))
        return load_site(path)

    return loaded


def test_the_template_is_the_defaults_with_every_key_explained(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    text = render_template("north")
    path.write_text(text)
    assert load_site(path) == SiteFile(data=tmp_path / "federation.yaml")
    assert set(yaml.safe_load(text)) == set(SiteFile.model_fields)
    assert "hospital 'north'" in text and max(map(len, text.splitlines())) <= 110
    for key in site_file.COMMENTS:
        assert re.search(rf"^#.*\n{key}:", text, re.MULTILINE), key


def test_an_empty_file_is_the_defaults(load: Load, tmp_path: Path) -> None:
    assert load() == SiteFile(data=tmp_path / "federation.yaml")


def test_data_are_relative_to_the_file_or_made_up(load: Load, tmp_path: Path) -> None:
    assert load(data="../scans/federation.yaml").data == tmp_path.parent / "scans" / "federation.yaml"
    assert load(data="/scans/federation.yaml").data == Path("/scans/federation.yaml")
    assert load(data="~nobody-here/f.yaml").data == tmp_path / "~nobody-here" / "f.yaml"
    assert load(data="phantom").data == "phantom"
    with raises(ConfigError, match=r"site.yaml, line 1: a text holds a zero byte\."):
        load(data="a\0b")


def test_every_task_a_client_can_be_asked_for_is_known() -> None:
    engine = {"evaluate", "personal_model", "norm_stats", "pictures", "calibrate"}
    assert set(site_file.TASKS) == engine.union(SURVEY, *(method.tasks for method in METHODS.values()))


@mark.parametrize(
    ("text", "size"),
    [("500 MB", 500_000_000), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("10 kb", 10_000), (4096, 4096)],
)
def test_sizes_are_written_as_people_write_them(load: Load, text: Any, size: int) -> None:
    assert load(largest_message=text).largest_message == size


@mark.parametrize(
    ("settings", "sentence"),
    [
        ({"metods": "all"}, "metods is not a setting. Did you mean 'methods'?"),
        ({"methods": ["fedagv"]}, "methods: 'fedagv' is unknown. Did you mean 'fedavg'?"),
        ({"tasks": ["trian"]}, "tasks: 'trian' is unknown. Did you mean 'train'?"),
        ({"objectives": "dise"}, "objectives: 'dise' is unknown. Did you mean 'dice'?"),
        ({"networks": ["unet3"]}, "networks: 'unet3' is not a network. Did you mean 'unet3d'?"),
        ({"tasks": 3}, "tasks: it is 3; give all, or a list of names."),
        ({"runs": [1]}, "runs: it is [1]; give all, or a list of names."),
        ({"data": ["a"]}, "data: it is ['a']; give the path of a federation.yaml, or the word phantom."),
        ({"device": "gpu"}, "device: it is 'gpu'; use auto, cpu, cuda or cuda:0."),
        ({"threads": 0}, "threads is 0; it must be greater than or equal to 1."),
        ({"min_cases": -1}, "min_cases is -1; it must be greater than or equal to 0."),
        ({"largest_message": "2 pounds"}, "largest_message: it is '2 pounds'; give a size such as 500 MB"),
        ({"largest_message": True}, "largest_message: it is True; give a size such as 500 MB"),
        ({"largest_message": 0}, "largest_message is 0; it must be greater than or equal to 1."),
        ({"networks": ["owm"]}, "networks: 'owm' is not a network. Did you mean 'own'?"),
        ({"rows": ["validation"]}, "rows.0 is 'validation'; it must be 'train', 'val' or 'test'."),
        ({"splits": {"ratio": [1, 0, 0]}}, "splits.ratio is not a setting. Did you mean 'ratios'?"),
        ({"min_batch": 0}, "min_batch is 0; it must be greater than or equal to 1."),
        ({"resources": {"filter": 3}}, "resources.filter is not a setting. Did you mean 'filters'?"),
        ({"resources": {"memory": "much"}}, "resources.memory: it is 'much'; give a size such as 500 MB"),
        ({"resources": {"epochs": True}}, "resources.epochs: it is true; give a number."),
        ({"resources": {"seconds": 0}}, "resources.seconds is 0; it must be greater than or equal to 1."),
        ({"case_names": "hide"}, "case_names is 'hide'; it must be 'number' or 'keep'."),
        ({"quiet_hours": ["25:00-26:00"]}, "quiet_hours: '25:00-26:00' is not a time span"),
        ({"quiet_hours": ["10:00-10:00"]}, "quiet_hours: '10:00-10:00' starts and ends at the same time."),
        ({"quiet_hours": ["22:61-06:00"]}, "quiet_hours: '22:61-06:00' is not a time span"),
        ({"quiet_hours": ["06:00-18:00", "18:00-06:00"]}, "quiet_hours: they cover the whole day"),
        ({"quiet_hours": {"from": 1}}, "quiet_hours: it is {'from': 1}; give a list"),
    ],
)
def test_a_mistake_is_named_with_its_key(load: Load, settings: dict[str, Any], sentence: str) -> None:
    with raises(ConfigError) as error:
        load(**settings)
    assert f"site.yaml: {sentence}" in str(error.value)


def test_a_missing_file_is_said_kindly(tmp_path: Path) -> None:
    with raises(ConfigError, match="site.yaml does not exist. It holds the rules of this hospital"):
        load_site(tmp_path / "site.yaml")


@mark.parametrize(
    ("client", "names", "found"),
    [(None, ["clinic"], "clinic"), (None, ["east", "north"], "north"), ("east", ["east", "north"], "east")],
)
def test_the_hospital_is_one_client_of_its_data(client: str | None, names: list[str], found: str) -> None:
    assert find_client(SiteFile(client=client), names, "north") == found


@mark.parametrize(
    ("client", "words"),
    [
        (None, "not clear which client of federation.yaml 'north' is. Its clients"),
        ("eats", "Did you mean 'east'\\?"),
    ],
)
def test_a_client_that_is_not_clear_is_asked_for(client: str | None, words: str) -> None:
    with raises(ConfigError, match=words):
        find_client(SiteFile(client=client), ["east", "west"], "north")
