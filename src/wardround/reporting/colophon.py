"""How a run was made, and what to cite: configuration, environment, seed, commit, hash, papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from wardround.comparison.runs import Run, number
from wardround.methods import METHODS, OBJECTIVES
from wardround.reporting.html import Html, details, join, link, name, section, tag
from wardround.reporting.tabular import facts_table


def colophon_section(run: Run, prefix: str) -> Html:
    """What one needs to repeat the run."""
    environment = run.environment
    rows: list[tuple[str, Any]] = [
        *list_evaluation_facts(run),
        (
            "method",
            join(name(run.method), f" ({METHODS[run.method].title})" if run.method in METHODS else ""),
        ),
        ("objective", name(run.objective or "the method's own")),
        ("seed", str(run.config.get("seed", ""))),
        *([] if run.is_evaluation else [("rounds", f"{len(run.records)} of {run.rounds}")]),
        ("commit", tag("code", str(environment.get("commit") or "installed package"))),
        (
            "final parameters (SHA-256)",
            tag("code", str(run.result.get("params_sha256", "not yet")), class_="hash"),
        ),
        *([] if run.is_evaluation else [("seconds in rounds", format_seconds(run))]),
        ("folder", tag("code", str(run.folder))),
    ]
    rows += [(key, str(value)) for key, value in environment.items() if key not in ("commit", "seed")]
    text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    folded = details("Configuration, every default written out", tag("pre", tag("code", text), tabindex="0"))
    lead = (
        "Nothing was trained here: method, seed, environment and configuration are those of the run that "
        "trained the model."
        if run.is_evaluation
        else None
    )
    return section(
        f"{prefix}-made", "How it was made", facts_table("How it was made", rows), folded, level=3, lead=lead
    )


def list_evaluation_facts(run: Run) -> list[tuple[str, Any]]:
    """Which model was evaluated, and on what; nothing for a training run."""
    found = run.evaluation
    if not found:
        return []
    models = found.get("run")
    folders = [str(entry) for entry in models] if isinstance(models, list) else [str(models)]
    rows = [
        ("model of", [[", "] * (place > 0) + [tag("code", folder)] for place, folder in enumerate(folders)]),
        ("data", tag("code", str(found.get("data", "")))),
        ("split", str(found.get("split", ""))),
        ("evaluated on the grid", str(found.get("grid", ""))),
        ("mirrored (test-time augmentation)", "yes" if found.get("flips") else "no"),
    ]
    return rows if found.get("client") is None else [*rows, ("model of client", name(str(found["client"])))]


def format_seconds(run: Run) -> str:
    return f"{number(run.result.get('seconds')):.1f}" if run.result else "not yet"


def citation_section(runs: Sequence[Run]) -> Html:
    """The papers behind the methods and objectives that ran."""
    methods = list(dict.fromkeys(run.method for run in runs))
    objectives = list(dict.fromkeys(run.objective for run in runs if run.objective))
    items = []
    for key in methods:
        kind = METHODS.get(key)
        if kind is None:
            items.append(tag("li", name(key)))
            continue
        paper = f"{kind.paper} {kind.year}" if kind.year else kind.paper
        where = join(". ", link(kind.link)) if kind.link else None
        said = paper or ("a reference, no paper" if kind.kind == "reference" else "no paper named")
        items.append(tag("li", tag("strong", kind.title), ": ", said, where, "."))
    for key in objectives:
        objective = OBJECTIVES.get(key)
        if objective is not None and objective.paper:
            items.append(tag("li", tag("strong", objective.title), " (objective): ", objective.paper, "."))
    lead = "These are the sources of what ran here. Please cite them, and name the version of wardround."
    return section("cite", "How to cite", tag("ul", items, class_="cite"), lead=lead)
