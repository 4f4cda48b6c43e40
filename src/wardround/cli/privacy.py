"""privacy: what a hospital, or a run, has spent of its differential privacy budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from wardround.cli.common import Debug, Json, app, configure_logging, out, print_table
from wardround.errors import ConfigError
from wardround.tables import Table

privacy_app = typer.Typer(name="privacy", help="Differential privacy of what leaves.", no_args_is_help=True)
app.add_typer(privacy_app)


@privacy_app.callback()
def family() -> None:
    """Differential privacy of what leaves."""


@privacy_app.command()
def status(
    path: Annotated[
        Path,
        typer.Argument(
            help="A hospital's kit, its state folder, a run folder, or a privacy.jsonl.", metavar="PLACE"
        ),
    ],
    delta: Annotated[
        float | None, typer.Option("--delta", help="At this delta; default: that of site.yaml or of the run.")
    ] = None,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Show what was spent: epsilon by run and together, and what it covers."""
    configure_logging(debug, json_)
    from wardround.privacy.budget import PrivacyBudget
    from wardround.privacy.words import SHARED, describe_covered

    if delta is not None and not 0 < delta < 1:
        raise ConfigError(f"--delta is {delta:g}; it must be between 0 and 1.")
    files = find_budgets(path)
    settings = find_settings(path)
    at = delta or settings.delta
    entries = [entry for file in files for entry in summarise(PrivacyBudget(file), at, file)]
    limit = settings.epsilon if settings.is_on else None
    if json_:
        out.print_json(json.dumps({"delta": at, "limit": limit, "spent": entries}))
        return
    rows = [[e["client"], e["run"], e["level"], e["answers"], f"{e['epsilon']:.3f}"] for e in entries]
    if rows:
        print_table(Table(f"Spent at delta {at:g}", ["where", "run", "level", "answers", "epsilon"], rows))
    out.print("" if rows else f"{path} has spent nothing yet.")
    for level in dict.fromkeys(entry["level"] for entry in entries):
        out.print(f"{level.capitalize()} level covers {describe_covered(level)}.")
    if any(entry["shared"] for entry in entries):
        out.print(SHARED)
    if limit is not None:
        whose = "this run" if (path / "config.yaml").exists() else "all runs together"
        out.print(f"Epsilon of {whose} may reach {limit:g} (privacy.epsilon).")


def summarise(budget: Any, delta: float, file: Path) -> list[dict[str, Any]]:
    """A row for each run of a budget file, and one for all where there are several."""
    from wardround.privacy.accountant import count_epsilon

    lines = budget.read()
    groups = {run: [line for line in lines if line.run == run] for run in dict.fromkeys(e.run for e in lines)}
    if len(groups) > 1:
        groups["all runs"] = lines
    return [
        {
            "client": (file.parent.parent if file.parent.name == "state" else file.parent).name,
            "run": run,
            "level": " and ".join(sorted({line.level for line in those})),
            "answers": len(those),
            "shared": any(line.is_shared for line in those),
            "epsilon": count_epsilon([line.release for line in those], delta),
        }
        for run, those in groups.items()
    ]


def find_budgets(path: Path) -> list[Path]:
    """The budget files of a place."""
    from wardround.privacy import BUDGET_FILE

    if path.is_file():
        return [path]
    places = [
        path / BUDGET_FILE,
        path / "state" / BUDGET_FILE,
        *sorted(path.glob(f"clients/*/{BUDGET_FILE}")),
    ]
    found = [place for place in places if place.exists()]
    if not found and not (path / "site.yaml").exists():  # a kit that has not answered yet has spent nothing
        raise ConfigError(
            f"{path} has no {BUDGET_FILE}: nothing was spent there. Give a kit or a run folder."
        )
    return found


def find_settings(path: Path) -> Any:
    """The privacy section that applies at a place: of a kit's site.yaml, or of a run's configuration."""
    from wardround.privacy import PrivacySettings
    from wardround.yaml_file import read_yaml

    for place in (path / "site.yaml", path.parent / "site.yaml", path / "config.yaml"):
        if place.exists():
            section = read_yaml(place).get("privacy")
            return PrivacySettings.read(section or {}, f"{place}: privacy.")
    return PrivacySettings()
