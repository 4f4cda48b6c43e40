"""survey, confirm: what hospitals have, and whether a hospital uses what is proposed for all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from wardround.cli.common import Debug, Json, Quiet, app, err, out, print_table
from wardround.cli.hospitals import KitOption, make_speaker, open_queue, prepare, watch_run
from wardround.deploy.kits.kit import find_organisers_kit, open_kit
from wardround.errors import ConfigError

if TYPE_CHECKING:
    from wardround.data.federation_file import FederationFile
    from wardround.deploy.survey.proposals import HospitalProposal
    from wardround.deploy.survey.survey_file import Survey


@app.command()
def survey(
    kit: KitOption = None,
    hospitals: Annotated[
        str | None,
        typer.Option("--hospitals", metavar="A,B", help="Whom to ask; default: those connected now."),
    ] = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Ask connected hospitals what they have; show how they differ and what all could use."""
    prepare(debug, quiet or json_)
    from wardround.deploy import organising
    from wardround.deploy.survey.survey_file import PAGE, SURVEY, load_survey

    opened = find_organisers_kit(kit)
    config = organising.configure_survey(opened)
    queue = open_queue(opened)
    asked = None if hospitals is None else organising.parse_hospitals(hospitals)
    names = organising.choose_hospitals(queue, config, asked, resume=False)
    say = make_speaker(quiet or json_)
    say(f"asking {', '.join(names)}; each measures its training cases, which takes a while")
    submission = organising.submit(queue, config, names, overwrite=True, kind="survey")
    watch_run(submission, opened, True, say)
    found = load_survey(opened.survey / SURVEY)
    if json_:
        out.print_json(json.dumps(found.as_dict()))
        return
    show_survey(found)
    out.print(f"\nThe page: [bold]{escape(str(opened.survey / PAGE))}[/]")
    if found.common.class_names:
        out.print(
            "Next: wardround submit, with a configuration or without one, which then is planned from this."
        )


def show_survey(found: Survey) -> None:
    """The table, what does not fit, what differs, what is proposed."""
    print_table(found.as_table())
    for title, blocks in (("What does not fit", True), ("How hospitals differ", False)):
        own = [one for one in found.deviations if one.blocks == blocks]
        if own:
            out.print(f"\n[bold]{title}[/]")
        for one in own:
            out.print(f"- {escape(one.text)}")
    common = found.common
    if not common.class_names:
        return
    out.print("\n[bold]Proposed for all[/]")
    out.print(f"labels: {escape(', '.join(common.class_names))}")
    if common.channel_names:
        out.print(f"channels: {escape(', '.join(common.channel_names))}")
    told = {key: value for key, value in common.prepare.items() if value is not None}
    if told:
        out.print(f"prepare: {escape(', '.join(f'{key} {value}' for key, value in told.items()))}")
    for name, decision in sorted(found.decisions.items()):
        words = "waits for a person there: wardround confirm KIT" if decision == "waiting" else decision
        out.print(f"{escape(name)}: {escape(words)}")


@app.command()
def confirm(
    kit: Annotated[Path, typer.Argument(help="The hospital's kit.", metavar="KIT")],
    yes: Annotated[bool, typer.Option("--yes", help="Accept what waits, without a question.")] = False,
    no: Annotated[bool, typer.Option("--no", help="Decline what waits, without a question.")] = False,
    debug: Debug = False,
) -> None:
    """Accept or decline, at a hospital, the names and the preparation that the organiser proposes for all."""
    prepare(debug, False)
    from wardround.deploy.site import read_site_of
    from wardround.deploy.survey.answering import open_own_data
    from wardround.deploy.survey.proposals import ProposalFolder

    opened = open_kit(kit, "hospital")
    if yes and no:
        raise ConfigError("--yes and --no are both given; give one of them.")
    folder = ProposalFolder(opened.state)
    waiting = folder.list_waiting()
    if not waiting:
        out.print("Nothing waits for a decision here.")
        return
    if not (yes or no or sys.stdin.isatty()):
        raise ConfigError("this needs an answer at a terminal; or give --yes or --no.")
    file = open_own_data(read_site_of(opened), opened.name).file
    for proposal in waiting:
        show_proposal(proposal, file)
        accepted = yes or (not no and typer.confirm("Use this at your hospital?", default=False))
        folder.decide(proposal, "accepted" if accepted else "declined")
        err.print("Accepted." if accepted else "Declined; runs with these names are refused here.")


def show_proposal(proposal: HospitalProposal, file: FederationFile) -> None:
    """What is proposed, with the values in this hospital's own label files, and what it would change."""
    from wardround.deploy.survey.proposals import describe_changes

    out.print("[bold]The organiser proposes[/]")
    for common, own in proposal.classes.items():
        values = ", ".join(map(str, file.labels.get(own, ())))
        out.print(f"  class {escape(common)}: your {escape(own)}, value {values} in your files")
    for common, own in proposal.channels.items():
        out.print(f"  channel {escape(common)}: your {escape(own)}")
    out.print("[bold]What is other than your federation.yaml says[/]")
    for line in describe_changes(proposal, file):
        out.print(f"  - {escape(line)}")
