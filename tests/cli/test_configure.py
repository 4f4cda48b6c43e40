"""From folders to a model without a configuration: train, configure, resume, budgets and their mistakes."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import yaml
from helpers import call
from pytest import CaptureFixture, MonkeyPatch, fixture, mark

from wardround.api import Result
from wardround.configuring import method_choice, run_plan
from wardround.configuring.budget import BUDGETS, Budget, Pace
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write
from wardround.engine.experiment import Experiment
from wardround.yaml_file import read_yaml

TINY = [
    *("--set", "model.base_filters=2", "--set", "compute.threads=1", "--set", "compute.workers=1"),
    *(
        "--set",
        "evaluate.overlays=0",
        "--set",
        "evaluate.calibrate=false",
        "--set",
        "evaluate.metrics=[dice]",
    ),
]
PLANS = {  # of nnU-Net, for pictures of 32x32
    "original_median_shape_after_transp": [1, 32, 32],
    "image_reader_writer": "NaturalImage2DIO",
    "transpose_forward": [0, 1, 2],
    "configurations": {
        "2d": {
            "batch_size": 3,
            "patch_size": [32, 16],
            "spacing": [1.0, 1.0],
            "normalization_schemes": ["RescaleTo01Normalization"],
            "use_mask_for_norm": [False],
            "architecture": {
                "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
                "arch_kwargs": {
                    "n_stages": 2,
                    "features_per_stage": [4, 8],
                    "kernel_sizes": [[3, 3], [3, 3]],
                    "strides": [[1, 1], [2, 2]],
                    "n_conv_per_stage": [1, 1],
                    "n_conv_per_stage_decoder": [1],
                    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm2d",
                },
            },
            "batch_dice": True,
        }
    },
}
PACE = Pace(step=1.0, round=1.0, validation=2.0, once=5.0)


@fixture(scope="module")
def hospitals(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("made") / "hospitals"
    write(PhantomSettings(hospitals=2, size=32, cases=10), folder, "png", seed=1)
    return Path(folder)


@fixture
def here(hospitals: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The current directory, with two hospitals in it; timing takes no time."""
    shutil.copytree(hospitals, tmp_path / "hospitals")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_plan, "measure_pace", lambda config: PACE)
    return tmp_path


