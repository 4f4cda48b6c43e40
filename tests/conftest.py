"""What every test may rely on."""

import logging
from collections.abc import Iterator

from pytest import fixture


@fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """A command-line test must not silence the loggers of the tests after it."""
    root, ours = logging.getLogger(), logging.getLogger("wardround")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
