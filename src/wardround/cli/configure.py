"""configure: a configuration from the data alone, and `train` without one."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Quiet, Set, app, configure_logging, err, out, pause_gc
from wardround.cli.plan_screen import describe_run, print_wrapped, screen_width, show_run_plan
from wardround.cli.progress import show_cases, show_rounds
from wardround.files import writing

if TYPE_CHECKING:
    from wardround.config import Config
    from wardround.configuring.budget import Budget
    from wardround.configuring.run_plan import Adapt, RunPlan

BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="How long to train without a configuration file: quick (minutes), standard, full (also tries "
        "methods), a time (30m, 2h), or steps of each client.",
    ),
]
DEFAULT = "quick"
LISTS = (".csv", ".tsv")  # of cases: data, as a folder is
Given = Literal["configuration", "run", "federation", "folders"]
MOST_REMARKS = 8


@app.command()
def configure(
    paths: Annotated[
        list[Path],
        typer.Argument(help="A federation.yaml, folders or lists (CSV) of scans, or a survey.json."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("run.yaml"),
    budget: BudgetOption = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="An nnUNetPlans.json whose network and patch to take over.")
    ] = None,
    configuration: Annotated[
        str | None,
        typer.Option("--configuration", help="Of that plan; by default 3d_fullres, 2d for pictures."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier file.")] = False,
    set_: Set = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure the data, choose every setting, and write them as a file to edit, each with its reason."""
    configure_logging(debug, quiet)
    from wardround.configuring.budget import parse_budget
    from wardround.configuring.plan_file import as_configuration
    from wardround.errors import ConfigError
    from wardround.files import write_text

    wanted = parse_budget(DEFAULT if budget is None else budget)
    if paths[0].suffix.lower() == ".json":
        configure_from_survey(paths[0], output, budget, set_, overwrite=overwrite, quiet=quiet)
        return
    if recognise(paths) in ("configuration", "run"):
        raise ConfigError(
            f"{paths[0]} is a configuration already; give a federation.yaml or folders of scans."
        )
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} already exists and may hold edits of yours; give -o, or --overwrite.")
    adapt = take_over_plan(from_, configuration)
    federation = find_federation(paths, quiet)
    locate_run(federation, set_)  # refuses a misspelt setting before minutes of measuring
    run = make_run_plan(federation, wanted, set_, quiet, adapt)
    run.config()  # refuses settings that do not fit together, before the file is there
    with writing(output):
        write_text(output, as_configuration(run.plan, output, federation, [*describe_run(run), *run.notes]))
    if not quiet:
        show_run_plan(run)
        if wanted.tries_methods:
            out.print("Methods are tried by `wardround train --budget full`; this file has FedAvg.")
    following = escape(f"wardround train {shlex.quote(str(output))}")
    out.print(f"\nWrote [bold]{escape(str(output))}[/], every line with its reason. Next: {following}")


def configure_from_survey(
    survey: Path, output: Path, budget: str | None, set_: list[str] | None, *, overwrite: bool, quiet: bool
) -> None:
    """The same from what hospitals said, for `wardround submit`."""
    from wardround.configuring.plan_file import as_configuration
    from wardround.deploy.organising import plan_survey
    from wardround.errors import ConfigError
    from wardround.files import write_text

    if output.exists() and not overwrite:
        raise ConfigError(f"{output} already exists and may hold edits of yours; give -o, or --overwrite.")
    run = plan_survey(survey, output.stem, budget, set_)
    run.config()
    with writing(output):
        notes = [*describe_run(run), *run.notes]
        write_text(output, as_configuration(run.plan, output, survey, notes, command="submit"))
    if not quiet:
        show_run_plan(run)
    following = escape(f"wardround submit {shlex.quote(str(output))}")
    out.print(f"\nWrote [bold]{escape(str(output))}[/], every line with its reason. Next: {following}")


def take_over_plan(path: Path | None, configuration: str | None) -> Adapt | None:
    """What puts nnU-Net's choices in place of ours; its file is read before minutes of measuring."""
    from wardround.configuring.nnunet_plans import read_nnunet_plans, take_over
    from wardround.errors import ConfigError

    if path is None:
        if configuration is not None:
            raise ConfigError("--configuration names a part of an nnU-Net plan; give it with --from.")
        return None
    read_nnunet_plans(path, configuration)
    return lambda plan: take_over(plan, path, configuration)


# What the user gave


