"""Objects of a named class from the settings of a configuration, as in `method: {name: fedprox, mu: 0.1}`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from wardround.errors import ConfigError
from wardround.plugins import Registry
from wardround.settings import explain
from wardround.text import suggest


def build_named(registry: Registry[Any], settings: Mapping[str, Any], where: str) -> Any:
    """An object of the named class, its fields checked like every other setting."""
    chosen = dict(settings)
    name = chosen.pop("name", "fedavg" if where == "method" else None)
    kind: Any = registry.find(str(name))
    fields = {entry.name for entry in dataclasses.fields(kind)}
    for key in chosen:
        if key not in fields:
            raise ConfigError(
                f"{where}.{key} is not a setting of '{name}'.{suggest(key, fields)} "
                f"It has: {', '.join(sorted(fields)) or 'none'}."
            )
    try:
        return _adapter(kind).validate_python(chosen)
    except ValidationError as error:
        raise ConfigError(explain(error, None, f"{where}.")) from None


@lru_cache(maxsize=256)
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """The validator of a class; making one takes longer than using it."""
    return TypeAdapter(kind)
