"""What a run chose from its data, on its page."""

import json
from pathlib import Path

import yaml
from helpers import run

from wardround.comparison.runs import read_run
from wardround.reporting.choices import configuration, plain_setting, postprocessing


def test_postprocessing_is_shown_with_the_dice_of_every_step(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1, evaluate={"metrics": ["dice"], "overlays": 0, "postprocess": "auto"})
    page = postprocessing(read_run(tmp_path / "run"), "r0")
    chosen = json.loads((tmp_path / "run/postprocess.json").read_text())

    assert "Postprocessing" in page and "predictions as they are" in page and "largest part of" in page
    assert f"{chosen['dice']['before']['mean']:.3f}" in page and chosen["note"] in page
    assert sum(chosen["validation_cases"].values()) > 0
    assert f"Chosen by {sum(chosen['validation_cases'].values())} validation cases" in page


def test_steps_have_the_names_of_classes_and_a_column_for_each(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1)
    before = {"mean": 0.5, "regions": {"rim": 0.4, "cup": 0.6}}
    after = {"mean": 0.75, "regions": {"rim": 0.8, "cup": 0.7}}
    tried = [{"classes": [1, 2], "dice": before, "taken": False}]
    tried += [{"classes": [n], "dice": after, "taken": True} for n in (1, 2)]
    dice = {"before": before, "after": after}
    found = {"steps": [[1], [2]], "note": "n", "validation_cases": {"a": 3}, "dice": dice, "tried": tried}
    (tmp_path / "run/postprocess.json").write_text(json.dumps(found))
    facts = json.loads((tmp_path / "run/preparation.json").read_text())
    facts["classes"] = ["background", "rim", "cup"]
    (tmp_path / "run/preparation.json").write_text(json.dumps(facts))
    page = postprocessing(read_run(tmp_path / "run"), "r0")

    for text in (
        "rim and cup together",
        "largest part of cup",
        "0.800",
        "0.750",
        "all steps that were taken",
    ):
        assert text in page
    assert page.count(">yes<") == 2


def test_a_run_that_chose_nothing_has_no_such_sections(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1)
    found = read_run(tmp_path / "run")

    assert postprocessing(found, "r0") == "" and configuration(found, "r0") == ""


def test_methods_that_were_tried_stand_with_their_scores(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1)
    methods = {
        "taken": "fedprox",
        "validation_dice": {"fedavg": 0.5, "fedprox": 0.6125},
        "rounds": 3,
        "refused": {"safcf": "needs three clients"},
    }
    choices = [{"setting": "rounds", "value": 9, "reason": "budget"}]
    (tmp_path / "run/plan.yaml").write_text(yaml.safe_dump({"methods": methods, "choices": choices}))
    page = configuration(read_run(tmp_path / "run"), "r0")

    for text in ("Methods that were tried", "validation Dice", "0.500", "0.612", "needs three clients"):
        assert text in page
    assert "trained for 3 rounds" in page and page.count(">yes<") == 1


def test_settings_are_never_raw_dictionaries() -> None:
    assert plain_setting([40, 56]) == "[40, 56]"
    augmentation = {"rotate": 15, "mirror": True, "chances": {"noise": 0.1}, "gamma": None}
    assert plain_setting(augmentation) == "rotate 15, mirror yes, chances (noise 0.1), gamma none"
