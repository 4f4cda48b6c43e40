"""How a process of a run computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import config

from wardround.config import Config
from wardround.data.opening import open_federation
from wardround.engine.networks import choose_compute
from wardround.files import write_json
from wardround.training import kernel_cache
from wardround.training.device import Compute


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("engine.networks", "training.device"):
        monkeypatch.setattr(f"wardround.{module}.choose_device", lambda settings: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "some GPU")


def compute_of(config: Config, run: Path, names: tuple[str, ...] = ("north", "south")) -> Compute:
    return choose_compute(config, open_federation(config.data, config.seed), names, run=run)


def begin(config: Config, run: Path) -> Compute:
    """Choose as at the start of a run, and write it down as one does."""
    chosen = compute_of(config, run)
    write_json(run / "environment.json", {"compute": chosen.as_dict()})
    return chosen


def test_a_run_keeps_its_choice_when_kernels_were_compiled_since(
    tmp_path: Path, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path, rounds=20_000)
    first = begin(made, tmp_path)
    assert first.compile == "graphs" and first.weighed
    monkeypatch.setattr(kernel_cache, "loading_seconds", lambda network: 0.01)
    assert compute_of(made, tmp_path / "a new run").compile == "full"
    resumed = compute_of(made, tmp_path)
    assert (resumed.compile, resumed.why) == ("graphs", first.why)


def test_a_worker_with_few_clients_computes_as_the_run_does(tmp_path: Path, on_a_gpu: None) -> None:
    made = config(tmp_path, rounds=20)
    steps_of_all = begin(made, tmp_path)
    assert steps_of_all.compile == "graphs"
    assert compute_of(made, tmp_path / "elsewhere", ("north",)).compile == "off"
    assert compute_of(made, tmp_path, ("north",)).compile == "graphs"


def test_a_setting_counts_more_than_what_the_run_began_with(tmp_path: Path, on_a_gpu: None) -> None:
    begin(config(tmp_path, rounds=20_000), tmp_path)
    assert compute_of(config(tmp_path, rounds=20_000, compute={"compile": "off"}), tmp_path).compile == "off"


def test_a_run_that_began_on_a_cpu_is_weighed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    made = config(tmp_path, rounds=20_000)
    assert begin(made, tmp_path).compile == "off"
    request.getfixturevalue("on_a_gpu")
    assert compute_of(made, tmp_path).compile == "graphs"