def recognise(paths: Sequence[Path]) -> Given:
    """What kind of thing `train` was given: a configuration, a run, a federation.yaml, or folders of data."""
    from wardround.builtin_configs import find_config, list_paths
    from wardround.configuring.plan_file import PLAN
    from wardround.errors import ConfigError
    from wardround.text import suggest
    from wardround.yaml_file import read_yaml

    first = paths[0]
    if len(paths) == 1 and first.is_dir():
        return "run" if any((first / name).exists() for name in ("config.yaml", PLAN)) else "folders"
    if len(paths) == 1 and first.suffix.lower() in LISTS and first.is_file():
        return "folders"
    if len(paths) > 1:
        files = [path for path in paths if path.suffix.lower() in (".yaml", ".yml")]
        if files:
            raise ConfigError(
                f"{files[0]} is one of {len(paths)} arguments; give one file, or folders alone."
            )
        return "folders"
    found = find_config(first)
    if not found.exists() and found.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(
            f"{first} does not exist.{suggest(str(first), list_paths())} Give a folder of scans, a "
            "federation.yaml, a configuration, its name (wardround configs), or the folder of a run."
        )
    return "federation" if describes_data(read_yaml(found)) else "configuration"


def describes_data(values: Mapping[str, Any]) -> bool:
    """Whether the keys of a file are those of a federation.yaml, be it with `sources` misspelt."""
    from wardround.config import Config
    from wardround.data.federation_file import FederationFile

    of_data, of_run = values.keys() & FederationFile.model_fields, values.keys() & Config.model_fields
    return "sources" in values or len(of_data) > len(of_run)


def find_federation(paths: Sequence[Path], quiet: bool) -> Path:
    """The federation.yaml given, that of a folder, or a new one here; it is never replaced."""
    from wardround.data.federation_file import load, write
    from wardround.data.proposing.proposal import describe, propose
    from wardround.errors import ConfigError

    if recognise(paths) == "federation":
        return paths[0]
    inside = paths[0] / "federation.yaml"
    if len(paths) == 1 and inside.exists():
        err.print(f"Using [bold]{escape(str(inside))}[/], which describes this folder.")
        return inside
    path = Path("federation.yaml")
    if path.exists():
        file = load(path)
        if {source.path.resolve() for source in file.sources} != {place.resolve() for place in paths}:
            raise ConfigError(
                f"{path} is here already and describes other folders. Write one of another name: wardround "
                f"data init {shlex.join(map(str, paths))} -o {paths[0].resolve().name}.yaml; then train that."
            )
        err.print(f"Using [bold]{path}[/], which describes these folders; remove it to inspect them again.")
        return path
    if not quiet:
        err.print("Inspecting folders ...")
    proposal = propose(paths, watch=lambda what: None)
    with writing(path):
        write(proposal.file, path, notes=describe(proposal), proposed=proposal.proposed)
    remarks = proposal.remarks
    for remark in remarks[:MOST_REMARKS]:
        err.print(escape(f"! {remark}"))
    if len(remarks) > MOST_REMARKS:
        err.print(f"! and {len(remarks) - MOST_REMARKS} more, at the top of {path}")
    err.print(
        f"Wrote [bold]{path}[/]: who takes part, with what data. It says what was found; edit it freely."
    )
    return path


def make_run_plan(
    path: Path, budget: Budget, set_: list[str] | None, hidden: bool, adapt: Adapt | None = None
) -> RunPlan:
    """Measure, time and plan, with progress; Ctrl-C leaves nothing behind."""
    with pause_gc():
        from wardround.configuring.run_plan import plan_run

    def say_timing() -> None:
        if not hidden:
            err.print("timing training steps on this machine ...")

    advice = "nothing was lost. Run the same command again"
    with stopping("before training", advice), show_cases("measuring", hidden) as watch:
        changed = {} if adapt is None else {"adapt": adapt}
        return plan_run(path, budget, set_ or [], watch=watch, on_timing=say_timing, **changed)
    raise AssertionError  # stopping() has ended the command


