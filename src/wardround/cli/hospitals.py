"""rehearse, server, submit, status, stop: the organiser's commands for real hospitals."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from wardround.cli.common import (
    Debug,
    FromRound,
    Json,
    Overwrite,
    Quiet,
    Resume,
    Set,
    Without,
    app,
    configure_logging,
    err,
    out,
    print_table,
)
from wardround.cli.configure import BudgetOption, read_config
from wardround.cli.progress import show_rounds, stop_at_round_end
from wardround.cli.runs import show_result
from wardround.cli.submitting import choose_run, show_evaluation
from wardround.deploy import require
from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import Kit, find_organisers_kit, open_kit
from wardround.deploy.live_file import describe_waiting, find_running, read_live
from wardround.deploy.processes import LOG_BYTES, end_after, end_with_input
from wardround.errors import WardroundError
from wardround.tables import Table, one_line

if TYPE_CHECKING:
    from wardround.config import Config
    from wardround.deploy.organising import Submission

KitOption = Annotated[
    Path | None, typer.Option("--kit", help="The organiser's kit; default: the one nearby.", metavar="KIT")
]
GOING = ("queued", "starting", "waiting", "working")


@app.command()
def rehearse(
    config: Annotated[
        Path, typer.Argument(help="A YAML file, or the folder of a rehearsal to resume.", metavar="CONFIG")
    ],
    set_: Set = None,
    resume: Resume = False,
    from_round: FromRound = None,
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run the whole deployment on this machine: a server and a process per hospital, with mutual TLS."""
    prepare(debug, quiet or json_)
    from wardround.deploy.rehearsal import rehearsal

    checked = read_config(config, set_)
    say = make_speaker(quiet or json_)
    with (
        leaving_on_signals(),
        show_rounds(quiet or json_) as screen,
        rehearsal(checked, resume=resume, overwrite=overwrite, say=say, from_round=from_round) as submission,
        stop_at_round_end(submission.stop),
    ):
        state = submission.follow(screen, say)
    finish(submission.config, state, json_, f"wardround rehearse {checked.folder} --resume")


@app.command()
def server(
    kit: Annotated[Path, typer.Argument(help="The organiser's kit.", metavar="KIT")],
    runs: Annotated[
        int, typer.Option("--runs", min=1, max=4, help="Runs at the same time; others wait their turn.")
    ] = 4,
    debug: Debug = False,
) -> None:
    """Start the organiser's server and keep it running; hospitals connect to it."""
    prepare(debug, False)
    from wardround.deploy.preflight.kit import refuse_broken
    from wardround.deploy.server import OrganiserServer

    opened = open_kit(kit, "organiser")
    say = make_speaker(False)
    if warning := refuse_broken(opened):
        say(f"warning: {warning}")
    log_to_kit(opened, "server")
    end_with_input()
    with leaving_on_signals(), OrganiserServer(opened, say, runs) as running:
        say(
            f"project '{opened.project}' is listening on port {opened.port}. Next: wardround submit CONFIG "
            f"--kit {kit}. Ctrl-C ends."
        )
        running.serve()


