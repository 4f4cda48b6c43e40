"""Lists and cards of methods and objectives, written from the classes themselves."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

from wardround.methods import METHODS, OBJECTIVES
from wardround.tables import Table

FULL = "every client in every round; with fewer the absent keep their weight, and the run warns"


def method_list() -> Table:
    rows = [
        [
            name,
            kind.title,
            f"{kind.paper} {kind.year}".strip() if kind.year else kind.paper,
            kind.kind,
            kind.sends,
            ", ".join(sorted(kind.needs)) or "-",
            "yes" if kind.secure_sum else "no",
        ]
        for name, kind in METHODS.items()
    ]
    columns = ["name", "method", "paper", "kind", "sends beyond the model", "needs", "secure sum"]
    return Table("Methods", columns, rows)


def method_card(name: str) -> Table:
    kind = METHODS[name]
    return card(
        f"{kind.title} ({name})",
        kind,
        {
            "paper": f"{kind.paper} {kind.year or ''}".strip(),
            "link": kind.link,
            "kind": kind.kind,
            "sends beyond the model": kind.sends,
            "names in its replies": ", ".join(sorted(kind.up)),
            "needs": ", ".join(sorted(kind.needs - {"full"})),
            "made for": FULL if "full" in kind.needs else "",
            "works under secure summation": "yes" if kind.secure_sum else "no",
            "default objective": kind.objective,
        },
    )


def objective_list() -> Table:
    rows = [
        [name, kind.title, kind.paper or "-", ", ".join(sorted(kind.needs)) or "-"]
        for name, kind in OBJECTIVES.items()
    ]
    return Table("Objectives", ["name", "objective", "paper", "needs"], rows)


def objective_card(name: str) -> Table:
    kind = OBJECTIVES[name]
    return card(f"{kind.title} ({name})", kind, {"paper": kind.paper})


def card(title: str, kind: type[Any], facts: dict[str, str]) -> Table:
    """What it is, then its settings with types and defaults."""
    rows = [["what it does", first_line(kind)], *([key, value] for key, value in facts.items() if value)]
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        rows.append([f"setting {field.name}", f"{field.default!r} ({readable(hints[field.name])})"])
    return Table(title, ["", title], rows)


def first_line(kind: type[Any]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def readable(hint: Any) -> str:
    """A type as a reader would say it.

    >>> readable(float), readable(int | None)
    ('float', 'int | None')
    """
    choices = getattr(hint, "__args__", ())
    if str(hint).startswith("typing.Literal"):
        return " | ".join(str(choice) for choice in choices)
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")
