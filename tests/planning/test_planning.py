"""wardround plan: what a run will take, estimated before it is started."""

import json
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from helpers import Watcher, config, run, settings
from helpers import call as called
from pytest import CaptureFixture, MonkeyPatch, approx, fixture, mark
from torch import nn

import wardround as wr
from wardround.data.serving.augment import Augmentation
from wardround.engine import egress
from wardround.engine.networks import build_model
from wardround.models.base import Output, Segmenter
from wardround.planning import costs
from wardround.planning import plan as plan_module
from wardround.planning.costs import (
    ClientPlan,
    activation_bytes,
    estimate_test,
    optimizer_bytes,
)
from wardround.planning.dry_run import DryRun
from wardround.planning.plan import make_plan
from wardround.text import format_bytes
from wardround.training.inference import count_windows
from wardround.training.workbench import Workbench

GB = 2**30


def call(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return called(monkeypatch, capsys, "plan", *arguments)


@fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / "run")))
    return path


# Against what a run really does


@mark.parametrize("method", ["fedavg", "scaffold", "fedevi", "centralised", "fedproto", "fedper"])
def test_traffic_of_the_dry_run_is_that_of_a_real_round(tmp_path: Path, method: str) -> None:
    changes: dict[str, Any] = {"method": {"name": method}, "rounds": 2}
    made = make_plan(config(tmp_path / "run", **changes))

    last = run(tmp_path / "run", **changes).records[1]["exchanges"]

    assert made.traffic.measured and made.notes == []
    for direction, planned in (("bytes_down", 0), ("bytes_up", 1)):
        real: dict[str, int] = {}
        for exchange in last:
            if exchange["task"] != "evaluate":
                sent = sum(exchange[direction].values())
                real[exchange["task"]] = real.get(exchange["task"], 0) + sent
        for task, sent in real.items():
            assert made.traffic.parts[task][planned] == approx(sent, rel=0.02, abs=200)


@mark.parametrize(
    "changes",
    [{"local_epochs": 2}, {"local_steps": 5}, {"local_steps": 5, "method": {"name": "centralised"}}],
    ids=["epochs", "steps", "pooled steps"],
)
def test_steps_and_cases_are_those_of_a_real_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    class Counting(Watcher):
        steps = 0

        def on_progress(self, client: str, step: int, steps: int) -> None:
            self.steps += 1

    changes = {"rounds": 3, **changes}
    made = make_plan(config(tmp_path / "run", **changes), measure=False)
    counting = Counting()

    result = wr.run(settings(tmp_path / "run", **changes), listener=counting)

    assert made.steps == counting.steps
    assert made.parameters == sum(p.numel() for p in result.model.parameters())
    tested = {name: entry.num for name, entry in result.test.clients["dice"].items()}
    assert {client.name: client.test for client in made.clients if client.test} == tested


def test_the_run_folder_grows_as_planned(tmp_path: Path) -> None:
    keep = {"learning_rate": 0.01, "state": "keep"}
    made = make_plan(config(tmp_path / "run", optimizer=keep))

    run(tmp_path / "run", optimizer=keep)

    kept = [*(tmp_path / "run/checkpoints").rglob("*.safetensors")]
    kept += [*(tmp_path / "run/clients").rglob("*.safetensors")]
    real = sum({path.stat().st_ino: path.stat().st_size for path in kept}.values())  # some are links
    assert real <= made.disk_bytes <= 3 * real


# Memory


def test_activations_of_two_layers_by_hand() -> None:
    class Two(Segmenter):
        def __init__(self) -> None:
            super().__init__(in_channels=1, num_outputs=1, dimensions=2, divisor=1)
            self.layers = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))

        def _output(self, x: torch.Tensor) -> Output:
            return Output(logits=self.layers(x))

    counted = activation_bytes(Two(), (2, 1, 8, 8), checkpointing=False)

    image, hidden = 2 * 64 * 4, 2 * 4 * 64 * 4  # what the convolutions and the ReLU look at again
    assert counted == image + hidden + 4 * image  # and the loss, about