@fixture
def do(here: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> Any:
    def command(*arguments: str, code: int = 0) -> str:
        found, out, err = call(monkeypatch, capsys, *arguments)
        assert found == code, out + err
        return out + err

    return command


def sha256(folder: str) -> str:
    return str(json.loads((Path(folder) / "result.json").read_text())["params_sha256"])


# Train


def test_a_plan_also_trains_on_pooled_cases(do: Any, here: Path) -> None:
    do("train", "hospitals", "--budget", "2", *TINY, "--set", "method.name=centralised")

    run = here / "runs" / "hospitals"
    assert yaml.safe_load((run / "config.yaml").read_text())["min_clients"] == 2
    assert json.loads((run / "postprocess.json").read_text())["validation_cases"].keys() == {"north", "east"}


def test_a_folder_is_all_that_train_needs(do: Any, here: Path) -> None:
    told = do("train", "hospitals", "--budget", "4", *TINY)

    assert "Wrote federation.yaml" in told and "hospitals: 12 training cases at 2 clients, 2D" in told
    for word in ("network", "nnunet", "optimizer", "fedavg", "4 steps of each client", "| north |"):
        assert word in told
    assert len(told[told.index("hospitals: 12") : told.index("All choices")].splitlines()) <= 24
    run = here / "runs" / "hospitals"
    assert (run / "report.html").exists() and (here / "federation.yaml").exists()
    assert "How this run was configured" in (run / "report.html").read_text()
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    assert plan["budget"] == "4" and plan["steps_of_each_client"] == 4
    assert all(choice["reason"] for choice in plan["choices"])
    found = {choice["setting"]: choice for choice in plan["choices"]}
    assert found["model.base_filters"]["value"] == 2
    assert found["model.base_filters"]["reason"].startswith("as you set it; the plan had")


def test_a_list_is_data_and_what_was_guessed_is_said(do: Any, here: Path) -> None:
    rows = [
        f"hospitals/{name}/images/{path.name},hospitals/{name}/labels/{path.name},{name}"
        for name in ("north", "east")
        for path in sorted((here / "hospitals" / name / "images").iterdir())
    ]
    (here / "cases.csv").write_text("\n".join(["foto,contour,hospital", *rows]))

    told = " ".join(do("train", "cases.csv", "--budget", "2", "--no-report", *TINY).split())

    assert "image from 'foto' (a guess), label from 'contour' (a guess), client from 'hospital'" in told
    assert "training cases at 2 clients, 2D" in told and "| north |" in told
    source = yaml.safe_load((here / "federation.yaml").read_text())["sources"][0]
    assert source["columns"] == {"image": "foto", "label": "contour"}
    do("configure", "cases.csv", "-o", "run.yaml", "--budget", "2", *TINY)
    assert (here / "run.yaml").exists()


def test_fingerprints_are_in_the_ledger(do: Any, here: Path) -> None:
    do("train", "hospitals", "--budget", "4", "-q", "--no-report", *TINY)
    ledger = (here / "runs" / "hospitals" / "egress.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in ledger]

    assert [line["client"] for line in lines if line["task"] == "fingerprint"] == ["east", "north"]
    assert lines[0]["task"] == "fingerprint" and lines[0]["round"] == 0 and lines[0]["bytes"] > 100


def test_configure_writes_the_same_run_as_a_file(do: Any, here: Path) -> None:
    do("train", "hospitals", "--budget", "4", "-q", "--no-report", *TINY)
    told = do("configure", "federation.yaml", "--budget", "4", "-o", "run.yaml", *TINY)
    text = (here / "run.yaml").read_text()
    do("train", "run.yaml", "-q", "--no-report", "--set", "output=runs/again")

    assert "Next: wardround train run.yaml" in told
    assert sha256("runs/again") == sha256("runs/hospitals")
    assert "# the folder of the data\nname: hospitals\n" in text
    settings = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    reasons = [line for line in text.splitlines() if line.strip().startswith("#")]
    assert len(reasons) > len(settings) / 2
    assert "run.yaml already exists" in do("configure", "federation.yaml", "--budget", "4", code=2)


def test_a_planned_run_continues_without_measuring_again(
    do: Any, here: Path, monkeypatch: MonkeyPatch
) -> None:
    do("train", "hospitals", "--budget", "40", "-q", "--no-report", *TINY)
    whole = sha256("runs/hospitals")
    once: list[int] = []
    save = Experiment._save_round

    def stop_after_two(self: Experiment, state: Any, *given: Any) -> None:
        save(self, state, *given)
        self.stop_requested = state.round == 2 and not once

    monkeypatch.setattr(Experiment, "_save_round", stop_after_two)
    do("train", "hospitals", "--budget", "40", "-q", "--overwrite", *TINY, code=130)
    once.append(1)
    monkeypatch.setattr(run_plan, "measure_federation", lambda *given, **named: 1 / 0)
    before = (here / "runs" / "hospitals" / "plan.yaml").read_text()

    assert "was planned for --budget 40" in do("train", "hospitals", "--resume", "--budget", "2h", code=2)
    do("train", "federation.yaml", "--resume", "-q", "--budget", "40")

    assert sha256("runs/hospitals") == whole
    assert (here / "runs" / "hospitals" / "plan.yaml").read_text() == before
    tasks = [json.loads(s)["task"] for s in (here / "runs/hospitals/egress.jsonl").read_text().splitlines()]
    assert tasks.count("fingerprint") == 2


def test_an_earlier_run_is_replaced_only_when_asked(do: Any, monkeypatch: MonkeyPatch) -> None:
    do("train", "hospitals", "--budget", "4", "-q", "--no-report", *TINY)
    with monkeypatch.context() as patched:
        patched.setattr(run_plan, "measure_federation", lambda *given, **named: 1 / 0)  # refused before it
        assert "already holds a run" in do("train", "hospitals", "--budget", "4", code=2)

    do("train", "hospitals", "--budget", "4", "-q", "--no-report", "--overwrite", *TINY)


def test_a_plan_goes_with_the_run_it_was_made_for(do: Any, here: Path) -> None:
    do("train", "hospitals", "--budget", "4", "-q", "--no-report", *TINY)
    do("configure", "federation.yaml", "--budget", "4", "-q", *TINY)

    do("train", "run.yaml", "--overwrite", "-q", "--no-report")

    assert not (here / "runs" / "hospitals" / "plan.yaml").exists()


def test_a_single_centre_becomes_artificial_clients_and_says_so(do: Any, here: Path) -> None:
    shutil.rmtree(here / "hospitals")
    write(PhantomSettings(hospitals=1, size=32, cases=16), here / "hospitals", "png", seed=1)

    told = do("train", "hospitals", "--budget", "2", "--no-report", *TINY)

    assert "ARTIFICIAL CLIENTS: 4 clients were made from the cases (iid)" in told
    assert "ARTIFICIAL" in (here / "runs" / "hospitals" / "plan.yaml").read_text()


# Budgets


def test_a_time_becomes_steps_at_the_measured_pace(do: Any, here: Path) -> None:
    told = do("configure", "hospitals", "--budget", "5m", *TINY)

    made = read_yaml(here / "run.yaml")
    steps = made["rounds"] * made["local_steps"]
    assert 0.9 * 300 <= PACE.predict(steps, made["rounds"], 10) <= 315
    assert "about 5 min" in told and "timing training steps" in told


def test_a_budget_too_short_says_what_it_needs(do: Any) -> None:
    told = do("configure", "hospitals", "--budget", "20s", code=2)

    assert "--budget 20s is too short" in told and "--budget 1m or more" in told


def test_full_trains_the_best_of_a_short_list(do: Any, here: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGETS, "full", Budget("full", steps=4, tries_methods=True))
    monkeypatch.setattr(method_choice, "METHODS_TRIED", {"fedavg": {}, "fedprox": {"mu": 0.1}})
    monkeypatch.setattr(method_choice, "MARGIN", -1.0)  # the other wins whatever it scores
    monkeypatch.setattr(
        method_choice, "read_score", lambda result, metric: 0.5 + 0.1 * (result.config.name != "fedavg")
    )

    told = do("train", "hospitals", "--budget", "full", *TINY)

    run = here / "runs" / "hospitals"
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    assert plan["methods"]["taken"] == "fedprox"
    assert plan["methods"]["validation_dice"] == {"fedavg": 0.5, "fedprox": 0.6}
    assert Result.load(run).config.method == {"name": "fedprox", "mu": 0.1}
    assert "Method fedprox: validation dice 0.600 after 3 rounds, against fedavg 0.500" in told
    page = (run / "report.html").read_text()
    assert "against fedavg 0.500" in page and "Methods that were tried" in page
    assert "method_choice" not in page  # it is no number that weights are computed from
    first, *others = Result.load(run).records
    assert first["method_choice"] == plan["methods"]
    assert all("method_choice" not in record for record in others)
    assert not (run / "choice" / "fedavg" / "checkpoints").exists()


def test_an_interrupted_choice_is_resumed_with_the_plan_it_began_with(
    do: Any, here: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setitem(BUDGETS, "full", Budget("full", steps=4, tries_methods=True))
    monkeypatch.setattr(method_choice, "METHODS_TRIED", {"fedavg": {}})
    do("train", "hospitals", "--budget", "2", "-q", "--no-report", *TINY)  # a run that is replaced

    def interrupt(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(method_choice, "run_all", interrupt)
        told = do("train", "hospitals", "--budget", "full", "--overwrite", *TINY, code=130)
    assert "Stopped while choosing the method; what was tried is kept" in told
    assert "Add --resume" in do("train", "runs/hospitals", code=2)
    monkeypatch.setattr(run_plan, "measure_federation", lambda *given, **named: 1 / 0)

    do("train", "runs/hospitals", "--resume", "-q", "--no-report")

    assert yaml.safe_load((here / "runs/hospitals/plan.yaml").read_text())["methods"]["taken"] == "fedavg"
    assert (here / "runs/hospitals/result.json").exists()


# Ctrl-C


def test_ctrl_c_while_measuring_or_timing_is_one_sentence(
    do: Any, here: Path, monkeypatch: MonkeyPatch
) -> None:
    def press(*given: Any, **named: Any) -> Any:
        assert gc.isenabled()  # else a long collection follows, whose finalizers swallow a Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)

    for stage in ("measure_federation", "measure_pace"):
        with monkeypatch.context() as patched:
            patched.setattr(run_plan, stage, press)
            told = do("train", "hospitals", *TINY, code=130)
        assert "Stopped before training; nothing was lost" in told
        assert not (here / "runs").exists()


# Mistakes


@mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "hospitals", "--budget", "abc"], "--budget is 'abc'"),
        (["train", "nowhere"], "nowhere does not exist"),
        (["train", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["train", "empty"], "empty"),
        (["train", "hospitals", "run.yaml"], "run.yaml is one of 2 arguments"),
        (["train", "run.yaml", "--budget", "quick"], "--budget plans a run"),
        (["configure", "run.yaml"], "is a configuration already"),
        (["train", "hospitals", "--resume"], "holds no run to resume"),
        (["train", "hospitals", "--budget", "4", "--set", "rouns=3"], "Did you mean 'rounds'"),
        (["train", "hospitals", "--budget", ""], "--budget is ''"),
        (["train", "misspelt.yaml"], "sorces is not a setting. Did you mean 'sources'"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(
    do: Any, here: Path, arguments: list[str], sentence: str, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plan, "measure_federation", lambda *given, **named: 1 / 0)
    (here / "empty").mkdir()
    (here / "run.yaml").write_text("rounds: 1\n")
    (here / "misspelt.yaml").write_text("version: 1\nsorces: [{path: hospitals}]\n")

    told = do(*arguments, code=2)

    assert sentence in told and "Traceback" not in told


def test_data_that_cannot_be_trained_on_are_refused_in_a_sentence(do: Any, here: Path) -> None:
    do("data", "init", "hospitals", "-q")
    text = (here / "federation.yaml").read_text()

    def told(change: str, into: str) -> str:
        assert change in text
        (here / "federation.yaml").write_text(text.replace(change, into))
        return str(do("train", "federation.yaml", "--budget", "4", code=2))

    assert "class 'ghost' is in no training case" in told("labels:\n", "labels:\n  ghost: [9]\n")
    assert "has one client that trains, 'north'; a federation needs two" in told(
        "clients: [east, north]", "clients: [north]"
    )
    shutil.rmtree(here / "hospitals" / "north" / "labels")
    shutil.rmtree(here / "hospitals" / "east" / "labels")
    (here / "federation.yaml").unlink()
    assert "label" in do("train", "hospitals", code=2)


def test_a_federation_file_of_other_folders_is_not_touched(do: Any, here: Path) -> None:
    do("data", "init", "hospitals", "-q")
    before = (here / "federation.yaml").read_text()
    shutil.copytree(here / "hospitals", here / "others")

    assert "describes other folders" in do("train", "others", "--budget", "4", code=2)
    assert (here / "federation.yaml").read_text() == before
    assert "Using federation.yaml" in do("configure", "hospitals", "--budget", "4")


# nnU-Net's plan


def test_a_plan_of_nnunet_is_taken_over_and_trains(do: Any, here: Path) -> None:
    Path("nnUNetPlans.json").write_text(json.dumps(PLANS))
    do("configure", "hospitals", "--from", "nnUNetPlans.json", "--budget", "20", "-o", "run.yaml")
    found = read_yaml(Path("run.yaml"))
    assert (found["data"]["patch"], found["batch_size"], found["model"]["levels"]) == ([32, 16], 3, 2)
    assert found["data"]["prepare"]["normalise"] == "minmax"
    assert "# from nnUNetPlans.json, 2d" in Path("run.yaml").read_text()
    quick = ["--set", "rounds=1", "--set", "local_steps=1", "--set", "output=run", *TINY[2:]]
    do("train", "run.yaml", "--quiet", "--no-report", *quick)
    assert (here / "run" / "result.json").exists()


def test_settings_that_do_not_fit_together_leave_no_file(do: Any, here: Path) -> None:
    damaged = json.loads(json.dumps(PLANS))
    damaged["configurations"]["2d"]["architecture"]["arch_kwargs"]["strides"] = [[1, 1], [0.5, 2]]
    Path("nnUNetPlans.json").write_text(json.dumps(damaged))
    assert "nnUNetPlans.json" in do("configure", "hospitals", "--from", "nnUNetPlans.json", code=2)

    told = do("configure", "hospitals", "--budget", "20", "--set", "model.levels=2", code=2)

    assert "model.arguments.kernels has" in told and not (here / "run.yaml").exists()


@mark.parametrize(
    ("words", "told"),
    [
        (["--from", "none.json"], "none.json"),
        (
            ["--from", "nnUNetPlans.json", "--configuration", "3d_lowres"],
            "configuration 3d_lowres is not in it",
        ),
        (["--configuration", "2d"], "give it with --from"),
    ],
)
def test_a_plan_that_cannot_be_taken_over_ends_before_anything_is_measured(
    do: Any, words: list[str], told: str
) -> None:
    Path("nnUNetPlans.json").write_text(json.dumps(PLANS))
    assert told in " ".join(do("configure", "hospitals", *words, code=2).split())
    assert not Path("federation.yaml").exists()
