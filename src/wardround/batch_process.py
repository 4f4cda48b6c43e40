"""A process that does several runs, one after the other: imports, CUDA's start, compiled kernels and loading
the same cases are paid once. `batch` starts it; every run gives what it gives in a process of its own.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imports drop hardly any objects; looking for some would take a fifth of a second

import logging
import os
import queue
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from wardround.child_process import Line, connect, listen
from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.opening import loaded_cases
from wardround.engine.experiment import Experiment
from wardround.engine.outcome import SilentListener
from wardround.errors import explain
from wardround.plugins import imported_modules
from wardround.training.device import is_out_of_memory

log = logging.getLogger(__name__)

Send = Callable[[Mapping[str, Any]], None]


class RoundCounter(SilentListener):
    """Tells the parent how many rounds are done."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def on_start(self, config: Config, first_round: int) -> None:
        self._send({"rounds": first_round})

    def on_record(self, record: Mapping[str, Any]) -> None:
        self._send({"rounds": record["round"]})


def do_run(request: Line, send: Send) -> None:
    """One run; its end is told, with the reason if it failed.

    request: config, a YAML file; overrides, as `--set` has them; resume.
    """
    reason = None
    try:
        with unchanged_process():
            train(request, send)
    except Exception as error:
        log.debug("%s", request["config"], exc_info=True)
        reason = describe_error(error)
    # A failure may have broken more than its run, and code of others may remember what it likes.
    send({"end": reason, "reusable": reason is None and not imported_modules})


def train(request: Line, send: Send) -> None:
    """What `wardround train` does."""
    config = load_config(request["config"], request["overrides"])
    experiment = Experiment(config, listener=RoundCounter(send))
    experiment.run(resume=request["resume"], overwrite=not request["resume"])


def describe_error(error: Exception) -> str:
    """One line."""
    text = next(iter(explain(error).splitlines()), type(error).__name__)
    return f"{text} Run fewer at a time (--jobs)." if is_out_of_memory(error) else text


@contextmanager
def unchanged_process() -> Iterator[None]:
    """What a run sets for the whole process, and what it leaves in memory, is gone afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = {
        matmul: {"allow_tf32": matmul.allow_tf32},
        cudnn: {name: getattr(cudnn, name) for name in ("allow_tf32", "benchmark", "deterministic")},
    }
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    threads, dtype, environment = torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ)
    streams = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for owner, values in flags.items():
            for name, value in values.items():
                setattr(owner, name, value)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports the compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(streams[0])
        np.random.set_state(streams[1])
        random.setstate(streams[2])
        restore_environment(environment)
        release_memory()


def restore_environment(before: Mapping[str, str]) -> None:
    """Touch only what changed: other threads may be reading."""
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def release_memory() -> None:
    """Drop what only reference cycles and caches hold."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        compiler.reset()  # it limits how often a function is compiled; kernels stay in inductor's cache
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    requests, send = connect()
    waiting: queue.SimpleQueue[Line] = queue.SimpleQueue()
    listen(requests, waiting.put)
    logging.getLogger("wardround").setLevel(logging.ERROR)
    loaded_cases.is_on = True
    gc.freeze()  # what is here now stays
    gc.enable()
    while True:
        do_run(waiting.get(), send)


if __name__ == "__main__":
    main()