def test_recomputing_keeps_less_and_a_smaller_batch_too(tmp_path: Path) -> None:
    model = build_model(config(tmp_path, model={"name": "unet2d", "base_filters": 8, "levels": 4}))

    whole = activation_bytes(model, (8, 1, 64, 64), checkpointing=False)
    half = activation_bytes(model, (4, 1, 64, 64), checkpointing=False)
    again = activation_bytes(model, (8, 1, 64, 64), checkpointing=True)

    assert whole is not None and half is not None and again is not None
    assert half == approx(whole / 2, rel=0.01) and again < 0.8 * whole


def test_optimizer_state_by_kind(tmp_path: Path) -> None:
    kinds = {"adam": {}, "sgd": {"name": "sgd"}, "momentum": {"name": "sgd", "momentum": 0.9}}
    found = {name: config(tmp_path, optimizer=kind).optimizer for name, kind in kinds.items()}

    assert {name: optimizer_bytes(kind, 100) for name, kind in found.items()} == {
        "adam": 200,
        "sgd": 0,
        "momentum": 100,
    }


def test_references_of_a_method_are_counted(tmp_path: Path) -> None:
    plain = make_plan(config(tmp_path), measure=False)
    moon = make_plan(config(tmp_path, method={"name": "moon"}), measure=False)

    assert plain.memory[0].parts["references"] == 0
    assert moon.memory[0].parts["references"] == 2 * moon.model_bytes


@mark.parametrize(
    ("free", "changes", "suggestion"),
    [
        (GB, {"batch_size": 64, "compute": {"workers": 1}}, "compute.micro_batch="),
        (int(1.4 * GB), {"compute": {"workers": 3, "threads": 1}, "batch_size": 1}, "compute.workers=2"),
        (int(0.1 * GB), {"batch_size": 1}, "smaller images"),
    ],
)
def test_what_does_not_fit_comes_with_a_suggestion(
    tmp_path: Path, monkeypatch: MonkeyPatch, free: int, changes: Any, suggestion: str
) -> None:
    monkeypatch.setattr(costs, "free_memory", lambda: free)
    large = {
        "data": {"phantom": {"hospitals": 3, "size": 128, "cases": 200}},
        "model": {"name": "unet2d", "base_filters": 16},
    }

    made = make_plan(config(tmp_path, **large, **changes), measure=False)

    assert len(made.problems) == 1 and suggestion in made.problems[0].suggestion
    assert format_bytes(made.memory[0].total) in made.problems[0].what


def test_a_suggested_micro_batch_does_fit(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "free_memory", lambda: GB)
    large: dict[str, Any] = {
        "batch_size": 64,
        "data": {"phantom": {"hospitals": 2, "size": 128, "cases": 200}},
        "model": {"name": "unet2d", "base_filters": 16},
    }
    first = make_plan(config(tmp_path, **large, compute={"workers": 1}), measure=False)
    micro = int(first.problems[0].suggestion.rpartition("=")[2])

    again = make_plan(config(tmp_path, **large, compute={"workers": 1, "micro_batch": micro}), measure=False)

    assert again.problems == []


# Time


