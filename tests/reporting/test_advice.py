"""What to do next: each sentence stands for something that the run shows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from helpers import run
from pytest import fixture

from wardround.comparison.runs import Run, read_run
from wardround.reporting.advice import next_steps


@fixture
def folder(tmp_path: Path) -> Path:
    run(tmp_path / "run")
    return tmp_path / "run"


def with_curve(folder: Path, means: Sequence[float], **changes: Any) -> Run:
    """The run with another curve of validation Dice, and other settings."""
    record = json.loads((folder / "records.jsonl").read_text().splitlines()[-1])
    lines = []
    for number, mean in enumerate(means, start=1):
        record["validation"]["dice"]["mean"] = mean
        lines.append(json.dumps({**record, "round": number}) + "\n")
    (folder / "records.jsonl").write_text("".join(lines))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "rounds": len(means), **changes}))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "rounds": len(means)}))
    return read_run(folder)


def with_cases(folder: Path, scores: dict[str, dict[str, list[float]]]) -> Run:
    """The run with other Dice: client -> region -> values."""
    lines = ["client,case,region,dice"]
    result = json.loads((folder / "result.json").read_text())
    clients = result["test"]["dice"]["clients"]
    some = next(iter(clients.values()))
    result["test"]["dice"]["clients"] = {}
    for client, regions in scores.items():
        for region, values in regions.items():
            lines += [f"{client},p{number},{region},{value}" for number, value in enumerate(values)]
        known = [value for values in regions.values() for value in values if value == value]
        summary = {**some, "mean": sum(known) / max(1, len(known)), "num": len(known)}
        result["test"]["dice"]["clients"][client] = summary
    (folder / "cases.csv").write_text("\n".join(lines) + "\n")
    (folder / "result.json").write_text(json.dumps(result))
    return read_run(folder)


def test_a_curve_that_still_rises_is_trained_longer(folder: Path) -> None:
    page = next_steps(with_curve(folder, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]), "r0")

    assert "Validation Dice still rises (0.750 over the last 2 validations, 0.550 before)" in page
    assert f"wardround train {folder} --resume --set rounds=16" in page


def test_a_learning_rate_that_has_ended_is_not_resumed(folder: Path) -> None:
    optimizer = {"name": "sgd", "schedule": {"name": "polynomial"}}
    rising = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    page = next_steps(with_curve(folder, rising, optimizer=optimizer), "r0")

    assert "polynomial learning rate has come to its end" in page and "--resume" not in page


def test_a_curve_that_falls_again_is_not_trained_longer(folder: Path) -> None:
    page = next_steps(with_curve(folder, [0.1, 0.5, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6]), "r0")

    assert "was best after round 3 of 8 (0.800) and is 0.600 at the end" in page


def test_few_rounds_show_no_trend(folder: Path) -> None:
    assert "rises" not in next_steps(with_curve(folder, [0.1, 0.5, 0.9]), "r0")


def test_a_client_that_lags_is_named_with_its_scores(folder: Path) -> None:
    good = {"lesion": [0.8, 0.8]}
    page = next_steps(
        with_cases(folder, {"east": good, "north": good, "south": {"lesion": [0.5, 0.7]}}), "r0"
    )

    assert "lags (Dice 0.600 over 2 values, 0.800 at the others)" in page and ">south<" in page
    assert 'href="#r0-cases"' in page and "--methods fedavg,safcf,fedbn,ditto" in page


def test_clients_that_annotate_different_structures_are_compared_in_the_same_ones(folder: Path) -> None:
    hard, easy = {"cup": [0.3, 0.3]}, {"disc": [0.9, 0.9]}
    assert " lags" not in next_steps(with_cases(folder, {"east": hard, "north": easy}), "r0")

    found = {"east": hard, "north": easy, "south": {"disc": [0.9, 0.9], "cup": [0.1, 0.1]}}
    page = next_steps(with_cases(folder, found), "r0")
    assert ">south<" in page and " lags in cup (Dice 0.100 over 2 values, 0.300 at the others)" in page


def test_a_class_that_some_outline_alone_is_not_known_elsewhere(folder: Path) -> None:
    both = {"disc": [0.9], "cup": [0.8]}
    page = next_steps(with_cases(folder, {"east": both, "north": {"disc": [0.9]}}), "r0")

    assert "Tested only where they are outlined: " in page and ">cup<" in page and ">east<" in page
    assert ">disc<" not in page

    page = next_steps(with_cases(folder, {"east": {"cup": [0.8]}, "north": {"disc": [0.9]}}), "r0")
    assert page.count("may find such a class there alone") == 1 and ">cup<" in page and ">disc<" in page


def test_a_class_that_is_never_found_and_one_that_is_not_there_are_named(folder: Path) -> None:
    nan = float("nan")
    found = {"east": {"rim": [0.8], "cup": [0.0]}, "north": {"rim": [0.8], "cup": [nan]}}
    page = next_steps(with_cases(folder, found), "r0")

    assert "is found in no test case (Dice 0)" in page and page.count(">cup<") == 2
    assert "is missing in the test cases of " in page and ">north<" in page and ">rim<" not in page


def test_where_nothing_stands_out_the_model_is_used(folder: Path) -> None:
    good = {"lesion": [0.8, 0.8]}
    page = next_steps(with_cases(folder, {"east": good, "north": good}), "r0")

    assert "Nothing stands out." in page and f"wardround predict {folder} SCANS" in page
