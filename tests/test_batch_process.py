"""A process that does several runs leaves nothing of one to the next."""

import os
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from helpers import settings
from pytest import MonkeyPatch, fixture

from wardround import batch_process
from wardround.batch_process import describe_error, do_run, unchanged_process


def process_state() -> list[Any]:
    return [
        torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.deterministic,
        torch.rand(1).item(), np.random.rand(), random.random(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]  # fmt: skip


def test_what_a_run_sets_for_the_whole_process_is_reset() -> None:
    with unchanged_process():
        before = process_state()
    with unchanged_process():
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.deterministic = True
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        process_state()  # draws numbers

    with unchanged_process():
        assert process_state() == before


@fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path / "run", rounds=2)))
    return path


def serve(config: Path, *overrides: str, resume: bool = False) -> list[Any]:
    lines: list[Any] = []
    do_run({"config": str(config), "overrides": overrides, "resume": resume}, lines.append)
    return lines


def test_rounds_and_the_end_are_told_and_nothing_is_left_in_memory(
    config: Path, monkeypatch: MonkeyPatch
) -> None:
    begun: list[Any] = []

    class Watched(batch_process.Experiment):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            begun.append(weakref.ref(self))

    monkeypatch.setattr(batch_process, "Experiment", Watched)
    monkeypatch.setattr(batch_process, "imported_modules", set())  # other tests import some
    assert serve(config) == [{"rounds": 0}, {"rounds": 1}, {"rounds": 2}, {"end": None, "reusable": True}]
    assert serve(config, resume=True) == [{"rounds": 2}, {"end": None, "reusable": True}]
    assert len(begun) == 2 and not any(reference() for reference in begun)


def test_a_process_is_not_used_again_after_a_failure_or_code_of_others(
    config: Path, monkeypatch: MonkeyPatch
) -> None:
    failed = serve(config, "rounds=-1")
    monkeypatch.setattr(batch_process, "imported_modules", {"my_networks"})
    foreign = serve(config)

    assert failed[-1]["end"].endswith("it must be greater than or equal to 1.") and not failed[-1]["reusable"]
    assert foreign[-1] == {"end": None, "reusable": False}


def test_a_reason_is_one_line_and_says_what_to_do_where_memory_ran_out() -> None:
    assert describe_error(ValueError("wrong\nand more")) == "ValueError: wrong"
    assert describe_error(RuntimeError("CUDA out of memory.\nTried")).endswith(
        "Run fewer at a time (--jobs)."
    )