def test_the_busiest_worker_decides_how_long_a_round_takes(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    seen = DryRun(step=1.0, case=0.5, test_case=2.0, others={"score": 3.0}, server=0.25, checkpoint=0.125)
    monkeypatch.setattr(plan_module, "do_dry_run", lambda *given, **named: seen)
    changes: dict[str, Any] = {
        "rounds": 10,
        "data": {"phantom": {"hospitals": 3, "size": 16, "cases": [20, 10, 10]}},
        "evaluate": {"metrics": ["dice"], "every": 5, "overlays": 0},
    }

    one = make_plan(config(tmp_path, **changes, compute={"workers": 1, "threads": 1}))
    two = make_plan(config(tmp_path, **changes, compute={"workers": 2, "threads": 1}))

    cases = [(12, 3, 5), (6, 2, 2), (6, 2, 2)]
    assert [(c.train, c.val, c.test) for c in one.clients] == cases
    assert one.time is not None and two.time is not None
    assert one.time.round == approx(3 + 2 + 2 + 3 * 3 + 3 * 0.25 + 0.125)
    assert one.time.training == approx(3 + 2 + 2)
    test = 9 * 2 + (9 + 2 * 7) * 0.5  # scored; then calibration passes over test once and validation twice
    assert one.time.total == approx(1 + 10 * one.time.round + 2 * 7 * 0.5 + test)
    assert two.time.round == approx(2 + 2 + 2 * 3 + 3 * 0.25 + 0.125, abs=0.01)  # the two small ones


def test_windows_and_mirror_images_count_in_the_time_of_a_test(tmp_path: Path) -> None:
    seen = DryRun(step=1.0, case=0.5, test_case=0.5)
    client = ClientPlan("north", train=10, val=2, test=4, steps=5)
    plain = config(tmp_path, evaluate={"overlays": 0, "calibrate": False})
    mirrored = config(tmp_path, evaluate={"overlays": 0, "calibrate": False, "tta": True, "window": [8, 8]})
    once = mirrored.model_copy(update={"augmentation": Augmentation(mirror_axes=(1,))})
    chosen = config(tmp_path, evaluate={"overlays": 0, "calibrate": False, "postprocess": "auto"})

    assert estimate_test(plain, seen, client, windows=1) == 4 * 0.5
    assert estimate_test(chosen, seen, client, windows=1) == (4 + client.val) * 0.5  # once more over these
    assert estimate_test(mirrored, seen, client, windows=3) == 4 * 0.5 * 3 * 4  # 2 axes: 4 mirror images
    assert estimate_test(once, seen, client, windows=3) == 4 * 0.5 * 3 * 2
    assert count_windows((16, 8), (8, 8)) == 3  # they overlap by half


def test_a_step_that_takes_too_long_ends_the_dry_run(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("wardround.planning.dry_run.BUDGET", 0.0)
    monkeypatch.setattr("wardround.planning.dry_run.do_dry_run.__kwdefaults__", {"budget": 0.0})

    made = make_plan(config(tmp_path))

    assert made.time is not None and made.time.step > 0 and not made.traffic.measured
    assert made.notes == ["One step alone took longer than the time allowed."]


def test_replies_on_disk_stay_until_they_are_hashed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """On a busy machine a hash may be formed when the second round has begun."""
    hash_reply = egress.hash_reply
    found: list[list[str]] = []

    def hash_late(*given: Any) -> str:
        time.sleep(0.2 if len(found) > 1 else 0.0)
        found[-1].append(hash_reply(*given))
        return ""

    monkeypatch.setattr(egress, "hash_reply", hash_late)
    for room in (2**20, 0):
        monkeypatch.setattr("wardround.engine.transports.local.ROOM_ON_HOST", room)
        found.append([])
        make_plan(config(tmp_path, compute={"threads": 1}))

    assert sorted(found[0]) == sorted(found[1])


# The command


def test_the_command_shows_all_and_writes_no_run(
    config_file: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, str(config_file))

    assert code == 0 and err == ""
    for word in ("parameters", "| north | 5 | 1 | 2 | 2 |", "total traffic", "one step", "Everything fits."):
        assert word in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


def test_json_is_one_object(config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    code, out, _ = call(
        monkeypatch, capsys, str(config_file), "--json", "--no-calibration", "--set", "rounds=7"
    )

    found = json.loads(out)
    assert code == 0 and found["rounds"] == 7 and found["time"] is None and found["problems"] == []
    assert found["choices"]["workers"] == 1 and found["choices"]["devices"] == ["cpu"]
    assert found["traffic"]["total"] > found["model_bytes"]


def test_what_does_not_fit_is_no_error_but_a_wrong_setting_is(
    config_file: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "free_memory", lambda: 1)

    code, out, _ = call(monkeypatch, capsys, str(config_file), "--no-calibration")
    wrong, _, err = call(monkeypatch, capsys, str(config_file), "--set", "roundz=1")

    assert code == 0 and "Does not fit: this machine needs about" in out and "Suggestion: " in out
    assert wrong == 2 and "Did you mean 'rounds'?" in err


def test_memory_that_runs_out_in_the_dry_run_is_taken_as_in_a_run(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    backward, seen = Workbench.backward, []

    def tight(self: Workbench, *rest: Any) -> torch.Tensor:
        seen.append(self.micro_batch)
        if self.micro_batch is None:
            raise torch.OutOfMemoryError("no room")
        return backward(self, *rest)

    monkeypatch.setattr(Workbench, "backward", tight)
    assert make_plan(config(tmp_path / "run", rounds=1)).as_dict()
    assert seen[:2] == [None, 2]