@app.command()
def submit(
    config: Annotated[
        str | None,
        typer.Argument(help="A YAML file; left out, the run is planned from the survey.", metavar="CONFIG"),
    ] = None,
    kit: KitOption = None,
    set_: Set = None,
    budget: BudgetOption = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--evaluate",
            metavar="MODEL",
            help="Train nothing: hospitals judge this model, of a run or an exported folder.",
        ),
    ] = None,
    split: Annotated[
        Literal["test", "val", "train", "all"],
        typer.Option(help="With --evaluate: which cases, by each hospital's own splits."),
    ] = "test",
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="Continue this run from its last checkpoint."),
    ] = None,
    hospitals: Annotated[
        str | None,
        typer.Option("--hospitals", metavar="A,B", help="Who takes part; default: those connected now."),
    ] = None,
    from_round: FromRound = None,
    without: Without = None,
    overwrite: Overwrite = False,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Submit a run to the running server; the hospitals that are connected take part."""
    prepare(debug, quiet or json_)
    opened, say = find_organisers_kit(kit), make_speaker(quiet or json_)
    checked = choose_run(
        opened, config, resume, evaluate, budget=budget, set_=set_, without=without, hidden=quiet or json_
    )
    begun = {"resume": resume is not None, "overwrite": overwrite, "from_round": from_round}
    submission, names = begin_run(opened, checked, hospitals, evaluate, split, **begun)
    say(f"hospitals: {', '.join(names)}")
    say(f"run '{checked.name}' was submitted; its files are in {checked.folder}")
    if detach and json_:
        facts = {"run": checked.name, "folder": str(checked.folder), "job": submission.job}
        out.print_json(json.dumps({**facts, "hospitals": names}))
        return
    if detach:
        say(f"watch it with: wardround status --watch --kit {opened.folder}")
        return
    state = watch_run(submission, opened, quiet or json_ or evaluate is not None, say)
    if evaluate is not None:
        show_evaluation(checked.folder, json_)
        return
    finish(checked, state, json_, f"wardround submit --resume {checked.folder.name} --kit {opened.folder}")


def begin_run(
    kit: Kit, config: Config, hospitals: str | None, evaluate: Path | None, split: str, **begun: Any
) -> tuple[Submission, list[str]]:
    """Submit the run, or the evaluation, and say who takes part; begun: resume, overwrite, from_round."""
    from wardround.deploy import organising

    more: dict[str, Any] = {}
    if evaluate is not None:
        more = {"kind": "evaluation", "model": str(evaluate.absolute()), "split": split}
    if not begun["resume"]:
        organising.refuse_second(config, kit, begun["overwrite"], is_evaluation=evaluate is not None)
    queue = open_queue(kit)
    organising.refuse_running(queue, config)
    asked = None if hospitals is None else organising.parse_hospitals(hospitals)
    names = organising.choose_hospitals(queue, config, asked, resume=begun["resume"])
    proposals = organising.list_proposals(config, organising.find_survey(kit), names)
    return organising.submit(queue, config, names, proposals=proposals, **begun, **more), names


def watch_run(submission: Submission, kit: Kit, hidden: bool, say: Callable[[str], None]) -> str:
    """Show the run; Ctrl-C leaves it running."""
    try:
        with show_rounds(hidden) as screen:
            return submission.follow(screen, say)
    except KeyboardInterrupt:
        err.print(
            f"The run continues. See it with: wardround status --watch --kit {escape(str(kit.folder))}; end "
            f"it with: wardround stop --kit {escape(str(kit.folder))}"
        )
        raise typer.Exit(130) from None


@app.command()
def status(
    kit: KitOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until the run ends.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Show it in a browser of this machine.")] = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Show which hospitals are connected, all runs, and what the one in progress waits for."""
    prepare(debug, json_)
    opened = find_organisers_kit(kit)
    if page:
        show_page(opened)
        return
    try:
        while True:
            facts = collect_state(opened)
            trouble = "" if facts["server"] == "running" else str(facts["server"])
            if json_:
                out.print_json(json.dumps(facts))
            else:
                show_state(facts, trouble, clear=watch and out.is_terminal)
            goes_on = any(entry["state"] in GOING for entry in facts["runs"])
            if not watch or not goes_on:
                break
            time.sleep(3.0)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if trouble:
        raise typer.Exit(1)


def show_page(kit: Kit) -> None:
    """The same in a browser, until Ctrl-C."""
    from wardround.deploy.status_page import StatusPage

    served = StatusPage(lambda: collect_state(kit))
    out.print(f"Open {served.url} in a browser of this machine. Ctrl-C ends.", markup=False, soft_wrap=True)
    end_with_input()
    with leaving_on_signals():
        served.serve()


def collect_state(kit: Kit) -> dict[str, Any]:
    """Server, hospitals and runs, as plain values."""
    trouble, hospitals, facts = "", dict[str, float](), dict[str, Any]()
    try:
        queue = open_queue(kit)
        hospitals, facts = queue.connected(), queue.read_server()
    except WardroundError as error:
        trouble = str(error)
    return {
        "server": trouble or "running",
        "hospitals": [
            {
                "hospital": name,
                "heard of": f"{seconds:.0f} s ago",
                "certificate": describe_expiry(facts["expires"].get(name)),
                "now": str(facts["transfers"].get(name, "")),
            }
            for name, seconds in sorted(hospitals.items())
        ],
        "runs": list_runs(kit),
    }


def describe_expiry(moment: str | None) -> str:
    """Until when a certificate is valid; one that ends soon in days, with what to do."""
    from wardround.deploy.preflight.kit import SOON

    if moment is None:
        return ""
    end = datetime.fromisoformat(moment)
    left = end - datetime.now(UTC)
    return f"until {end:%Y-%m-%d}" if left > SOON else f"{left.days} days left: ask it to renew"


def show_state(facts: dict[str, Any], trouble: str, *, clear: bool) -> None:
    if clear:
        out.clear()
    if trouble:
        err.print(escape(trouble))
    elif facts["hospitals"]:
        heads = ("hospital", "heard of", "certificate", "now")
        rows = [[entry[key] for key in heads] for entry in facts["hospitals"]]
        print_table(Table("Hospitals", heads, rows))
        out.print()
    else:
        out.print("No hospital is connected.\n")
    if facts["runs"]:
        columns = ("run", "state", "round", "now")
        print_table(Table("Runs", columns, [[entry[key] for key in columns] for entry in facts["runs"]]))
    else:
        out.print("No run yet.")


