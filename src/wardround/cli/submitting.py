"""What `submit` sends: a configuration, a run to continue, a model to judge, or a plan from the survey."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from wardround.cli.common import err, leave_out, out, print_table
from wardround.cli.configure import refuse_budget
from wardround.cli.plan_screen import show_run_plan
from wardround.errors import ConfigError

if TYPE_CHECKING:
    from wardround.config import Config
    from wardround.deploy.kits.kit import Kit


def choose_run(
    kit: Kit,
    config: str | None,
    resume: str | None,
    evaluate: Path | None,
    *,
    budget: str | None,
    set_: list[str] | None,
    without: list[str] | None,
    hidden: bool,
) -> Config:
    """The run asked for: a file's, one to continue, a model to judge, or one planned from the survey."""
    from wardround.config_file import load_config
    from wardround.deploy import organising

    if sum(given is not None for given in (config, resume, evaluate)) > 1:
        raise ConfigError(
            "give one of these: a configuration to start a run, --resume RUN to continue one, --evaluate "
            "MODEL to judge a model; or none, to plan a run from the survey."
        )
    if resume is not None:
        stored = organising.load_stored_config(kit, resume)
        changes = [*(set_ or []), *leave_out([*stored.without, *(without or [])])]
        return load_config(stored, changes).model_copy(update={"output": stored.output})
    if evaluate is not None:
        from wardround.deploy.evaluating import configure_evaluation, load_judged

        return organising.place_at_organiser(configure_evaluation(load_judged(evaluate), set_), kit)
    survey = organising.find_survey(kit)
    if config is not None:
        refuse_budget(budget, Path(config))
        placed = organising.place_at_organiser(load_config(Path(config), set_ or []), kit)
        return organising.use_survey(placed, survey)
    if survey is None:
        raise ConfigError(
            "give a configuration to start a run, or --resume RUN to continue one. Without a configuration, "
            "ask the hospitals first: wardround survey; the run is then planned from what they said."
        )
    run = organising.plan_survey(kit.survey / "survey.json", kit.project, budget, set_)
    if not hidden:
        show_run_plan(run)
    return organising.place_at_organiser(organising.use_survey(run.config(), survey), kit)


def show_evaluation(folder: Path, json_: bool) -> None:
    """What `wardround evaluate` shows."""
    from wardround.comparison.runs import read_run
    from wardround.engine.judging.result_tables import client_table

    run = read_run(folder)
    if json_:
        out.print_json(json.dumps(run.evaluation))
        return
    assert run.test is not None
    print_table(client_table(run.test, run.metrics, run.label, run.lengths, run.remarks))
    for note in run.notes():
        err.print(f"[yellow]note[/] {escape(note)}")
    for who, why in run.failed_cases().items():
        err.print(f"[bold red]error[/] {escape(f'{who}: {why}')}")
    out.print(f"\nResults are in [bold]{escape(str(folder))}[/].")
