"""The page of a survey: one HTML file in the style of reports, that opens offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wardround.data.fingerprint.case import ALL, LEVELS
from wardround.data.fingerprint.histogram import Histogram, find_quantile, round_all
from wardround.data.fingerprint.measure import Fingerprint
from wardround.deploy.survey.differences import Deviation
from wardround.deploy.survey.proposing import use_names
from wardround.deploy.survey.survey_file import Survey
from wardround.reporting.charts import (
    Axis,
    axis_titles,
    choose_style,
    draw_curve,
    draw_dot,
    draw_figure,
    draw_grid,
    draw_legend,
    fit_axis,
    format_number,
    number_labels,
    stretch,
)
from wardround.reporting.html import Html, join, plain, section, tag
from wardround.reporting.page import draw_document
from wardround.reporting.tabular import plain_table, table_html
from wardround.yaml_file import dumped

SECTIONS = {
    "fit": "What does not fit",
    "differ": "How hospitals differ",
    "proposal": "Proposed for all",
    "hospitals": "Hospitals",
    "sizes": "Sizes and spacings",
    "intensities": "Intensities",
}
DECISIONS = {"accepted": "accepted", "waiting": "a person there must confirm it", "declined": "declined"}
MOST_CHANNELS = 8  # that are drawn
CASE_LEVELS = (5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0)  # per cent of cases


def draw_survey(survey: Survey) -> str:
    """The whole page as text."""
    known = {
        hospital: use_names(survey.hospitals[hospital], survey.common, hospital)
        for hospital in sorted(survey.common.classes)
        if survey.hospitals[hospital].fingerprint.is_open
    }
    parts = {
        "fit": list_section("fit", survey.deviations, blocks=True),
        "differ": list_section("differ", survey.deviations, blocks=False),
        "proposal": proposal_section(survey),
        "hospitals": section("hospitals", SECTIONS["hospitals"], table_html(survey.as_table())),
        "sizes": size_section(known),
        "intensities": intensity_section(known, survey.common.channel_names),
    }
    title = f"{len(survey.hospitals)} hospitals, {survey.time[:10]}"
    return draw_document("Survey", title, SECTIONS, parts, survey.as_dict())


def list_section(key: str, deviations: Sequence[Deviation], *, blocks: bool) -> Html:
    """What does not fit, or what only differs, a line each."""
    own = [one for one in deviations if one.blocks == blocks]
    none = "Nothing stands in the way of one model." if blocks else "The hospitals are alike."
    if not own:
        return section(key, SECTIONS[key], tag("p", none))
    lines = [tag("li", tag("strong", one.aspect), ": ", plain(one.text, 0)) for one in own]
    lead = (
        "Somebody must do something about these, or confirm them, before one model can serve all."
        if blocks
        else "One model can serve these; the proposed preparation takes out spacings, sizes and brightness."
    )
    return section(key, SECTIONS[key], tag("ul", lines), lead=lead)


def intensity_section(known: Mapping[str, Fingerprint], channels: Sequence[str]) -> Html:
    """Quantile curves of every channel, as stored, and with mean 0 and SD 1 in each case."""
    if not known:
        return Html("")
    count = min(MOST_CHANNELS, len(next(iter(known.values())).intensity))
    charts = []
    for number in range(count):
        title = channels[number] if number < len(channels) else f"channel {number + 1}"
        for field, words in (("intensity", "as stored"), ("contrast", "mean 0, SD 1 in each case")):
            found = {who: getattr(one, field)[number] for who, one in known.items()}
            curves = {who: curve.mean for who, curve in found.items() if curve is not None}
            if curves:
                charts.append(quantile_chart(f"{plain(title)}, {words}", curves))
    lead = "Mean over the training cases of each hospital: what share of the voxels lies below a value."
    return section("intensities", SECTIONS["intensities"], tag("div", charts, class_="charts"), lead=lead)


def quantile_chart(
    title: str, curves: Mapping[str, Sequence[float]], levels: Sequence[float] = LEVELS, of: str = "voxels"
) -> Html:
    """One line a hospital: the value that a share of the voxels, or cases, lies below; levels: per cent."""
    x = Axis(0.0, 100.0, (0.0, 25.0, 50.0, 75.0, 100.0))
    y = fit_axis([value for curve in curves.values() for value in curve])
    places, drawn, dots = number_labels(list(curves)), [], []
    for label, curve in curves.items():
        points = list(zip(levels, curve, strict=True))
        style = choose_style(places[label])
        drawn.append(draw_curve(points, x, y, style))
        for at, value in points:
            said = f"{plain(label, 32)}: {at:g} % of {of} below {format_number(value)}"
            dots.append(draw_dot(x.percent(at), y.percent(value), style, said))
    middle = len(levels) // 2
    words = "; ".join(f"{plain(label, 32)}: median {format_number(c[middle])}" for label, c in curves.items())
    plot = [*draw_grid(x, y), *axis_titles(f"% of {of} below", "value"), stretch(*drawn), *dots]
    below = [draw_legend(list(curves), places)]
    return draw_figure(title, f"{words}.", *plot, height=240, below=below, class_="titled")


def size_section(known: Mapping[str, Fingerprint]) -> Html:
    """Shapes, spacings and foreground sizes: a table of all, charts of those that differ."""
    if not known:
        return Html("")
    kinds = list_sizes(known)
    charts = []
    for title, own in kinds.items():
        curves = {who: quantiles(one, CASE_LEVELS) for who, one in own.items()}
        if len({value for curve in curves.values() for value in curve}) > 1:
            charts.append(quantile_chart(title, curves, CASE_LEVELS, "cases"))
    rows = [
        [title, *(describe_bins(own[who]) if who in own else "withheld" for who in known)]
        for title, own in kinds.items()
    ]
    note = "The median of training cases, and from the 10th to the 90th percentile where they differ."
    table = plain_table("Sizes and spacings", ["what", *known], rows, note)
    fewest = min(min(one.count_bins()) for one in known.values())
    lead = f"From groups of similar cases, never of one: at least {fewest} cases are behind every number."
    return section("sizes", SECTIONS["sizes"], table, tag("div", charts, class_="charts"), lead=lead)


def list_sizes(known: Mapping[str, Fingerprint]) -> dict[str, dict[str, Histogram]]:
    """What is measured of every case -> hospital -> its histogram."""
    first = next(iter(known.values()))
    kinds: dict[str, dict[str, Histogram]] = {}
    for axis in range(len(first.shape)):
        kinds[f"voxels along axis {axis + 1}"] = {who: one.shape[axis] for who, one in known.items()}
    for axis in range(len(first.shape)) if all(one.has_spacing for one in known.values()) else ():
        kinds[f"mm a voxel along axis {axis + 1}"] = {who: one.spacing[axis] for who, one in known.items()}
    for word in first.foreground:
        sizes = {who: one.foreground.get(word) for who, one in known.items()}
        title = "all that is labelled" if word == ALL else f"class {plain(word)}"
        kinds[f"{title}, share of the image"] = {who: s.fraction for who, s in sizes.items() if s is not None}
    return kinds


def quantiles(one: Histogram, levels: Sequence[float]) -> list[float]:
    return list(round_all([find_quantile([one], level / 100) for level in levels]))


def describe_bins(one: Histogram) -> str:
    low, median, high = quantiles(one, (10, 50, 90))
    return f"{median:g}" if low == high else f"{median:g} ({low:g} to {high:g})"


def proposal_section(survey: Survey) -> Html:
    """The common sections as federation.yaml would have them, and what each hospital says to them."""
    common = survey.common
    if not common.class_names:
        return section("proposal", SECTIONS["proposal"], tag("p", " ".join(common.notes)))
    text = dumped("labels", common.class_names)
    if common.channel_names:
        text += dumped("channels", common.channel_names)
    text += dumped("prepare", common.prepare) if common.prepare else ""
    rows = []
    for hospital in sorted(survey.hospitals):
        own = [*common.classes.get(hospital, {}).items(), *common.channels.get(hospital, {}).items()]
        facts, used = survey.hospitals[hospital].facts, {mine for _, mine in own}
        changed = [f"{mine} as {theirs}" for theirs, mine in own if mine != theirs]
        changed += [
            f"without {word}" for word in (*facts.classes, *facts.channels) if own and word not in used
        ]
        said = survey.decisions.get(hospital, common.left_out.get(hospital, "not asked"))
        rows.append([hospital, ", ".join(changed) or "as they are", DECISIONS.get(said, said)])
    lead = join(
        "Sent by ", tag("code", "wardround submit"), "; every hospital decides by its own rules (",
        tag("code", "accept"), " in its site.yaml). Values in label files stay each hospital's own.",
    )  # fmt: skip
    table = plain_table("What hospitals say", ["hospital", "its own names", "decision"], rows)
    return section(
        "proposal", SECTIONS["proposal"], tag("pre", tag("code", text), tabindex="0"), table, lead=lead
    )