@contextmanager
def stopping(what: str, advice: str) -> Iterator[None]:
    """Ctrl-C inside is one sentence and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"Stopped {what}; {escape(advice)}.")
        raise typer.Exit(130) from None


# A planned run


def refuse_budget(budget: str | None, path: Path) -> None:
    from wardround.errors import ConfigError

    if budget is not None:
        raise ConfigError(
            f"--budget plans a run on a federation.yaml or folders of scans; {path} says itself how long it "
            "trains. Leave --budget out, or change rounds with --set."
        )


def read_config(path: Path, set_: list[str] | None) -> Config:
    """The configuration in a YAML file, or of a run folder, even one that was moved."""
    from wardround.config_file import load_config

    overrides = list(set_ or [])
    if path.is_dir():
        overrides.insert(0, f"output={json.dumps(str(path))}")
        path = path / "config.yaml"
    return load_config(path, overrides)


def prepare_planned(
    paths: Sequence[Path],
    budget: str | None,
    set_: list[str] | None,
    *,
    resume: bool,
    overwrite: bool,
    hidden: bool,
) -> tuple[Config, dict[str, str]]:
    """The configuration of a run without one, and what its folder begins with; nothing where it goes on."""
    from wardround.configuring.budget import parse_budget
    from wardround.configuring.method_choice import is_open
    from wardround.configuring.plan_file import PLAN
    from wardround.engine.run_folder import check_folder
    from wardround.errors import CheckpointError, ConfigError

    wanted = parse_budget(DEFAULT if budget is None else budget)
    if recognise(paths) == "run":
        if not resume:
            raise ConfigError(
                f"{paths[0]} holds a plan whose training has not begun. Add --resume to begin it."
            )
        return finish_choice(paths[0], set_, hidden)
    federation = find_federation(paths, hidden)
    place = locate_run(federation, set_)
    if resume:
        check_same_budget(place.folder, budget)
        if (place.folder / "config.yaml").exists():
            return read_config(place.folder, set_), {}
        if (place.folder / PLAN).exists():
            return finish_choice(place.folder, set_, hidden)
        raise CheckpointError(f"{place.folder} holds no run to resume. Leave --resume out.")
    check_folder(place, resume=False, overwrite=overwrite)  # before minutes of measuring
    run = make_run_plan(federation, wanted, set_, hidden)
    if not hidden:
        show_run_plan(run)
        more = "" if budget is not None else " Train longer: --budget standard, full, 30m or 2h."
        print_wrapped(f"All choices and reasons: {place.folder / PLAN}.{more}", screen_width())
        out.print()
    if wanted.tries_methods and is_open(run.plan):
        begin_choice(run, place.folder)
        return finish_choice(place.folder, None, hidden)
    return run.config(), run.make_files()


def check_same_budget(folder: Path, budget: str | None) -> None:
    """Refuse another budget than that of the plan which is resumed."""
    from wardround.configuring.budget import parse_budget
    from wardround.configuring.plan_file import PLAN, read_record
    from wardround.errors import ConfigError

    if budget is None or not (folder / PLAN).exists():
        return
    planned = str(read_record(folder)[1].get("budget"))
    if parse_budget(budget).name != planned:
        raise ConfigError(
            f"{folder} was planned for --budget {planned} and goes on with that. Leave --budget out, or "
            "begin again with --overwrite in place of --resume."
        )


def locate_run(federation: Path, set_: list[str] | None) -> Config:
    """A configuration of the user's settings alone, checked before minutes of measuring, which has the folder
    of the run: by the data's name, unless set otherwise.
    """
    from wardround.config import Config
    from wardround.configuring.run_plan import name_run
    from wardround.data.federation_file import load
    from wardround.yaml_file import apply_override

    values: dict[str, Any] = {"name": name_run(federation, load(federation))}
    for override in [f"data.federation={json.dumps(str(federation))}", *(set_ or [])]:
        apply_override(values, override)
    return Config.read(values)


def begin_choice(run: RunPlan, folder: Path) -> None:
    """Write the plan before methods are tried, so that an interrupted choice can go on."""
    from wardround.configuring.method_choice import CHOICE
    from wardround.engine.run_folder import LOCK, clear_run
    from wardround.files import write_text

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / CHOICE, ignore_errors=True)
        clear_run(folder)  # one that is replaced, not to be resumed
        (folder / LOCK).touch()
        for name, text in run.make_files().items():
            write_text(folder / name, text)


def finish_choice(folder: Path, set_: list[str] | None, hidden: bool) -> tuple[Config, dict[str, str]]:
    """Try the methods that are left, and take the best; a plan whose method is chosen is taken as it is."""
    from wardround.config_file import load_config
    from wardround.configuring.method_choice import CHOICE, choose_method, clear_trials, is_open
    from wardround.configuring.plan_file import PLAN, as_record, read_record
    from wardround.files import write_text

    plan, facts = read_record(folder)
    if "methods" not in facts and is_open(plan):
        if not hidden:
            err.print("Trying methods on validation cases; the best trains on.")
        advice = f"what was tried is kept. Continue with: wardround train {folder} --resume"
        with stopping("while choosing the method", advice), show_rounds(hidden) as screen:
            plan, chosen = choose_method(plan, folder / CHOICE, watch=screen)
        facts["methods"] = chosen.as_dict()
        if not hidden:
            out.print(escape(f"Method {chosen.name}: {chosen.describe()}."))
        write_text(folder / PLAN, as_record(plan, facts))
        clear_trials(folder / CHOICE)
    files = {
        PLAN: as_record(plan, facts),
        "egress.jsonl": (folder / "egress.jsonl").read_text(encoding="utf-8"),
    }
    return load_config(plan.settings(), [f"output={json.dumps(str(folder))}", *(set_ or [])]), files
