"""What a worker imports before its first step: seconds that every run waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from helpers import config, settings
from pytest import MonkeyPatch, mark

from wardround.clients import SyncState
from wardround.config import OptimizerSettings
from wardround.engine.networks import build_model
from wardround.messages import Message
from wardround.params import Params
from wardround.training import optimizers

HEAVY = ("torch._dynamo", "sympy", "monai", "nibabel", "matplotlib", "jinja2", "nvflare", "typer", "rich")

# the worker as it is started, and what it holds at its end
WORKER = f"""
import atexit, gc, json, os, runpy, sys
out = os.dup(1)
def tell():
    held = [name for name in {HEAVY!r} if name in sys.modules]
    os.write(out, json.dumps({{"held": held, "collects": gc.isenabled()}}).encode())
atexit.register(tell)
runpy.run_module("wardround.engine.transports.worker", run_name="__main__")
"""


def test_a_worker_trains_without_heavy_packages_and_collects_garbage(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(settings(tmp_path / "run")))
    Message(params=Params(build_model(config(tmp_path / "run")).state_dict())).save(tmp_path / "down")
    setup = {
        "config": str(tmp_path / "config.yaml"),
        "folder": str(tmp_path / "clients"),
        "threads": 1,
        "device": "cpu",
        "names": ["north"],
    }
    request = {
        "client": "north",
        "task": "train",
        "round": 0,
        "sync_state": SyncState().as_dict(),
        "message": str(tmp_path / "down"),
        "reply": str(tmp_path / "up"),
    }

    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=f"{json.dumps(setup)}\n{json.dumps(request)}\n",
        capture_output=True,
        text=True,
        check=True,
    )

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    answers = [line for line in lines if "progress" not in line]
    assert [entry["client"] for entry in answers[0]["clients"]] == ["north"]
    assert answers[1]["failure"] is None and answers[1]["num_steps"] > 0
    assert answers[2] == {"held": [], "collects": True}


CHANGES = {
    "adam": OptimizerSettings(name="adam", weight_decay=0.1),
    "adamw": OptimizerSettings(name="adamw", weight_decay=0.1),
    "sgd": OptimizerSettings(name="sgd"),
    "momentum": OptimizerSettings(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.1),
}


@mark.parametrize("name", CHANGES)
def test_a_light_optimizer_gives_the_same_bytes(name: str, monkeypatch: MonkeyPatch) -> None:
    def trained() -> tuple[str, Params, dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        model = torch.nn.Conv2d(2, 3, 3)
        optimizer = optimizers.build(CHANGES[name], model)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 2, 8, 8)).square().mean().backward()
            optimizer.step()
        assert torch.is_grad_enabled()
        return type(optimizer).__module__, Params(model.state_dict()), optimizers.export_state(optimizer)

    light = trained()
    monkeypatch.setattr(optimizers, "without_compiler", lambda kind: kind)
    usual = trained()

    assert light[0] != usual[0]  # it is the other class
    assert light[1].sha256() == usual[1].sha256()
    assert light[2].keys() == usual[2].keys()
    assert all(torch.equal(value, usual[2][slot]) for slot, value in light[2].items())


def test_a_training_process_leaves_the_compiler_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(settings(tmp_path / "run", rounds=1)))
    code = """
import sys, wardround
wardround.run(sys.argv[1])
sys.exit("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "config.yaml")])
    assert done.returncode == 0  # 1: it was imported
