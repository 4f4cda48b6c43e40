"""The page: sections in order, style and script inline, and a policy that forbids network requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from wardround.comparison.groups import RunGroup, group_comparison, group_runs
from wardround.comparison.outcome import Comparison
from wardround.comparison.runs import Run, number, read_run
from wardround.data.serving.mirroring import describe_mirror_axes
from wardround.errors import CheckpointError, ConfigError
from wardround.files import write_text
from wardround.methods import METHODS, OBJECTIVES
from wardround.privacy.words import describe_privacy
from wardround.reporting.comparison_section import cost_section, result_section, side_by_side_section
from wardround.reporting.figures import write_figures
from wardround.reporting.html import (
    Html,
    attribute,
    data_block,
    details,
    escape,
    join,
    link,
    name,
    plain,
    section,
    tag,
)
from wardround.reporting.overlays import SLICE_CHOICES, Encoded, encode_all
from wardround.reporting.panels import panel_section
from wardround.reporting.sections import run_sections
from wardround.reporting.tabular import facts_table, in_words
from wardround.version import __version__

FIGURES = "figures"  # folder beside a comparison's page
SHARED = {
    "result": "Result",
    "beside": "Side by side",
    "cost": "Time and traffic",
    "panel": "The same cases",
}
DETAILS = {
    "next": "What to do next",
    "curves": "Learning curves",
    "weights": "Aggregation weights",
    "losses": "Loss terms",
    "cases": "Case by case",
    "pictures": "Example cases",
    "calibration": "Calibration",
    "confidence": "Confidence and uncertainty",
    "traffic": "Traffic and time",
    "trouble": "Refused updates and warnings",
    "failed": "Not evaluated",
    "data": "How the clients differ",
    "postprocess": "Postprocessing",
    "configured": "How it was configured",
    "made": "How it was made",
}


def write_report(
    folders: Sequence[str | Path], output: Path | None = None, *, title: str | None = None
) -> Path:
    """Write the page about some runs and comparisons; the default is report.html in the only folder.

    A comparison's page in its own folder has its pictures as PNG files beside it.
    """
    if not folders:
        raise ConfigError("report: name the folder of a run or of a comparison, for example runs/quickstart.")
    sources = [open_source(folder) for folder in folders]
    target = output or (sources[0].folder if len(sources) == 1 else Path()) / "report.html"
    if target.is_dir():
        target = target / "report.html"
    groups = collect_groups(sources)
    page = draw_page(groups, title=title)
    try:
        write_text(target, page)
        if sources[0].kind == "comparison" and target.parent == sources[0].folder:
            write_figures(groups[0], target.parent / FIGURES)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.") from None
    return target


@dataclass(frozen=True)
class ReportSource:
    """One folder to report on: of a run, of an evaluation or of a comparison."""

    folder: Path
    kind: str  # run, comparison, or waiting (nothing there yet)

    def state(self) -> str:
        """A text that changes whenever the page would: rounds and results of every run in the folder."""
        names = ("records.jsonl", "result.json", "comparison.json", "cases.csv")
        folders = [self.folder]
        if (self.folder / "cells").is_dir():
            folders += sorted(path for path in (self.folder / "cells").iterdir() if path.is_dir())
        return "-".join(str(file_size(folder / name)) for folder in folders for name in names)


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def open_source(folder: str | Path, *, may_wait: bool = False) -> ReportSource:
    """Find out what a folder holds. may_wait: a run that has not started yet is not an error."""
    folder = Path(folder)
    if (folder / "comparison.json").exists():
        return ReportSource(folder, "comparison")
    if (folder / "config.yaml").exists():
        return ReportSource(folder, "run")
    if may_wait:
        return ReportSource(folder, "waiting")
    what = "does not exist" if not folder.exists() else "contains neither a run nor a comparison"
    raise CheckpointError(
        f"{folder} {what}. Give the folder of a run (it has a config.yaml) or of a comparison "
        "(it has a comparison.json), for example runs/quickstart."
    )


def build_page(sources: Sequence[ReportSource], *, title: str | None = None, live: str | None = None) -> str:
    """The page about some folders as text."""
    return draw_page(collect_groups(sources), title=title, live=live)


def draw_page(groups: Sequence[RunGroup], *, title: str | None = None, live: str | None = None) -> str:
    """The whole page as text.

    title: default the names of what it shows; live: the state it shows, for a page that polls its server.
    """
    runs = [run for group in groups for run in group.runs]
    pictures = {
        str(place): {client: files.pictures for client, files in run.files.items()}
        for place, run in enumerate(runs)
    }
    encoded, most = encode_all(pictures)
    shared = join(
        part(group, f"g{place}")
        for place, group in enumerate(groups)
        for part in (result_section, side_by_side_section, cost_section, panel_section)
    )
    main = [shared]
    detail = draw_details(runs, encoded, most, is_sample=any(group.is_sample for group in groups))
    main.append(detail)
    if runs:
        main.append(citation_section(runs))
    if not groups:
        main = [tag("p", "Waiting for the run to start.", class_="notice", role="status")]
    title = title or " and ".join(plain(group.title, 90) for group in groups) or "waiting"
    style, script = read_asset("report.css"), read_asset("report.js")
    return Template(read_asset("page.html")).substitute(
        policy=escape(build_policy(style, script, live=live is not None)),
        version=escape(__version__),
        title=escape(f"{title} · wardround"),
        style=style,
        live=attribute("data_live", live),
        header=draw_header(groups, title),
        nav=draw_navigation(groups, shared, detail),
        main="\n".join(part for part in main if part),
        footer=draw_footer(),
        data=data_block("facts", {"wardround": __version__, "groups": [group.as_dict() for group in groups]}),
        script=script,
    )


def draw_document(
    kind: str, title: str, titles: Mapping[str, str], parts: Mapping[str, Html], facts: Mapping[str, Any]
) -> str:
    """A whole page of named sections, for what is not a report; sections without content are left out."""
    mark = tag(
        "p", tag("span", "wardround", class_="mark"), tag("span", kind, class_="crumb"), class_="brand"
    )
    items = [tag("li", tag("a", titles[key], href=f"#{key}")) for key, part in parts.items() if part]
    menu = tag("details", tag("summary", "Contents"), tag("ul", items), open=True)
    style, script = read_asset("report.css"), read_asset("report.js")
    return Template(read_asset("page.html")).substitute(
        policy=escape(build_policy(style, script, live=False)),
        version=escape(__version__),
        title=escape(f"{kind}: {title} · wardround"),
        style=style,
        live=attribute("data_live", None),
        header=tag("header", mark, tag("h1", tag("bdi", title)), class_="top"),
        nav=tag("nav", menu, aria_label="Contents"),
        main="\n".join(part for part in parts.values() if part),
        footer=draw_footer(may_show_scans=False),
        data=data_block("facts", {"wardround": __version__, **facts}),
        script=script,
    )


def collect_groups(sources: Sequence[ReportSource]) -> list[RunGroup]:
    """The single runs together first, then each comparison."""
    runs = [read_run(source.folder) for source in sources if source.kind == "run"]
    comparisons = [Comparison.load(source.folder) for source in sources if source.kind == "comparison"]
    return [*([group_runs(runs)] if runs else []), *map(group_comparison, comparisons)]


@cache
def read_asset(file: str) -> str:
    return (resources.files(__package__) / file).read_text(encoding="utf-8")


def build_policy(style: str, script: str, *, live: bool) -> str:
    """The content security policy: our own style and script, inline pictures, no requests."""
    return (
        f"default-src 'none'; style-src '{hash_content(style)}'; script-src '{hash_content(script)}'; "
        f"img-src data:; connect-src '{'self' if live else 'none'}'; base-uri 'none'; form-action 'none'"
    )


def hash_content(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


# Parts


def draw_header(groups: Sequence[RunGroup], title: str) -> Html:
    kinds = {"run": "Run", "runs": "Runs", "comparison": "Comparison"}
    kind = kinds[groups[0].kind] if len(groups) == 1 else "Report"
    if len(groups) == 1 and all(run.is_evaluation for run in groups[0].runs):
        kind = "Evaluation" if len(groups[0].runs) == 1 else "Evaluations"
    mark = tag(
        "p", tag("span", "wardround", class_="mark"), tag("span", kind, class_="crumb"), class_="brand"
    )
    return tag("header", mark, tag("h1", tag("bdi", title)), class_="top")


def draw_navigation(groups: Sequence[RunGroup], shared: str, detail: str) -> Html:
    """shared: the sections about groups; detail: those about single runs."""
    items = []
    for place, group in enumerate(groups):
        own = f": {plain(group.title, 24)}" if len(groups) > 1 else ""
        for key, text in SHARED.items():
            if f'id="g{place}-{key}"' in shared:
                items.append(tag("li", tag("a", f"{text}{own}", href=f"#g{place}-{key}")))
    if detail:
        inner = []
        for key, text in DETAILS.items():
            first = re.search(rf'id="(r\d+-{key})"', detail)  # the first run that has it
            if first:
                inner.append(tag("li", tag("a", text, href=f"#{first.group(1)}", data_part=key)))
        items.append(tag("li", tag("a", "In detail", href="#detail"), tag("ul", inner)))
        items.append(tag("li", tag("a", "How to cite", href="#cite")))
    menu = tag("details", tag("summary", "Contents"), tag("ul", items), open=True)
    return tag("nav", menu, aria_label="Contents")


def draw_details(
    runs: Sequence[Run], encoded: Mapping[str, Mapping[str, Sequence[Encoded]]], most: int, *, is_sample: bool
) -> Html:
    """Every run on its own; with several, one at a time."""
    if not runs:
        return Html("")
    blocks = [
        tag(
            "article",
            tag("h2", name(run.label), class_="run-title") if len(runs) > 1 else None,
            *run_sections(run, f"r{place}", encoded[str(place)], with_scores=len(runs) > 1),
            colophon_section(run, f"r{place}"),
            class_="run",
            id=f"r{place}",
            aria_label=f"Run {plain(run.label)}",
        )
        for place, run in enumerate(runs)
    ]
    reduced = f"To keep this page small, volumes are shown with at most {most} slices."
    fewer = tag("p", reduced, class_="muted") if most < SLICE_CHOICES[0] else None
    sample = join(
        "One run of every row, the first of its seeds; ",
        tag("code", "wardround report"),
        " on the folder of another cell shows that one.",
    )
    remark = tag("p", sample, class_="muted") if is_sample else None
    return tag("div", draw_picker(runs), remark, fewer, *blocks, id="detail")


def draw_picker(runs: Sequence[Run]) -> Html | None:
    """Chooses the run that is shown; without JavaScript all are."""
    if len(runs) < 2:
        return None
    choices = []
    for place, run in enumerate(runs):
        button = tag("input", type="radio", name="run", value=f"r{place}", checked=place == 0)
        choices.append(tag("label", button, tag("span", name(run.label, 32))))
    return tag("fieldset", tag("legend", "In detail"), choices, class_="picker")


def draw_footer(*, may_show_scans: bool = True) -> Html:
    scans = "It may show scans: treat it as you treat them. " if may_show_scans else ""
    text = (
        f"Written by wardround {__version__}. This page makes no network requests and can be kept like "
        f"any file. {scans}For research; not a medical device."
    )
    return tag("footer", tag("p", text))


# How a run was made


def colophon_section(run: Run, prefix: str) -> Html:
    """What one needs to repeat the run."""
    environment = run.environment
    title = f" ({METHODS[run.method].title})" if run.method in METHODS else ""
    digest = tag("code", str(run.result.get("params_sha256", "not yet")), class_="hash")
    seconds = f"{number(run.result.get('seconds')):.1f}" if run.result else "not yet"
    rows: list[tuple[str, Any]] = [
        *list_evaluation_facts(run),
        ("method", join(name(run.method), title)),
        ("objective", name(run.objective or "the method's own")),
        ("seed", str(run.config.get("seed", ""))),
        *([] if run.is_evaluation else [("rounds", f"{len(run.records)} of {run.rounds}")]),
        ("commit", tag("code", str(environment.get("commit") or "installed package"))),
        ("final parameters (SHA-256)", digest),
        *([] if run.is_evaluation else [("seconds in rounds", seconds)]),
        ("folder", tag("code", str(run.folder))),
    ]
    private = describe_privacy(run.records, {client: client for client in run.clients})
    if private is not None:
        rows.insert(0, ("privacy", private))
    for key, value in environment.items():
        if isinstance(value, Mapping):
            rows += [
                (f"{key}: {part}", in_words(entry)) for part, entry in value.items() if entry is not None
            ]
        elif key not in ("commit", "seed"):
            rows.append((key, in_words(value)))
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
        ("mirrored (test-time augmentation)", describe_mirrored(found)),
    ]
    return rows if found.get("client") is None else [*rows, ("model of client", name(str(found["client"])))]


def describe_mirrored(found: Mapping[str, Any]) -> str:
    axes = found.get("mirror_axes")  # absent in older evaluations
    return "yes" + describe_mirror_axes(axes) if found.get("tta") else "no"


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
