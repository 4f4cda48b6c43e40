"""One objective for all rows of a comparison, so that methods differ and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from wardround.comparison.grid import Row, check_settings, find_reference
from wardround.errors import ConfigError
from wardround.methods import build_method
from wardround.tables import one_line


def give_one_objective(rows: Sequence[Row], reference: str | None) -> tuple[list[Row], str]:
    """The rows with one objective, and a sentence about it.

    It is that of the reference; where a method cannot use it, the first of the other rows' that all can.
    """
    first = find_reference(rows, reference)
    ordered = sorted(rows, key=lambda row: row.label != first)  # the reference comes first, the rest stays
    refused = ""
    for row in ordered:
        chosen = find_objective(row)
        try:
            found = [set_objective(entry, chosen) for entry in rows]
        except ConfigError as error:
            refused = refused or str(error)
            continue
        return found, f"All rows have the objective of '{row.label}', {chosen['name']} (--same-objective)."
    raise ConfigError(f"--same-objective: no row's objective suits all rows. {refused}")


def find_objective(row: Row) -> dict[str, Any]:
    """The objective of a row with its settings, the method's own where none is named."""
    config = check_settings(row.settings, f"row '{one_line(row.label, 60)}'", quiet=True)
    return {"name": build_method(config).objective, **config.objective}


def set_objective(row: Row, objective: Mapping[str, Any]) -> Row:
    changed = {"objective": dict(objective)}
    kept = {key: value for key, value in row.changes.items() if key.partition(".")[0] != "objective"}
    result = replace(row, settings={**row.settings, **changed}, changes={**kept, **changed})
    check_settings(result.settings, f"row '{one_line(row.label, 60)}'", quiet=True)
    return result
