"""The page: sections in order, style and script inline, and a policy that forbids network requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template

from wardround.comparison.groups import RunGroup, group_comparison, group_runs
from wardround.comparison.outcome import Comparison
from wardround.comparison.runs import Run, read_run
from wardround.errors import ConfigError
from wardround.files import write_text
from wardround.reporting.colophon import citation_section, colophon_section
from wardround.reporting.comparison_section import result_section, side_by_side_section
from wardround.reporting.html import Html, attribute, data_block, escape, join, name, plain, tag
from wardround.reporting.overlays import SLICE_CHOICES, Encoded, encode_all
from wardround.reporting.sections import run_sections
from wardround.reporting.sources import ReportSource, open_source
from wardround.version import __version__

DETAILS = {
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
    "made": "How it was made",
}


def write_report(
    folders: Sequence[str | Path], output: Path | None = None, *, title: str | None = None
) -> Path:
    """Write the page about some runs and comparisons; the default is report.html in the only folder."""
    if not folders:
        raise ConfigError("report: name the folder of a run or of a comparison, for example runs/quickstart.")
    sources = [open_source(folder) for folder in folders]
    target = output or (sources[0].folder if len(sources) == 1 else Path()) / "report.html"
    if target.is_dir():
        target = target / "report.html"
    page = build_page(sources, title=title)
    try:
        write_text(target, page)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}.") from None
    return target


def build_page(sources: Sequence[ReportSource], *, title: str | None = None, live: str | None = None) -> str:
    """The whole page as text.

    title: default the names of what it shows; live: the state it shows, for a page that polls its server.
    """
    groups = collect_groups(sources)
    runs = [run for group in groups for run in group.runs]
    pictures = {
        str(number): {client: files.pictures for client, files in run.files.items()}
        for number, run in enumerate(runs)
    }
    encoded, most = encode_all(pictures)
    main = [
        join(result_section(group, f"g{number}"), side_by_side_section(group, f"g{number}"))
        for number, group in enumerate(groups)
    ]
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
        nav=draw_navigation(groups, detail),
        main="\n".join(part for part in main if part),
        footer=draw_footer(),
        data=data_block("facts", {"wardround": __version__, "groups": [group.as_dict() for group in groups]}),
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
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src '{hash_content(style)}'",
            f"script-src '{hash_content(script)}'",
            "img-src data:",
            f"connect-src {'self'!r}" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
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


def draw_navigation(groups: Sequence[RunGroup], detail: str) -> Html:
    entries = []
    for number, group in enumerate(groups):
        own = f": {plain(group.title, 24)}" if len(groups) > 1 else ""
        entries.append(("result", f"#g{number}-result", f"Result{own}"))
        if group.curves or (group.sheet and len(group.sheet.rows) > 1):
            entries.append(("beside", f"#g{number}-beside", f"Side by side{own}"))
    items = [tag("li", tag("a", text, href=address)) for _, address, text in entries]
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
            *run_sections(run, f"r{number}", encoded[str(number)], with_scores=len(runs) > 1),
            colophon_section(run, f"r{number}"),
            class_="run",
            id=f"r{number}",
            aria_label=f"Run {plain(run.label)}",
        )
        for number, run in enumerate(runs)
    ]
    fewer = (
        tag("p", f"To keep this page small, volumes are shown with at most {most} slices.", class_="muted")
        if most < SLICE_CHOICES[0]
        else None
    )
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
    choices = [
        tag(
            "label",
            tag("input", type="radio", name="run", value=f"r{number}", checked=number == 0),
            tag("span", name(run.label, 32)),
        )
        for number, run in enumerate(runs)
    ]
    return tag("fieldset", tag("legend", "In detail"), choices, class_="picker")


def draw_footer() -> Html:
    text = (
        f"Written by wardround {__version__}. This page makes no network requests and can be kept like "
        "any file. It may show scans: treat it as you treat them. For research; not a medical device."
    )
    return tag("footer", tag("p", text))
