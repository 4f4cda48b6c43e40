"""Advice in Python's words: `resume=True` where the command line says `--resume`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from wardround.errors import WardroundError

F = TypeVar("F", bound=Callable[..., Any])

SWITCHES = ("resume", "overwrite")  # options without a value
NOT_VALUES = r"(?:and|can|chooses|continues|evaluates|for|has|is|needs|or|out|replaces|they|to|uses)\b"
OPTION = re.compile(rf"(?<![\w-])--([a-z][a-z-]*)(?: (?!{NOT_VALUES})([\w./-]*\w))?")
SETTING = re.compile(r"--set ([\w.]+=(?:\[[^\]]*\]|\.\.\.|[\w./-]*\w))")
COMMAND = re.compile(r"(wardround [a-z]+(?: [^;`]*?)?(?=[;`]|\. |\.?$))")  # to be typed as it stands
LIST = re.compile(r"List all: wardround (methods|objectives|metrics)\.")


def in_python(text: str) -> str:
    """
    >>> in_python("Add --resume to continue it, or --set output=... to write elsewhere.")
    'Add resume=True to continue it, or overrides=["output=..."] to write elsewhere.'
    >>> in_python("Leave --client out, or continue with --resume --from-round 3.")
    'Leave client out, or continue with resume=True, from_round=3.'
    """
    text = text.replace(" --debug shows where.", " The exception above shows where.")
    text = LIST.sub(lambda found: f"List all: list(wr.{found[1].upper()}).", text)
    parts = COMMAND.split(text)
    parts[::2] = map(say_keywords, parts[::2])
    return "".join(parts)


def say_keywords(text: str) -> str:
    text = text.replace("--resume --from-round", "--resume, --from-round")
    return OPTION.sub(say_keyword, SETTING.sub(r'overrides=["\1"]', text))


def say_keyword(found: re.Match[str]) -> str:
    name, value = found[1].replace("-", "_"), found[2]
    if name in SWITCHES:
        return f"{name}=True" + (f" {value}" if value else "")
    if name == "set":
        return f"overrides {value!r}" if value else "overrides"
    if value is None:
        return name
    return f"{name}={value if value.isdecimal() else repr(value)}"


@contextmanager
def speak_python() -> Iterator[None]:
    """Errors that pass through here have their advice in Python's words."""
    try:
        yield
    except WardroundError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise


@functools.cache
def for_python(function: F) -> F:
    """The function for callers in Python; the command line calls it as it is."""
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            with speak_python():
                yield from function(*args, **keywords)

    else:

        @functools.wraps(function)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            with speak_python():
                return function(*args, **keywords)

    return wrapped  # type: ignore[return-value]
