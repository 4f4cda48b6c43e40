"""Settings: what every section of every file shares, and one way to explain a mistake in one.

Unknown keys are errors and values cannot be changed. The first mistake becomes one sentence: where, what was
given, what is expected, and the nearest key that exists.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from wardround.errors import ConfigError
from wardround.text import is_short_for, suggest

_short = reprlib.Repr()
_short.maxlist = _short.maxdict = _short.maxtuple = 4
_short.maxstring = _short.maxother = 80

INTERNAL = ("function-", "tuple[", "float")  # parts of a place that pydantic adds


class Settings(BaseModel):
    """A section of a file.

    missing_hint: what to do about a key that must be there and is not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    missing_hint: ClassVar[str] = ""

    @classmethod
    def read(cls, values: Any, where: str = "") -> Self:
        """The checked section; where: what stands before a key in the sentence about a mistake."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, where)) from None


def refuse_boolean(value: Any) -> Any:
    """YAML reads yes, no, on and off as true and false, and Python takes those for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"it is {str(value).lower()}; give a number")
    return value


def explain(error: ValidationError, kind: type[BaseModel] | None = None, where: str = "") -> str:
    """The first mistake in words; kind: the section that was read, for the keys it has."""
    first, *others = error.errors()
    place = [str(part) for part in first["loc"] if not str(part).startswith(INTERNAL)]
    name, value, problem = where + ".".join(place), first.get("input"), first["type"]
    known = known_keys(kind, place[:-1])
    if problem in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} is not a setting.{suggest_key(place, kind, where)}"
    if problem == "missing":
        beside = [
            str(e["loc"][-1])
            for e in others
            if e["type"] == "extra_forbidden" and e["loc"][:-1] == first["loc"][:-1]
        ]
        if beside:
            return f"{name} is missing, and {beside[0]} is not a setting.{suggest(beside[0], known)}"
        hint = getattr(kind, "missing_hint", "")
        return f"{name} is missing.{hint and f' {hint}'}"
    if problem == "too_short":
        return f"{name} is too short: {first['msg']}."
    if place and place[-1] == "[key]":
        return (
            f"{where}{place[0]}: {value!r} is not a name; put the name first, then its numbers "
            f"({place[0]}: {{{{lesion: [1]}}}}), and quote a name that is a number."
        )
    if problem == "tuple_type":
        return f"{name} is {shown(value)}; it must be a list such as [1] or [name]."
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").rstrip(".")
    if problem == "value_error":
        sentence = message if message.endswith("?") else f"{message}."
        return f"{name}: {sentence}" if name else sentence
    if problem == "model_type":
        message = "a section with keys of its own"
    return f"{name} is {shown(value)}; it must be {message}."


def known_keys(kind: Any, place: Sequence[str]) -> list[str]:
    """The keys inside a section; numbers in the place are members of a list."""
    for part in place:
        if part.isdecimal():
            continue
        field = None if kind is None else kind.model_fields.get(part)
        kinds = [] if field is None else [field.annotation, *get_args(field.annotation)]
        kind = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    return [] if kind is None else list(kind.model_fields)


def suggest_key(place: Sequence[str], kind: type[BaseModel] | None, where: str) -> str:
    """What a key that is not there may mean: one of its section, or one of its name in another."""
    word, known = place[-1], known_keys(kind, place[:-1])
    beside = suggest(word, [key for key in known if is_short_for(word, key)])
    elsewhere = [key for key in list_keys(kind) if key.rpartition(".")[2] == word]
    elsewhere = elsewhere or [key for key in list_keys(kind) if is_short_for(word, key.rpartition(".")[2])]
    if beside or not elsewhere:
        return beside or suggest(word, known)
    section = where.rpartition(" ")[2]  # behind the name of a file
    return f" Did you mean '{section}{min(elsewhere, key=lambda key: key.count('.'))}'?"


def list_keys(kind: type[BaseModel] | None, place: str = "") -> Iterator[str]:
    """All keys of a section and the sections in it, by their dotted names."""
    for name, field in () if kind is None else kind.model_fields.items():
        yield f"{place}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from list_keys(field.annotation, f"{place}{name}.")


def shown(value: Any) -> str:
    """A value in an error message, cut where it is long.

    >>> shown(["north"] * 9)
    "['north', 'north', 'north', 'north', ...]"
    """
    return _short.repr(value)
