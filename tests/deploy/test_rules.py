"""A hospital's rules: what is refused, with which words, and what leaves."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from helpers import config
from pytest import mark

from wardround.config_file import resolve
from wardround.deploy import site_file
from wardround.deploy.rules import Rules, case_numbers, list_choices
from wardround.deploy.site_file import SiteFile
from wardround.engine.judging.evaluation import gather
from wardround.messages import Message, Reply
from wardround.params import Params

NOON = datetime(2026, 3, 4, 12, 0)


def rules(**settings: Any) -> Rules:
    return Rules(SiteFile.model_validate(settings), clock=lambda: NOON)


# Requests


def test_by_default_no_mean_images_and_no_personal_model_may_be_asked_for(tmp_path: Path) -> None:
    for task in site_file.TASKS:
        refused = rules().refuses_request(task, config=config(tmp_path), bytes=10**9)
        assert (refused is None) == (task not in ("contribute", "personal_model"))
        assert rules(tasks="all").refuses_request(task) is None


def test_a_task_outside_the_list_is_refused_by_name() -> None:
    site = rules(tasks=["train", "evaluate"])
    assert site.refuses_request("train") is None and site.refuses_request("register") is None
    reason = site.refuses_request("contribute")
    assert reason == "task 'contribute' is not allowed at this hospital (tasks in its site.yaml)"
    assert rules(tasks="all").refuses_request("os.system") is not None


def test_a_private_hospital_gives_no_fingerprint_which_has_no_noise() -> None:
    for tasks in ("all", ["fingerprint"]):
        site = rules(tasks=tasks, privacy={"level": "case", "cases": 20})
        assert "a fingerprint has no noise" in (site.refuses_request("fingerprint") or "")
    assert rules(privacy={"secure_sum": True}).refuses_request("fingerprint") is None


@mark.parametrize(
    ("settings", "asked", "reason"),
    [
        ({"methods": ["fedavg"]}, {"method": {"name": "fedprox"}}, "method 'fedprox'"),
        ({"methods": ["fedprox"]}, {}, "method 'fedavg'"),
        ({"networks": ["unet3d"]}, {}, "network 'unet2d'"),
        ({"objectives": ["cross_entropy"]}, {}, "objective '"),
        ({"objectives": ["dice"]}, {"method": {"name": "fedevi"}}, "objective 'evidential'"),
        ({"runs": ["prostate-*"]}, {"name": "tiny"}, "run 'tiny'"),
        ({}, {"model": {"name": "mine.nets:Net"}}, "network 'mine.nets:Net'"),
        ({}, {"model": {"name": "monai:SegResNet"}}, "network 'monai:SegResNet'"),
        ({"networks": "all"}, {"model": {"name": "mine.nets:Net"}}, "network 'mine.nets:Net'"),
        ({}, {"method": {"name": "mine.rules:Mine"}}, "method 'mine.rules:Mine'"),
        ({}, {"objective": {"name": "mine.losses:Mine"}}, "objective 'mine.losses:Mine'"),
        ({}, {"evaluate": {"metrics": ["dice", "mine.scores:odd"]}}, "metric 'mine.scores:odd'"),
        ({}, {"evaluate": {"select": "mine.scores:odd"}}, "metric 'mine.scores:odd'"),
        ({}, {"evaluate": {"metrics": "mine.scores:odd"}}, "metric 'mine.scores:odd'"),
        ({"metrics": ["dice"]}, {"evaluate": {"metrics": ["dice", "hd95"]}}, "metric 'hd95'"),
        ({}, {"method": {"name": "unheard"}}, "method 'unheard'"),
        ({}, {"method": {"name": None}}, "method 'None'"),
    ],
)
def test_a_run_outside_the_lists_is_refused_by_name(
    settings: dict[str, Any], asked: dict[str, Any], reason: str
) -> None:
    found = rules(**settings).refuses_request("train", config=asked)
    assert found is not None and found.startswith(reason) and "is not allowed at this hospital" in found


@mark.parametrize(
    ("settings", "asked"),
    [
        ({"methods": ["fedavg", "fedprox"]}, {"method": {"name": "fedprox"}}),
        ({"networks": ["unet2d"]}, {}),
        ({"objectives": ["evidential"]}, {"method": {"name": "fedevi"}}),
        ({"runs": ["prostate-*"]}, {"name": "prostate-3"}),
        ({"networks": "all"}, {"model": {"name": "monai:SegResNet"}}),
        ({"networks": ["own", "monai:SegResNet"]}, {"model": {"name": "monai:SegResNet"}}),
        ({"networks": ["own", "monai:SegResNet"]}, {"model": {"name": "gelan"}}),
        ({"networks": ["mine.nets:Net"]}, {"model": {"name": "mine.nets:Net"}}),
        ({"networks": ["all", "mine.nets:Net"]}, {"model": {"name": "mine.nets:Net"}}),
        ({"networks": ["all", "mine.nets:Net"]}, {"model": {"name": "unet3d"}}),
        (
            {
                "methods": ["all", "mine.rules:Mine"],
                "objectives": "mine.losses:Mine",
                "metrics": ["all", "mine:odd"],
            },
            {
                "method": {"name": "mine.rules:Mine"},
                "objective": {"name": "mine.losses:Mine"},
                "evaluate": {"metrics": ["dice", "mine:odd"]},
            },
        ),
    ],
)
def test_a_run_inside_the_lists_is_not_refused(settings: dict[str, Any], asked: dict[str, Any]) -> None:
    assert rules(**settings).refuses_request("train", config=asked) is None


def test_settings_are_judged_alike_before_and_after_they_are_parsed(tmp_path: Path) -> None:
    checked = config(tmp_path, method={"name": "fedevi"})
    assert list_choices(checked) == list_choices(resolve(checked))
    assert list_choices(checked)["objective"] == "evidential"


# What could leave one case alone


def test_which_cases_train_is_never_the_organisers_choice() -> None:
    reason = rules().refuses_request("train", config={"data": {"splits": {"ratios": [0.01, 0, 0.99]}}})
    assert reason is not None and reason.startswith("the run sets data.splits")
    assert rules().refuses_request("train", config={"data": {"splits": None}}) is None


@mark.parametrize("split", ["train", "names", None, ["val"]])
def test_scores_of_single_cases_leave_for_validation_and_test_alone(split: Any) -> None:
    asked = Message(scalars={"split": split, "metrics": ["dice"]})
    reason = rules().refuses_rows("evaluate", asked)
    assert reason is not None and "is not allowed at this hospital (rows in its site.yaml)" in reason
    assert rules().refuses_rows("evaluate", Message(scalars={"split": "test"})) is None
    assert (rules(rows="train").refuses_rows("evaluate", asked) is None) == (split == "train")


ALONE = {
    "steps that see few cases": (
        {"local_steps": 4, "batch_size": 2},
        "local_steps is 4 with batch_size 2, but a training task learns from at least 10 cases",
    ),
    "a batch of one": ({"batch_size": 1}, "batch_size is 1, but a training step has at least 2 cases"),
    "weights that forget": (
        {"optimizer": {"name": "sgd", "learning_rate": 1.0, "weight_decay": 1.0}},
        "optimizer.weight_decay let a task forget all but its last steps",
    ),
    "weights that forget half": (
        {"optimizer": {"name": "adamw", "learning_rate": 1.0, "weight_decay": 0.5}, "batch_size": 32},
        "which may have fewer than 10 cases",
    ),
    "a pull to the old model": (
        {"method": {"name": "fedprox", "mu": 100.0}, "optimizer": {"name": "sgd", "learning_rate": 0.01}},
        "optimizer.weight_decay and method.mu let a task forget",
    ),
    "means of a few": (
        {"method": {"name": "fedmix"}, "objective": {"name": "dice_bce"}},
        "method.group is 5, but a mean image of this hospital has 10 cases or more",
    ),
    "spectra of one": ({"method": {"name": "feddg"}}, "method 'feddg' sends spectra of single images"),
}


@mark.parametrize("way", ALONE)
def test_settings_that_leave_a_handful_of_cases_behind_an_answer_are_refused(
    way: str, tmp_path: Path
) -> None:
    changes, words = ALONE[way]
    reason = rules().refuses_run(config(tmp_path, **changes))
    assert reason is not None and words in reason and "in its site.yaml" in reason
    assert rules(min_cases=0, min_batch=1).refuses_run(config(tmp_path, **changes)) is None


@mark.parametrize(
    "changes",
    [
        {"optimizer": {"name": "sgd", "learning_rate": 0.1, "weight_decay": 1e-2}},
        {"method": {"name": "fedprox", "mu": 1.0}, "optimizer": {"learning_rate": 0.1}},
        {"method": {"name": "fedbr"}},
        {"method": {"name": "fedmix", "group": 10}, "objective": {"name": "dice_bce"}},
    ],
)
def test_usual_settings_are_not_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert rules().refuses_run(config(tmp_path, **changes)) is None


def test_a_method_that_sends_single_spectra_runs_where_it_is_named(tmp_path: Path) -> None:
    asked = config(tmp_path, method={"name": "feddg"})
    assert rules(methods=["all", "feddg"]).refuses_run(asked) is None


def test_a_model_that_a_few_chosen_cases_trained_does_not_leave() -> None:
    reason = rules().too_few_behind(3)
    assert reason is not None and "on fewer than 10 cases" in reason and "3" not in reason
    assert rules().too_few_behind(10) is None and rules().too_few_behind(0) is None


def test_the_hospitals_own_number_of_threads_is_not_limited(tmp_path: Path) -> None:
    asked = config(tmp_path, compute={"threads": 100})
    assert "compute.threads is 100" in str(rules().refuses_run(asked))
    assert rules(threads=100).refuses_run(asked) is None


# Sizes and hours


def test_a_request_over_the_cap_is_refused_with_both_sizes() -> None:
    site = rules(largest_message="500 MB")
    assert site.refuses_request("train", bytes=500_000_000) is None
    reason = site.refuses_request("train", bytes=600_000_000)
    assert reason is not None and "600.0 MB" in reason and "at most 500.0 MB" in reason


@mark.parametrize(
    ("hours", "now", "opens"),
    [
        (["22:00-06:00"], "2026-03-04T23:10:59", "2026-03-05T06:00"),
        (["22:00-06:00"], "2026-03-04T05:59", "2026-03-04T06:00"),
        (["22:00-06:00"], "2026-03-04T06:00", None),
        (["22:00-06:00"], "2026-03-04T21:59:59", None),
        (["22:00-06:00", "06:00-08:30"], "2026-03-04T22:00", "2026-03-05T08:30"),
        (["12:00-24:00"], "2026-02-28T23:59", "2026-03-01T00:00"),
        ("08:00-09:00", "2026-03-04T08:30", "2026-03-04T09:00"),
        ([], "2026-03-04T03:00", None),
    ],
)
def test_quiet_hours_refuse_and_say_when_they_end(hours: Any, now: str, opens: str | None) -> None:
    reason = rules(quiet_hours=hours).refuses_request("train", now=datetime.fromisoformat(now))
    if opens is None:
        assert reason is None
    else:
        assert reason is not None and f"they end at {opens}" in reason


def test_quiet_hours_go_by_the_hospitals_own_clock() -> None:
    assert rules(quiet_hours=["11:00-13:00"]).refuses_request("train") is not None
    aware = NOON.astimezone().astimezone(UTC)  # the same moment, told in another zone
    assert rules(quiet_hours=["11:00-13:00"]).refuses_request("train", now=aware) is not None
    assert rules(quiet_hours=["13:00-11:00"]).refuses_request("train", now=aware) is None


# Replies


ROWS = [
    {"case": name, "loss": loss, "regions": {"lesion": {"dice": loss}}}
    for name, loss in (("patient-zoe", 0.1), ("patient-ann", 0.7), ("patient-max", float("inf")))
]


def test_names_of_cases_become_numbers_that_stay_the_same() -> None:
    site = rules()
    first = site.filter_message("evaluate", Message(scalars={"cases": ROWS}))
    assert [row["case"] for row in first.scalars["cases"]] == ["case-0003", "case-0001", "case-0002"]
    other_order = site.filter_message("calibrate", Message(scalars={"cases": ROWS[::-1]}))
    assert [row["case"] for row in other_order.scalars["cases"]] == ["case-0002", "case-0001", "case-0003"]
    assert [row["loss"] for row in first.scalars["cases"]] == [0.1, 0.7, float("inf")]
    assert "patient" not in str(first) and ROWS[0]["case"] == "patient-zoe"


def test_numbers_instead_of_names_change_no_score() -> None:
    sent = Message(scalars={"cases": ROWS})
    number_cases = rules().filter_message("evaluate", sent)
    results = [
        gather([Reply(scalars=m.scalars, client="north")], ["dice"]).as_dict() for m in (sent, number_cases)
    ]
    assert str(results[0]) == str(results[1])


def test_names_are_kept_where_the_hospital_says_so() -> None:
    sent = Message(scalars={"cases": ROWS})
    assert rules(case_names="keep").filter_message("evaluate", sent) is sent


def test_a_model_leaves_untouched() -> None:
    sent = Message(params=Params({"w": torch.ones(2)}), scalars={"P": 0.5, "logits": [0.1, 0.2], "cases": 3})
    assert rules().filter_message("train", sent) is sent


def test_numbers_do_not_run_out() -> None:
    numbers = case_numbers(f"{n:05d}" for n in range(12_000))
    assert len(set(numbers.values())) == 12_000 and numbers["11999"] == "case-12000"


def test_a_scalar_that_may_not_leave_refuses_the_reply_by_name() -> None:
    site = rules(scalars=["P", "loss/*", "calibrate/*"])
    assert site.refuses_reply("train", Message(scalars={"P": 1.0}), 10, 30) is None
    reason = site.refuses_reply("train", Message(scalars={"P": 1.0, "Q": 2.0}), 10, 30)
    assert reason == "the answer holds 'Q', which may not leave this hospital (scalars in its site.yaml)"
    cases = Message(scalars={"cases": ROWS})
    assert site.refuses_reply("calibrate", cases, 10, 30) is None
    assert site.refuses_reply("evaluate", cases, 10, 30) is not None


def test_registering_is_not_a_matter_of_scalars() -> None:
    sent = Message(scalars={"registration": {}, "facts": {}})
    assert rules(scalars=[]).refuses_reply("register", sent, 10, 30) is None


def test_training_losses_are_only_shown_so_they_are_left_out() -> None:
    loss = {"first": 0.7, "last": 0.2}
    assert rules().filter_loss("train", loss) == loss
    assert rules(scalars=["loss/last"]).filter_loss("train", loss) == {"last": 0.2}
    assert rules(scalars=[]).filter_loss("train", loss) == {}


def test_too_few_cases_tell_the_minimum_and_not_the_number() -> None:
    site = rules(min_cases=20)
    assert site.refuses_reply("train", Message(), 10, 20) is None
    reason = site.refuses_reply("register", Message(), 10, 13)
    assert reason is not None and "at least 20 training cases" in reason and "13" not in reason


def test_an_answer_over_the_cap_does_not_leave() -> None:
    reason = rules(largest_message="1 MB").refuses_reply("train", Message(), 2_000_000, 30)
    assert reason is not None and reason.startswith("the answer has 2.0 MB")


# Failures


@mark.parametrize(
    "failure",
    [
        "client 'north', case 'p017': image is 384x384x24 but label is 320x320x24.",
        "/data/scans/patient-ann.nii.gz cannot be read: Permission denied.",
        "FileNotFoundError: [Errno 2] No such file: 'C:\\scans\\ann.nii'",
        "KeyError: 'patient-ann'",
        "site.yaml: it is not clear which client of federation.yaml 'north' is. Its clients: ann, max.",
    ],
)
def test_a_failure_that_speaks_of_files_or_cases_stays_here(failure: str) -> None:
    told = rules().redact(failure, ["patient-ann", "p017"])
    assert told.startswith("the task failed") and "hospital's log" in told
    assert not any(word in told for word in ("ann", "p017", "scans", "384"))


def test_the_kind_of_a_failure_may_be_told() -> None:
    assert "(KeyError)" in rules().redact("KeyError: 'patient-ann'", ["patient-ann"])


def test_a_failure_without_names_is_told_as_it_is() -> None:
    failure = "round 12, client 'east', train: the loss became NaN at step 13. Last learning_rate 0.1."
    assert rules().redact(failure, ["12"]) != failure  # a case of that name
    assert rules().redact(failure, ["p017", "3", ""]) == failure
    assert rules(case_names="keep").redact("case 'p017' is empty", ["p017"]) == "case 'p017' is empty"
