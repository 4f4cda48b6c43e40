"""How many workers, and which device each; no GPU is needed to know."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers import config, run
from pytest import MonkeyPatch, mark, raises

from wardround.data.opening import open_federation
from wardround.data.roles import POOLED
from wardround.engine.networks import build_model
from wardround.engine.transports import placement
from wardround.engine.transports.placement import (
    Placement,
    Work,
    choose_devices,
    count_workers_on_cores,
    count_workers_on_gpus,
    place,
    present_sizes,
)
from wardround.errors import ConfigError
from wardround.models.base import Output, Segmenter, forward_cost
from wardround.models.measure import costs
from wardround.planning.costs import activation_bytes
from wardround.training.device import threads_for

FOUR = dict.fromkeys("abcd", 60)
PLENTY = 64 * 2**30


def work(seconds: float, sizes: Any = FOUR, num_bytes: int = 0) -> Work:
    return Work(sizes, seconds, num_bytes, 5 * num_bytes, rounds=10)


def placed(folder: Path, **changes: Any) -> Placement:
    made = config(folder, **changes)
    federation = open_federation(made.data, made.seed)
    return place(made, federation, federation.names)


# Devices


@mark.parametrize(
    ("device", "workers", "gpus", "expected"),
    [
        ("auto", 1, 1, ["cuda"]),
        ("cuda", 1, 4, ["cuda"]),
        ("auto", 2, 1, ["cuda:0", "cuda:0"]),
        ("cuda", 4, 2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:1", 3, 2, ["cuda:1"] * 3),
        ("cpu", 2, 4, ["cpu", "cpu"]),
    ],
)
def test_gpus_are_taken_in_turn_unless_one_is_named(
    device: str, workers: int, gpus: int, expected: list[str]
) -> None:
    assert choose_devices(device, workers, gpus) == tuple(expected)


@mark.parametrize(
    ("device", "gpus", "clients", "expected"),
    [("auto", 1, 9, 1), ("cuda", 4, 9, 4), ("cuda", 4, 3, 3), ("cuda:2", 4, 9, 1), ("cuda", 4, 1, 1)],
)
def test_auto_starts_one_worker_a_gpu(device: str, gpus: int, clients: int, expected: int) -> None:
    assert count_workers_on_gpus(device, gpus, clients)[0] == expected


def test_on_several_gpus_every_worker_has_its_own(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    found = placed(tmp_path, compute={"threads": 1})
    named = placed(tmp_path, compute={"threads": 1, "device": "cuda:1", "workers": 3})

    assert found.devices == ("cuda:0", "cuda:1") and found.workers == 2
    assert named.devices == ("cuda:1", "cuda:1", "cuda:1")


# Cores


def test_small_work_stays_in_one_process_and_large_work_takes_the_cores() -> None:
    assert count_workers_on_cores(work(5), 2, None, PLENTY)[0] == 1
    assert count_workers_on_cores(work(500), 2, None, PLENTY)[0] == 2
    assert count_workers_on_cores(work(500), 16, None, PLENTY)[0] == 4  # a client each


def test_one_client_one_core_short_memory_or_all_threads_taken_leave_one_worker() -> None:
    assert count_workers_on_cores(work(500, {"a": 9}), 8, None, PLENTY) == (1, "one client trains")
    assert count_workers_on_cores(work(500), 1, None, PLENTY)[0] == 1
    assert count_workers_on_cores(work(500), 8, 8, PLENTY)[0] == 1
    assert count_workers_on_cores(work(500), 8, None, 2**30) == (1, "memory is short")
    assert count_workers_on_cores(work(500), 8, 4, PLENTY)[0] == 2


def test_workers_that_would_wait_for_one_large_client_are_not_started() -> None:
    alone = {"large": 1000, "small": 1, "tiny": 1}

    assert count_workers_on_cores(work(500, alone), 8, None, PLENTY)[0] == 1
    assert count_workers_on_cores(work(500, dict.fromkeys("abcdef", 10)), 5, 1, PLENTY)[0] == 3  # two each


def test_files_of_a_large_model_count_against_workers() -> None:
    assert count_workers_on_cores(work(60), 2, None, PLENTY)[0] == 2
    assert count_workers_on_cores(work(60, num_bytes=2**30), 2, None, PLENTY)[0] == 1


def test_only_clients_that_train_count(tmp_path: Path) -> None:
    half = config(tmp_path, participation=0.34)
    named = config(tmp_path, participation=["north", "south"])
    federation = open_federation(half.data, half.seed)

    assert len(present_sizes(half, federation, federation.names)) == 1
    assert list(present_sizes(named, federation, federation.names)) == ["north", "south"]
    assert list(present_sizes(half, federation, [*federation.names, POOLED])) == [POOLED]


def test_cores_are_shared_evenly_among_workers(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("wardround.training.device.cores", lambda: 8)

    assert threads_for(config(tmp_path, compute={}).compute, 3) == 2
    assert threads_for(config(tmp_path, compute={"threads": 5}).compute, 3) == 5


@mark.parametrize(
    "model",
    [
        {"name": "unet2d", "base_filters": 4, "levels": 4},
        {"name": "unet2d", "base_filters": 4, "levels": 3, "norm": "batch", "dropout": 0.3},
        {"name": "unet2d_fedevi"},
    ],
)
def test_operations_of_a_small_image_scale_to_those_of_a_large_one(tmp_path: Path, model: Any) -> None:
    network = build_model(config(tmp_path, model=model))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    counted, kept = forward_cost(network, (96, 96))

    assert abs(counted / costs(network, (96, 96)).flops - 1) < 0.01
    saved = activation_bytes(network, (1, 1, 96, 96), checkpointing=False)
    assert saved is not None and 0.5 < kept / saved < 2
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())


def test_the_operations_of_one_convolution_are_counted_by_hand() -> None:
    class One(Segmenter):
        def __init__(self) -> None:
            super().__init__(in_channels=3, num_outputs=5, dimensions=2, divisor=1)
            self.layer = torch.nn.Conv2d(3, 5, 3, padding=1, bias=False)

        def _output(self, x: torch.Tensor) -> Output:
            return Output(logits=self.layer(x))

    assert forward_cost(One(), (8, 8))[0] == costs(One(), (8, 8)).flops == 2 * 5 * 3 * 9 * 64


# Whole runs


def test_a_tiny_run_stays_in_one_process_and_says_so(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=1, compute={"threads": 1, "workers": "auto"})

    facts = json.loads((tmp_path / "run/environment.json").read_text())
    assert facts["workers"] == 1 and facts["devices"] == ["cpu"] and facts["threads"] == 1
    assert "would not pay for their start" in facts["workers_why"]


@mark.slow
def test_what_auto_starts_gives_the_same_bytes_as_one_process(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "START_SECONDS", -1.0)
    monkeypatch.setattr(placement, "cores", lambda: 2)
    keep = {"learning_rate": 0.01, "state": "keep"}

    one = run(tmp_path / "one", optimizer=keep, compute={"threads": 1, "workers": 1})
    auto = run(tmp_path / "auto", optimizer=keep, compute={"threads": 1, "workers": "auto"})

    facts = json.loads((tmp_path / "auto/environment.json").read_text())
    assert facts["devices"] == ["cpu", "cpu"]
    assert auto.params_sha256 == one.params_sha256
    assert (tmp_path / "auto/cases.csv").read_text() == (tmp_path / "one/cases.csv").read_text()


@mark.parametrize("value", [0, "many", 1.5, True])
def test_a_number_of_workers_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    with raises(ConfigError, match=r"compute.workers: it is .*; give auto, or a number from 1 on"):
        config(tmp_path, compute={"workers": value})
