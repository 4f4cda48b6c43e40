"""run.log: what a run said, with the time: its beginning, each round, warnings, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wardround.errors import WardroundError

RUN_LOG = "run.log"


class RunLogHandler(logging.FileHandler):
    """Appends lines with the time and their level."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def say(self, text: str, level: int = logging.INFO, error: BaseException | None = None) -> None:
        """Write a line, whatever level the loggers have. error: its traceback follows."""
        cause = None if error is None else (type(error), error, error.__traceback__)
        self.handle(logging.LogRecord("wardround", level, "", 0, text, None, cause))

    def handleError(self, record: logging.LogRecord) -> None:
        """On a full disk the run itself says so, in one sentence."""


@contextmanager
def keep_log(folder: Path) -> Iterator[Callable[[str], None]]:
    """Append all that is logged meanwhile, what is said, and the error that ends the run, if one does."""
    handler, logger = RunLogHandler(folder / RUN_LOG), logging.getLogger("wardround")
    logger.addHandler(handler)
    try:
        yield handler.say
    except BaseException as error:
        is_told = isinstance(error, WardroundError | KeyboardInterrupt)
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        handler.say(text, logging.ERROR, None if is_told else error)
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()
