"""What every test may rely on."""

import logging
import os
import signal
from collections.abc import Iterator

from pytest import Config, Item, fixture, mark


def pytest_configure(config: Config) -> None:
    """All tests run on the CPU, whose bytes are promised, but those of the GPU: `pytest -m gpu`."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # before any test imports it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def pytest_collection_modifyitems(items: list[Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(mark.skip(reason="needs a GPU and `pytest -m gpu`"))


@fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """A command-line test must not silence the loggers of the tests after it."""
    root, ours = logging.getLogger(), logging.getLogger("wardround")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
