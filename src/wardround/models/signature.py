"""Settings of a network, checked against the signature of what builds it.

The names and types of a builder's arguments are written in its signature; what a user gives is held
against that, so that a mistake is a sentence when the configuration is read and no surprise in round 1.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from wardround.errors import ConfigError
from wardround.text import suggest

ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)


def parameters_of(builder: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments a builder takes by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: p for key, p in inspect.signature(builder).parameters.items() if p.kind in by_name}


def takes_any(builder: Callable[..., Any]) -> bool:
    """Whether a builder takes arguments it does not name (**kwargs)."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(builder).parameters.values())


def check_arguments(
    name: str,
    builder: Callable[..., Any],
    arguments: Mapping[str, Any],
    from_data: Mapping[str, Any],
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """The user's arguments as the builder's types have them.

    Refused are those it does not know, those the data decide, values of another type, and missing ones.
    elsewhere: arguments that are settings of `model:` itself.
    """
    parameters = parameters_of(builder)
    for argument in arguments:
        if argument in from_data:
            raise ConfigError(
                f"model.arguments.{argument} is {arguments[argument]}; leave it out, "
                "the data and the objective decide it."
            )
        if argument in elsewhere:
            raise ConfigError(
                f"model.arguments.{argument}: write it as model.{argument}, as for all our networks."
            )
        if argument not in parameters and not takes_any(builder):
            free = [key for key in parameters if key not in from_data and key not in elsewhere]
            hint = suggest(argument, free)
            raise ConfigError(
                f"model.arguments.{argument} is not known to '{name}'.{hint} "
                f"It takes: {', '.join(free) or 'none'}"
            )
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and key not in from_data
        and key not in elsewhere
        and key not in arguments
    ]
    if missing:
        raise ConfigError(f"model.arguments: '{name}' also needs {', '.join(missing)}.")
    types = types_of(builder)
    return {
        key: check_value(value, types.get(key), f"model.arguments.{key}") for key, value in arguments.items()
    }


def types_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """The annotated types of a builder's arguments; none where they cannot be read."""
    annotated = builder.__init__ if inspect.isclass(builder) else builder
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def check_value(value: Any, kind: Any, where: str) -> Any:
    """The value as this type has it (a YAML list becomes a tuple); a type we cannot read takes anything."""
    if kind is None:
        return value
    try:
        adapter = TypeAdapter(kind, config=ANY_TYPE)
    except (PydanticUserError, SchemaError):
        try:
            adapter = TypeAdapter(kind)  # settings of its own, such as those of a pydantic model
        except (PydanticUserError, SchemaError):
            return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reasons = [entry["msg"].removeprefix("Input should be ") for entry in error.errors()]
        raise ConfigError(
            f"{where} is {value!r}; it must be {' or '.join(dict.fromkeys(reasons))}."
        ) from None
