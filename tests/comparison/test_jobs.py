"""How many cells run side by side; no GPU is needed to know."""

from pathlib import Path
from typing import Any

import torch
from helpers import config
from pytest import MonkeyPatch, fixture, mark

from wardround.comparison import jobs
from wardround.comparison.jobs import (
    CellCost,
    Room,
    choose_jobs,
    count_jobs_on_cores,
    count_jobs_on_gpus,
    estimate_cell,
    find_room,
)

GB = 10**9


@mark.parametrize(
    ("cost", "room", "gpus", "cores", "expected", "why"),
    [
        (CellCost(2 * GB, 0.01), Room(140 * GB), 1, 16, 8, "16 cores"),
        (CellCost(2 * GB, 0.3), Room(140 * GB), 1, 16, 3, "fill 30 % of a GPU"),
        (CellCost(2 * GB, 1.0), Room(140 * GB), 1, 16, 1, "fill 100 % of a GPU"),
        (CellCost(2 * GB, 0.01), Room(8 * GB), 1, 16, 3, "2.0 GB of GPU memory for each, 8.0 GB are free"),
        (
            CellCost(20 * GB, 0.01),
            Room(8 * GB),
            1,
            16,
            1,
            "GPU memory",
        ),  # it is tried, and says what it lacks
        (CellCost(2 * GB, 0.01), Room(140 * GB), 1, 1, 1, "1 cores"),
        (CellCost(2 * GB, 0.3), Room(140 * GB), 4, 64, 12, "on each of 4 GPUs"),
        (CellCost(2 * GB, 0.01), Room(140 * GB, True), 1, 16, 1, "one process at a time"),
        (None, Room(140 * GB), 1, 16, 1, "not known"),
    ],
)
def test_a_gpu_is_shared_as_far_as_its_time_its_memory_and_the_cores_go(
    cost: CellCost | None, room: Room, gpus: int, cores: int, expected: int, why: str
) -> None:
    count, reason = count_jobs_on_gpus(cost, room, gpus, cores)

    assert count == expected and why in reason


def test_cores_are_shared_as_far_as_memory_goes() -> None:
    room = Room(64 * GB)

    assert count_jobs_on_cores(CellCost(GB), room, 8) == (8, "one for each core that is free")
    assert count_jobs_on_cores(CellCost(GB), room, 0)[0] == 1
    assert count_jobs_on_cores(None, room, 4)[0] == 4
    count, why = count_jobs_on_cores(CellCost(10 * GB), room, 8)
    assert count == 5 and "about 10.0 GB of memory for each, 64.0 GB are free" in why


@fixture
def machine(monkeypatch: MonkeyPatch) -> None:
    """Eight cores, and two GPUs if asked for, one of them nearly full."""
    monkeypatch.setattr(jobs, "cores", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(jobs, "QUERY", ("printf", "64000, Default\\n3000, Exclusive_Process\\n"))


def test_the_machine_and_the_settings_decide(machine: None, tmp_path: Path) -> None:
    def chosen(cells: int, **compute: Any) -> int:
        return choose_jobs([config(tmp_path, compute=compute)], cells)[0]

    assert chosen(42, device="cpu", threads=1) == 8
    assert chosen(42, device="cpu", threads=2) == 4 and chosen(42, device="cpu", workers=4) == 2
    assert chosen(3, device="cpu") == 3
    assert chosen(42, device="cuda:0") == 4 and chosen(42, device="cuda:1") == 1
    assert chosen(42, device="auto") == 2


def test_the_driver_says_what_a_gpu_has_left(machine: None, monkeypatch: MonkeyPatch) -> None:
    assert find_room(torch.device("cuda:0")) == Room(64000 * 2**20)
    assert find_room(torch.device("cuda")) == Room(3000 * 2**20, is_exclusive=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 * GB, 80 * GB))
    for answer in (("no-such-tool",), ("false",), ("echo", "[N/A], Default")):
        monkeypatch.setattr(jobs, "QUERY", answer)
        assert find_room(torch.device("cuda:0")) == Room(16 * GB)


def test_larger_networks_and_batches_take_more(machine: None, tmp_path: Path) -> None:
    small = estimate_cell(config(tmp_path, compute={"device": "cuda"}))
    large = estimate_cell(
        config(
            tmp_path,
            batch_size=64,
            data={"phantom": {"hospitals": 3, "size": 512, "cases": 8}},
            model={"name": "unet2d", "base_filters": 64},
            compute={"device": "cuda"},
        )
    )

    assert small.num_bytes < 1.2 * GB < large.num_bytes
    assert small.gpu_share == 0.01 and large.gpu_share == 1.0


def test_data_that_is_not_there_is_left_for_the_cells_to_say(tmp_path: Path) -> None:
    missing = config(tmp_path, data={"federation": str(tmp_path / "none.yaml")}, compute={"device": "cpu"})

    assert choose_jobs([missing], 42)[0] >= 1
