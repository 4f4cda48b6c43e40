"""Hospitals with cases of their own: what they must have in common, and what is theirs alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml
from helpers import run, settings
from pytest import TempPathFactory, fixture, mark, raises

from deploy.loopback import RULES, Loopback, conducted, remote_config
from wardround.clients import Registration
from wardround.config_file import load_config
from wardround.data.federation_file import SplitSettings
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.deploy.agreement import (
    DataFacts,
    agree_on_federation,
    collect_facts,
    localise_config,
    make_hospital_config,
    open_own_federation,
)
from wardround.deploy.conducting import open_own_client
from wardround.deploy.site_file import SiteFile
from wardround.errors import ConfigError

QUICK = {
    "rounds": 1,
    "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
    "data": {"hospitals": True},
}
SPLITS = {"by": "ratios", "ratios": [0.5, 0.25, 0.25]}


@fixture(scope="module")
def pictures(tmp_path_factory: TempPathFactory) -> Path:
    """Two hospitals, east and north, of eight pictures each."""
    folder: Path = tmp_path_factory.mktemp("pictures") / "scans"
    phantom_files.write(PhantomSettings(hospitals=2, size=16, cases=8), folder, "png", 1)
    return folder


def at_home(folder: Path, pictures: Path, name: str, called: str, **changes: Any) -> SiteFile:
    """A hospital's own federation.yaml with its own pictures, under a name it chose itself."""
    shutil.copytree(pictures / name, folder / name / "scans" / called)
    path = folder / name / "federation.yaml"
    plain = {"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "splits": SPLITS, **changes}
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return RULES.model_copy(update={"data": path})


def test_hospitals_train_on_their_own_cases_under_the_name_of_their_kit(
    tmp_path: Path, pictures: Path
) -> None:
    rules = {name: at_home(tmp_path / "data", pictures, name, "radiology") for name in ("east", "north")}
    loop, folder = Loopback(tmp_path / "sites", ("east", "north"), **rules), tmp_path / "run"
    conducted(loop, folder, **QUICK)
    result = json.loads((folder / "result.json").read_text())
    assert set(result["test"]["dice"]["clients"]) == {"east", "north"}
    assert result["num_lost"] == result["num_refused"] == 0
    told = "".join(path.read_text() for path in folder.glob("*.json*"))
    assert "radiology" not in told and str(tmp_path / "data") not in told


def test_a_rehearsal_over_one_file_has_the_bytes_of_train(tmp_path: Path, pictures: Path) -> None:
    shutil.copytree(pictures, tmp_path / "scans")
    path = tmp_path / "federation.yaml"
    plain = {"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "splits": SPLITS}
    path.write_text(yaml.safe_dump(plain))
    other = {"ratios": [0.25, 0.25, 0.5]}  # of the run; a rehearsed hospital has them in its site.yaml
    changes = {**QUICK, "data": {"federation": str(path), "splits": other}}
    site = RULES.model_copy(update={"data": path, "splits": SplitSettings.model_validate(other)})
    rules = dict.fromkeys(("east", "north"), site)
    here = run(tmp_path / "train", **changes)
    conducted(Loopback(tmp_path / "sites", ("east", "north"), **rules), tmp_path / "run", **changes)
    there = json.loads((tmp_path / "run" / "result.json").read_text())
    assert there["params_sha256"] == here.outcome.state.params.sha256()
    assert there["test"] == json.loads((tmp_path / "train" / "result.json").read_text())["test"]
    one, other = ((tmp_path / name / "preparation.json").read_text() for name in ("train", "run"))
    assert one == other


TWO_ORGANS = {"ventricles": [1], "lesion": [2]}


@fixture(scope="module")
def outlined(tmp_path_factory: TempPathFactory) -> Path:
    """The same two hospitals: east outlines ventricles, north lesions."""
    folder: Path = tmp_path_factory.mktemp("outlined") / "scans"
    given = {"east": ("ventricles",), "north": ("lesion",)}
    made = PhantomSettings(hospitals=2, size=24, cases=8, organs=tuple(TWO_ORGANS), annotates=given)
    phantom_files.write(made, folder, "png", 1)
    return folder


def test_hospitals_that_annotate_different_classes_have_the_bytes_of_train(
    tmp_path: Path, outlined: Path
) -> None:
    names = ("east", "north")
    annotates = {"east": ["ventricles"], "north": ["lesion"]}
    shutil.copytree(outlined, tmp_path / "scans")
    path = tmp_path / "federation.yaml"
    plain = {"sources": [{"path": "scans"}], "labels": TWO_ORGANS, "splits": SPLITS, "annotates": annotates}
    path.write_text(yaml.safe_dump(plain))
    changes = {**QUICK, "rounds": 2, "exclusion": 1.0}
    here = run(tmp_path / "train", **{**changes, "data": {"federation": str(path)}})
    rules = dict.fromkeys(names, RULES.model_copy(update={"data": path}))
    conducted(Loopback(tmp_path / "sites", names, **rules), tmp_path / "run", **changes)
    there = json.loads((tmp_path / "run" / "result.json").read_text())

    assert there["params_sha256"] == here.outcome.state.params.sha256()
    assert (tmp_path / "run" / "cases.csv").read_text() == (tmp_path / "train" / "cases.csv").read_text()


@mark.parametrize("objective", ["mean_teacher", "pseudo_labels"])
def test_a_hospital_without_labels_has_the_bytes_of_train(objective: str, tmp_path: Path) -> None:
    names = ("east", "north")
    made = PhantomSettings(hospitals=2, size=24, cases=8, unlabelled=("east",))
    phantom_files.write(made, tmp_path / "scans", "png", 1)
    path = tmp_path / "federation.yaml"
    plain = {"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "unlabelled": ["east"]}
    path.write_text(yaml.safe_dump(plain))
    changes = {**QUICK, "rounds": 2, "objective": {"name": objective, "warmup": 0.0}}
    here = run(tmp_path / "train", **{**changes, "data": {"federation": str(path)}})
    rules = dict.fromkeys(names, RULES.model_copy(update={"data": path}))
    conducted(Loopback(tmp_path / "sites", names, **rules), tmp_path / "run", **changes)
    there = json.loads((tmp_path / "run" / "result.json").read_text())

    assert there["params_sha256"] == here.outcome.state.params.sha256()
    assert (tmp_path / "run" / "cases.csv").read_text() == (tmp_path / "train" / "cases.csv").read_text()


def test_a_hospital_says_in_its_own_file_what_it_annotates(tmp_path: Path, outlined: Path) -> None:
    given = {"east": ["ventricles"], "north": ["lesion"]}
    rules = {
        name: at_home(
            tmp_path / "data", outlined, name, "ward", labels=TWO_ORGANS, annotates={"ward": given[name]}
        )
        for name in given
    }
    conducted(Loopback(tmp_path / "sites", tuple(given), **rules), tmp_path / "run", **QUICK)
    rows = [line.split(",") for line in (tmp_path / "run" / "cases.csv").read_text().splitlines()[1:]]
    assert {(row[0], row[2]) for row in rows} == {("east", "ventricles"), ("north", "lesion")}


def test_hospitals_agree_on_classes_by_name_whatever_their_values(tmp_path: Path, pictures: Path) -> None:
    rules = {
        name: at_home(tmp_path / "data", pictures, name, name, labels={"lesion": values})
        for name, values in {"east": [1], "north": [1, 7]}.items()
    }
    conducted(Loopback(tmp_path / "sites", ("east", "north"), **rules), tmp_path / "run", **QUICK)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"


@mark.parametrize("drop_channels", [None, 0.5])
def test_hospitals_that_lack_channels_have_the_bytes_of_train(
    tmp_path: Path, drop_channels: float | None
) -> None:
    names = ("east", "north")
    made = PhantomSettings(hospitals=2, size=24, cases=8, channels=2, lacks={"east": ("channel_0",)})
    phantom_files.write(made, tmp_path / "scans", "nifti", 1)
    plain = {
        "sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "splits": SPLITS,
        "channels": ["t1", "t2"], "channels_of": {"east": ["t2"]},
    }  # fmt: skip
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump(plain))
    changes = {**QUICK, "rounds": 2, "augmentation": {"drop_channels": drop_channels}}
    here = run(tmp_path / "train", **{**changes, "data": {"federation": str(path)}})
    rules = dict.fromkeys(names, RULES.model_copy(update={"data": path}))
    conducted(Loopback(tmp_path / "sites", names, **rules), tmp_path / "run", **changes)
    there = json.loads((tmp_path / "run" / "result.json").read_text())

    assert there["params_sha256"] == here.outcome.state.params.sha256()
    assert there["lacks"] == {"east": {"t1": 8}}
    one, other = ((tmp_path / name / "preparation.json").read_text() for name in ("train", "run"))
    assert one == other


def test_a_hospital_that_does_not_know_what_another_lacks_is_told(tmp_path: Path) -> None:
    made = PhantomSettings(hospitals=2, size=24, cases=8, channels=2, lacks={"east": ("channel_0",)})
    phantom_files.write(made, tmp_path / "scans", "nifti", 1)
    given = {"channels": ["t1", "t2"], "labels": {"lesion": [1]}}
    rules = {
        "east": at_home(
            tmp_path / "data", tmp_path / "scans", "east", "ward", **given, channels_of={"ward": ["t2"]}
        ),
        "north": at_home(tmp_path / "data", tmp_path / "scans", "north", "ward", **given),
    }
    loop = Loopback(tmp_path / "sites", ("east", "north"), **rules)
    with raises(ConfigError, match=r"'east' lacks t1, and 'north' does not know.*drop_channels.*0.25"):
        conducted(loop, tmp_path / "refused", **QUICK)
    conducted(loop, tmp_path / "run", **QUICK, augmentation={"drop_channels": 0.25})
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "done"


DIFFERENT = {
    "classes": {"labels": {"tumour": [1]}},
    "channels": {"channels": ["flair"]},
    "prepare": {"prepare": {"size": [32, 32]}},
}


@mark.parametrize("key", DIFFERENT)
def test_hospitals_that_differ_are_named_with_the_key(key: str, tmp_path: Path, pictures: Path) -> None:
    rules = {
        "east": at_home(tmp_path / "data", pictures, "east", "east"),
        "north": at_home(tmp_path / "data", pictures, "north", "north", **DIFFERENT[key]),
    }
    loop = Loopback(tmp_path / "sites", ("east", "north"), **rules)
    with raises(ConfigError, match=rf"hospitals 'east' and 'north' differ in .*\({key}\)"):
        conducted(loop, tmp_path / "run", **QUICK)
    assert json.loads((tmp_path / "run" / "live.json").read_text())["state"] == "failed"
    assert {task for _, task, _ in loop.asked} == {"register"}


def test_what_the_organiser_sets_for_all_settles_a_difference(tmp_path: Path, pictures: Path) -> None:
    rules = {
        "east": at_home(tmp_path / "data", pictures, "east", "east"),
        "north": at_home(tmp_path / "data", pictures, "north", "north", prepare={"size": [32, 32]}),
    }
    data = {"hospitals": True, "prepare": {"size": [16, 16]}}
    loop = Loopback(tmp_path / "sites", ("east", "north"), **rules)
    conducted(loop, tmp_path / "run", **{**QUICK, "data": data})
    assert json.loads((tmp_path / "run" / "preparation.json").read_text())["prepare"]["size"] == [16, 16]


def test_made_up_and_real_cases_are_not_mixed(tmp_path: Path, pictures: Path) -> None:
    real = at_home(tmp_path / "data", pictures, "east", "east")
    asked = remote_config(tmp_path / "run", data={"hospitals": True})
    config = localise_config(make_hospital_config(asked), device="cpu", threads=1)
    with raises(
        ConfigError,
        match=r"has only synthetic cases, and this run asks for real ones \(data: {hospitals: true}\)\.$",
    ):
        open_own_federation(config, RULES, "east")
    config = localise_config(make_hospital_config(remote_config(tmp_path / "run")), device="cpu", threads=1)
    with raises(ConfigError, match="asks for synthetic cases, but site 'east' has real ones"):
        open_own_federation(config, real, "east")
    with raises(ConfigError, match="'nowhere' is not among the synthetic hospitals"):
        open_own_federation(config, RULES, "nowhere")


def test_train_on_one_machine_says_where_the_cases_are(tmp_path: Path) -> None:
    with raises(ConfigError, match="the cases are at the hospitals. Run it there with: wardround submit"):
        run(tmp_path, data={"hospitals": True})


def test_cases_at_the_organiser_need_a_place(tmp_path: Path) -> None:
    config = remote_config(tmp_path, method={"name": "fedlaw"}, data={"hospitals": True, "proxy": "west"})
    with raises(
        ConfigError, match=r"data.proxy is 'west', but with data.hospitals the organiser has no cases"
    ):
        open_own_client(config)


# What is asked for


def test_hospitals_get_no_path_and_no_machine_of_the_organiser(tmp_path: Path, pictures: Path) -> None:
    path = at_home(tmp_path / "data", pictures, "east", "east").data
    changes = {"data": {"federation": str(path)}, "trackers": [], "compute": {"threads": 1, "device": "cpu"}}
    text = json.dumps(make_hospital_config(load_config(settings(tmp_path / "run", **changes))))
    assert str(tmp_path) not in text
    asked = json.loads(text)
    assert asked["data"]["hospitals"] is True
    assert not {"device", "workers", "resident"} & set(asked["compute"])


def test_splits_do_not_travel(tmp_path: Path, pictures: Path) -> None:
    path = at_home(tmp_path / "data", pictures, "east", "east").data
    asked = remote_config(tmp_path, data={"federation": str(path), "splits": SPLITS})
    assert "splits" not in make_hospital_config(asked)["data"]
    with raises(ConfigError, match="splits are each hospital's own decision. Leave data.splits out"):
        remote_config(tmp_path, data={"hospitals": True, "splits": SPLITS})


def test_a_hospital_splits_its_cases_by_its_own_rules(tmp_path: Path, pictures: Path) -> None:
    site = at_home(tmp_path / "data", pictures, "east", "east")
    asked = make_hospital_config(remote_config(tmp_path, data={"hospitals": True}))
    config = localise_config(asked, device="cpu", threads=1)
    one_case = {"by": "ratios", "ratios": [0.1, 0.0, 0.9]}
    wanted = config.model_copy(update={"data": config.data.model_copy(update={"splits": one_case})})
    more = SplitSettings(ratios=(0.75, 0.0, 0.25))
    for rules, expected in ((site, (4, 2, 2)), (site.model_copy(update={"splits": more}), (6, 0, 2))):
        found = open_own_federation(wanted, rules, "east").load("east")
        assert (len(found.train), len(found.val), len(found.test)) == expected


def test_a_configuration_without_sections_is_refused() -> None:
    with raises(ConfigError, match="no section 'data'"):
        localise_config({"name": "x"}, device="cpu", threads=None)


# What is said


def facts(**changes: Any) -> DataFacts:
    plain = {
        "dimensions": 3, "in_channels": 1, "num_classes": 2, "classes": ["lesion"], "labels": {"lesion": [1]},
        "regions": {"lesion": [1]}, "channels": [], "prepare": {}, "patch": None, "shape": [8, 8, 4],
        "spacing": [[1.0, 1.0, 2.0], [1.0, 1.0, 3.0]],
    }  # fmt: skip
    return DataFacts.model_validate({**plain, **changes})


def test_what_all_scans_are_like_does_not_depend_on_who_came_first() -> None:
    said = {
        "south": facts(shape=[16, 8, 8], spacing=[[0.5, 1.0, 2.0], [1.0, 2.0, 2.0]], patch=[4, 4, 4]),
        "east": facts(),
        "north": facts(shape=[12, 8, 8], spacing=None, patch=[8, 8, 4]),
    }
    entries = {name: Registration(name, 4, 1, 1) for name in said}
    found = [agree_on_federation(dict(order), entries) for order in (said.items(), reversed(said.items()))]
    for federation in found:
        assert federation.summarise_scans is not None
        seen = federation.summarise_scans()
        assert seen.patch == (8, 8, 4) and seen.shape == (12, 8, 8)
        assert seen.spacing == ((0.5, 1.0, 2.0), (1.0, 2.0, 3.0))
        assert federation.counts == {"east": 6, "north": 6, "south": 6}


def test_what_hospitals_say_can_be_read_again(tmp_path: Path) -> None:
    config = localise_config(make_hospital_config(remote_config(tmp_path)), device="cpu", threads=1)
    said = json.loads(json.dumps(collect_facts(open_own_federation(config, RULES, "east"))))
    assert DataFacts.model_validate(said).regions == {"lesion": (1,)}