def list_runs(kit: Kit) -> list[dict[str, Any]]:
    """Every run of the organiser: its state, how far it is, and what it waits for."""
    rows, queue = [], JobQueue(kit)
    waiting = queue.list_waiting()
    for path in sorted(kit.runs.glob("*/live.json")):
        facts = read_live(path.parent)
        if facts is None:
            continue
        state, name = str(facts["state"]), path.parent.name
        now = [describe_waiting(facts) or str(facts.get("reason") or ""), *describe_absent(facts)]
        if facts.get("job") in waiting:
            now = [f"place {waiting.index(facts['job']) + 1} of {len(waiting)} in the queue"]
        elif state in GOING and not is_still_running(queue, str(facts.get("job"))):
            state, now = "interrupted", [f"continue it with: wardround submit --resume {name}"]
        rounds = int(facts.get("rounds") or 0)
        rows.append(
            {
                "run": name,
                "state": state,
                "round": f"{min(int(facts.get('round') or 0), rounds)} of {rounds}",
                "now": "; ".join(part for part in now if part),
                "live": facts,
            }
        )
    return rows


def is_still_running(queue: JobQueue, job: str) -> bool:
    """Whether the run's process is still there; live.json cannot tell that it was killed."""
    return queue.is_server_running() and queue.find_state(job) != "ended"


def describe_absent(facts: dict[str, Any]) -> list[str]:
    """Which hospitals do not take part, and why."""
    return [f"without '{name}': {reason}" for name, reason in sorted((facts.get("away") or {}).items())]


@app.command()
def stop(
    run: Annotated[
        str | None, typer.Argument(help="Its name; default: the one in progress.", metavar="RUN")
    ] = None,
    kit: KitOption = None,
    now: Annotated[bool, typer.Option("--now", help="At once, not at the end of the round.")] = False,
    debug: Debug = False,
) -> None:
    """End a run after its current round, with a checkpoint; it can be resumed."""
    prepare(debug, False)
    opened = find_organisers_kit(kit)
    queue = JobQueue(opened)
    is_served = queue.is_server_running()
    name, facts = find_running(opened, run, lambda job: not is_served or queue.find_state(job) != "ended")
    queue = open_queue(opened)
    is_waiting = queue.find_state(str(facts["job"])) == "waiting"
    queue.ask(str(facts["job"]), "abort" if now else "stop")
    if is_waiting:
        out.print(f"Run '{escape(name)}' is taken out of the queue; it had not begun.")
        return
    when = "at once; the last whole round is safe" if now else "after this round, with a checkpoint"
    out.print(
        f"Run '{escape(name)}' stops {when}. Continue it with: "
        f"wardround submit --resume {escape(name)} --kit {escape(str(opened.folder))}"
    )


# What they share


def prepare(debug: bool, quiet: bool) -> None:
    """Set up logging; raise where the extra is missing."""
    configure_logging(debug, quiet)
    require()


def open_queue(kit: Kit) -> JobQueue:
    """The queue of a server that runs; fails at once, not after a while, if none does."""
    from wardround.deploy.preflight.kit import refuse_broken

    queue = JobQueue(kit)
    queue.require_server()
    refuse_broken(kit)
    return queue


def log_to_kit(kit: Kit, name: str) -> None:
    """What the network process refuses goes into a file of the kit, with the caller's name."""
    kit.logs.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(kit.logs / f"{name}-calls.log", maxBytes=LOG_BYTES, backupCount=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("wardround.deploy")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False


def make_speaker(hidden: bool) -> Callable[[str], None]:
    """Says one line with the time in front."""
    if hidden:
        return lambda line: None
    return lambda line: err.print(f"[dim]{datetime.now():%H:%M:%S}[/] {escape(one_line(line))}")


@contextmanager
def leaving_on_signals(seconds: float | None = None) -> Iterator[None]:
    """SIGTERM leaves like Ctrl-C, so that every process started here is ended too.

    seconds: after which it ends all of them itself, whatever this process is waiting for. A further signal
    changes nothing then: in the middle of the ending it would leave processes behind.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        if seconds is not None:
            for each in before:
                signal.signal(each, signal.SIG_IGN)
            end_after(seconds)
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM,) if seconds is None else (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        err.print("Stopped; everything that was started here has ended.")
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish(config: Config, state: str, json_: bool, again: str) -> None:
    """What `train` prints at the end."""
    from wardround.api import Result

    result = Result.load(config.folder)
    if not json_:
        for line in describe_absent(read_live(config.folder) or {}):
            err.print(escape(one_line(f"At the end {line}")))
    if json_:
        out.print_json(json.dumps(result.summary))
    elif state == "done":
        show_result(result)
    if state == "stopped":
        err.print(
            f"Stopped after round {result.outcome.state.round} of {config.rounds}; nothing is lost. Continue "
            f"with: {escape(again)}"
        )
        raise typer.Exit(130)
