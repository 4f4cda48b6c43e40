"""Objects handed over in Python, and what a run writes down of them.

A run folder holds text alone. So a class, a function or an object becomes a name, `module:qualname@digest`:
where it was defined, and the first digits of a SHA-256. The digest covers the source of the class or
function, default values, the numbers and texts it takes from outside, what a function closes over and the
fields of an object; not what these call.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from tokenize import TokenError
from types import CodeType
from typing import Any

DIGITS = 12
PLAIN = (str, bytes, int, float, complex)
DEEPEST = 6  # objects within objects that count for a digest


def name_object(found: Any) -> str:
    """
    >>> name_object(name_object).partition("@")[0]
    'wardround.objects:name_object'
    """
    home = found
    while isinstance(home, functools.partial):
        home = home.func
    home = home if hasattr(home, "__qualname__") else type(home)
    parts = home.__qualname__.replace("<locals>.", "").replace("<", "").replace(">", "")
    return f"{home.__module__}:{parts}@{digest(found)}"


def split_name(name: str) -> tuple[str, str]:
    """The import path and the digest of a name; the digest is empty for what is no object.

    >>> split_name("__main__:Net@0123456789ab"), split_name("nets:Net")
    (('__main__:Net', '0123456789ab'), ('nets:Net', ''))
    """
    path, _, digits = name.partition("@")
    return path, digits


def digest(found: Any) -> str:
    joined = "\x00".join(describe(found, DEEPEST)).encode("utf-8", "backslashreplace")
    return hashlib.sha256(joined).hexdigest()[:DIGITS]


def describe(value: Any, depth: int) -> Iterator[str]:
    """A value as text, the same in every process; of what cannot be told apart so, the type alone."""
    yield type(value).__qualname__
    if value is None or isinstance(value, PLAIN):
        yield repr(value)
    elif isinstance(value, CodeType):
        yield value.co_code.hex()
        yield repr(value.co_names)
        yield from describe(value.co_consts, depth)
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield repr(key)
            yield from describe(entry, depth - 1)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from describe(entry, depth - 1)
    elif isinstance(value, functools.partial):
        yield from describe((value.func, value.args, value.keywords), depth - 1)
    elif inspect.ismethod(value):
        yield from describe((value.__func__, value.__self__), depth - 1)
    elif inspect.isfunction(value):
        yield read_source(value) or "".join(describe(value.__code__, depth - 1))
        more = (value.__defaults__, value.__kwdefaults__, outside_values(value))
        yield from describe(more, depth - 1)
    elif inspect.isclass(value):
        yield value.__qualname__
        yield read_source(value) or "".join(describe_members(value, depth - 1))
        for function in filter(inspect.isfunction, vars(value).values()):
            plain = {n: v for n, v in outside_values(function).items() if isinstance(v, PLAIN)}
            yield from describe(plain, depth - 1)
    elif hasattr(value, "tobytes") or hasattr(value, "detach"):  # an array or a tensor
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else value
        yield f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    elif hasattr(value, "__dict__"):
        yield from describe((type(value), vars(value)), depth - 1)


def read_source(found: Any) -> str:
    """The source text, or nothing where it was typed into a plain interpreter."""
    try:
        return textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError, SyntaxError, TokenError):
        return ""


def outside_values(function: Any) -> dict[str, Any]:
    """What a function takes from outside: the variables it closes over, and global numbers and texts."""
    code, values = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet: `__class__` of a class in the making
            values[name] = cell.cell_contents
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL" and isinstance(function.__globals__.get(step.argval), PLAIN):
            values[step.argval] = function.__globals__[step.argval]
    return {name: value for name, value in values.items() if value is not function}


def describe_members(found: type, depth: int) -> Iterator[str]:
    """A class by its functions and plain values, for one without source."""
    for name, value in vars(found).items():
        if inspect.isfunction(value) or (isinstance(value, PLAIN) and not name.startswith("__")):
            yield name
            yield from describe(value, depth)
