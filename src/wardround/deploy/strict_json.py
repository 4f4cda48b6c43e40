"""JSON of another party, read within `limits`: refused in words before it costs much memory or time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from wardround.deploy import limits

LONGEST_INTEGER = len(str(-limits.INTEGER))


def parse_json(text: Any) -> Any:
    """What the text says; a ValueError that continues "it ..." where it breaks a limit or is not JSON."""
    reason = find_excess(text)
    if reason is not None:
        raise ValueError(reason)
    try:
        return json.loads(text, parse_int=_parse_integer, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"is nested more than {limits.DEPTH} levels deep") from None
    except json.JSONDecodeError:
        raise ValueError("is not readable JSON") from None


def find_excess(text: Any) -> str | None:
    """What is too much about a JSON text that was not parsed yet, or None."""
    if not isinstance(text, str) or len(text) > limits.HEADER_CHARACTERS:
        return f"is not text, or is longer than {limits.HEADER_CHARACTERS:,} characters"
    if sum(map(text.count, ",:[{")) > limits.ITEMS:  # those inside texts count too; honest ones have few
        return f"has more than {limits.ITEMS:,} items"
    return None


def _parse_integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError("holds an integer of more than 64 bits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # two readers could take different ones
        raise ValueError("names a key twice")
    return found


def as_plain(value: Any, key: str | None = None, depth: int = 0) -> Any:
    """The same value made of JSON's own types alone; a ValueError names what is not, or is too much.

    key: under which it stands in its object, None for the header itself.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= limits.TEXT:
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int) and abs(value) < limits.INTEGER:
        return int(value)
    if isinstance(value, list | tuple) and depth <= limits.DEPTH:
        return [as_plain(item, key, depth + 1) for item in value]
    if isinstance(value, (dict, Mapping)) and depth <= limits.DEPTH and all(map(_is_name, value)):
        return {str(name): as_plain(item, name, depth + 1) for name, item in value.items()}
    where = "the header" if key is None else f"'{show(key)}'"
    raise ValueError(f"{where} {_find_fault(value)}")


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and len(key) <= limits.TEXT


def _find_fault(value: Any) -> str:
    """Why a value has no place in a header."""
    if isinstance(value, str):
        return f"holds a text of more than {limits.TEXT:,} characters"
    if isinstance(value, int):
        return "holds an integer of more than 64 bits"
    if isinstance(value, Mapping) and (odd := [name for name in value if not _is_name(name)]):
        kind = "too many characters" if isinstance(odd[0], str) else f"type {type(odd[0]).__name__}"
        return f"has a key of {kind}, which cannot be sent"
    if isinstance(value, list | tuple | Mapping):
        return f"is nested more than {limits.DEPTH} levels deep"
    return f"holds a {type(value).__name__}, which cannot be sent"


def is_shape(value: Any) -> bool:
    """Whether this is a list of sides that can be multiplied: few, none too long, not too many numbers."""
    return (
        isinstance(value, list)
        and len(value) <= limits.AXES
        and all(type(side) is int and 0 <= side <= limits.SIDE for side in value)
        and math.prod(value) <= limits.NUMBERS
    )


def show(value: Any) -> str:
    """An untrusted value for a message: short, on one line, printable characters only."""
    text = ascii(value[:100] if isinstance(value, str | list | tuple) else value)
    text = text[1:-1] if isinstance(value, str) else text
    return text if len(text) <= 80 else text[:77] + "..."
