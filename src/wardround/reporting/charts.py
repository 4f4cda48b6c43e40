"""Small SVG charts: text keeps its size at any width, colours come from the page's light or dark theme.

Positions are percentages of the plot, so a chart stretches with the page; only the curves themselves live in
an inner drawing of 1000 x 1000 that is stretched without its strokes. No script is needed: hovering shows
the values of a round, and `desc` says in words what the picture shows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from wardround.reporting.html import Html, details, name, plain, tag

Points = Sequence[tuple[float, float]]
Lines = Mapping[str, Points]

COLOURS = 8  # in report.css; more labels than that get dashes
GAPS = {1: 25, 2: 12}  # thousandths of a chart's width between cuts through its areas
MOST_BANDS = 120
MOST_LEGEND = 12
MOST_TABLE_ROUNDS = 25


@dataclass(frozen=True)
class Axis:
    """A range with round numbers in it."""

    low: float
    high: float
    ticks: Sequence[float]

    def percent(self, value: float) -> float:
        return 100 * (value - self.low) / (self.high - self.low)

    def written(self) -> Callable[[float], str]:
        """How its ticks are written: all with the same number of decimals, no more than needed."""
        for decimals in range(7):
            if all(abs(tick - round(tick, decimals)) < 1e-9 * max(1.0, abs(tick)) for tick in self.ticks):
                return lambda value: f"{value:,.{decimals}f}"
        return lambda value: f"{value:.2g}"


def fit_axis(
    values: Sequence[float], *, within: tuple[float, float] = (-math.inf, math.inf), count: int = 4
) -> Axis:
    """Round limits around some values.

    >>> fit_axis([0.61, 0.87]).ticks
    [0.6, 0.7, 0.8, 0.9]
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if high - low < 1e-9 * max(1.0, abs(high)):
        pad = 0.1 * abs(high) or 1.0
        low, high = low - pad, high + pad
    step = nice_step((high - low) / count)
    low = max(step * math.floor(low / step + 1e-9), within[0])
    high = min(step * math.ceil(high / step - 1e-9), within[1])
    first = math.ceil(low / step - 1e-9)
    number = math.floor((high - low) / step + 1e-6) + 1
    return Axis(low, high, [round(step * (first + place), 12) for place in range(number)])


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5, 10 ... above."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def round_axis(rounds: Sequence[float]) -> Axis:
    """Whole rounds; the first and the last are at the edges."""
    finite = [value for value in rounds if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if low == high:
        return Axis(low - 1, high + 1, [low])
    step = max(1, round(nice_step((high - low) / 5)))
    between = (t for t in range(step, int(high) + 1, step) if low + step / 2 < t < high - step / 2)
    return Axis(low, high, [low, *between, high])


def format_number(value: float) -> str:
    """
    >>> format_number(0.8344), format_number(12000.0), format_number(3.0), format_number(0.00052)
    ('0.834', '12,000', '3', '0.00052')
    """
    if not math.isfinite(value):
        return "n/a" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == round(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.2g}"


def choose_style(place: int) -> str:
    """Classes of a label's colour, and of its dashes when colours run out."""
    return f"s{place % COLOURS} d{place // COLOURS % 3}"


# The parts of a chart

ROUND = tag("text", "round", x="100%", y="100%", dy="32", class_="tick end axis")


def format_percent(value: float) -> str:
    return f"{value:.4g}%"


def draw_grid(x: Axis, y: Axis) -> list[Html]:
    """Lines across, numbers left of them and below."""
    parts = []
    shown = y.written()
    for tick in y.ticks:
        at = format_percent(100 - y.percent(tick))
        parts.append(tag("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(tag("text", shown(tick), x="-8", y=at, dy="4", class_="tick end"))
    shown = x.written()
    for tick in x.ticks:
        at = format_percent(x.percent(tick))
        parts.append(tag("text", shown(tick), x=at, y="100%", dy="18", class_="tick mid"))
    return parts


def axis_titles(x: str, y: str) -> list[Html]:
    """What the numbers below and left of a plot are."""
    return [
        tag("text", x, x="50%", y="100%", dy="36", class_="tick mid axis"),
        tag("text", y, x="-42", y="0", dy="-14", class_="tick axis"),
    ]


def draw_curve(points: Points, x: Axis, y: Axis, style: str) -> Html:
    """A line through the finite points; it breaks where a value is missing."""
    pieces: list[str] = []
    pen = "M"
    for at, value in points:
        if not math.isfinite(value):
            pen = "M"
            continue
        pieces.append(f"{pen}{10 * x.percent(at):.1f} {1000 - 10 * y.percent(value):.1f}")
        pen = "L"
    return tag("path", d="".join(pieces), class_=f"line {style}")


def draw_dot(x: float, y: float, style: str, title: str | None = None) -> Html:
    """A dot at percentages of the plot. title: its tooltip."""
    tooltip = None if title is None else tag("title", title)
    at = {"cx": format_percent(x), "cy": format_percent(100 - y)}
    return tag("circle", tooltip, **at, r="3", class_=f"dot {style}")


def stretch(*children: Html) -> Html:
    return tag(
        "svg", *children, viewBox="0 0 1000 1000", preserveAspectRatio="none", width="100%", height="100%",
        aria_hidden="true",
    )  # fmt: skip


def draw_bands(rounds: Sequence[float], x: Axis, describe: Callable[[float], str]) -> list[Html]:
    """One invisible column for each round that tells its values when pointed at."""
    step = max(1, math.ceil(len(rounds) / MOST_BANDS))
    chosen = list(rounds)[::step]
    edges = [0.0, *((x.percent(a) + x.percent(b)) / 2 for a, b in pairwise(chosen)), 100.0]
    parts = []
    for at, left, right in zip(chosen, edges, edges[1:], strict=False):
        width, middle = format_percent(max(0.0, right - left)), format_percent(x.percent(at))
        column = tag("rect", x=format_percent(left), width=width, y="0", height="100%")
        line = tag("line", x1=middle, x2=middle, y1="0", y2="100%")
        parts.append(tag("g", column, line, tag("title", describe(at)), class_="band"))
    return parts


def describe_rounds(lines: Lines) -> Callable[[float], str]:
    """`round 4`, then one line a label."""
    found = {label: dict(points) for label, points in lines.items()}

    def describe(at: float) -> str:
        rows = [f"{plain(label, 32)}  {format_number(v[at])}" for label, v in found.items() if at in v]
        left_out = len(rows) - 2 * MOST_LEGEND
        if left_out > 0:
            rows = [*rows[: 2 * MOST_LEGEND], f"and {left_out} more"]
        return "\n".join([f"round {format_number(at)}", *rows])

    return describe


def draw_legend(labels: Sequence[str], places: Mapping[str, int]) -> Html:
    items = [
        tag("li", draw_swatch(choose_style(places.get(label, number))), name(label, 32))
        for number, label in enumerate(labels[:MOST_LEGEND])
    ]
    if len(labels) > MOST_LEGEND:
        items.append(tag("li", f"and {len(labels) - MOST_LEGEND} more"))
    return tag("ul", *items, class_="legend")


def draw_swatch(style: str) -> Html:
    line = tag("line", x1="1", x2="17", y1="6", y2="6", class_=f"line {style}")
    return tag("svg", line, width="18", height="12", aria_hidden="true", class_="swatch")


def draw_figure(
    title: str, described: str, *plot: Html, height: int = 200, below: Sequence[Html] = (), class_: str = ""
) -> Html:
    """A chart with its heading, its words for those who cannot see it, and what stands below it."""
    key = hashlib.sha256(f"{title}{described}{''.join(plot)}".encode("utf-8", "replace")).hexdigest()[:10]
    words = [tag("title", title, id=f"t{key}"), tag("desc", described, id=f"d{key}")]
    look = {"class_": "chart", "height": str(height), "role": "img", "aria_labelledby": f"t{key} d{key}"}
    drawing = tag("svg", *words, *plot, **look)
    return tag("figure", tag("figcaption", title), drawing, *below, class_=f"chart-box {class_}".strip())


def list_rounds(lines: Lines) -> list[float]:
    return sorted({at for points in lines.values() for at, _ in points})


def number_labels(labels: Sequence[str]) -> dict[str, int]:
    return {label: place for place, label in enumerate(labels)}


# Charts


def line_chart(
    title: str,
    lines: Lines,
    *,
    places: Mapping[str, int] | None = None,
    within: tuple[float, float] = (-math.inf, math.inf),
    from_zero: bool = False,
    mark: tuple[float, str] | None = None,
    with_legend: bool = True,
    with_table: bool = False,
    class_: str = "",
) -> Html:
    """One line a label over rounds. mark: a round to point out, and why."""
    rounds = list_rounds(lines)
    x = round_axis(rounds)
    values = [value for points in lines.values() for _, value in points]
    y = fit_axis([*values, 0.0] if from_zero else values, within=within)
    styles = dict(places or number_labels(list(lines)))
    curves, dots = [], []
    for number, (label, points) in enumerate(lines.items()):
        style = choose_style(styles.get(label, number))
        curves.append(draw_curve(points, x, y, style))
        if points and math.isfinite(points[-1][1]):
            dots.append(draw_dot(x.percent(points[-1][0]), y.percent(points[-1][1]), style))
    marked = [] if mark is None else [draw_mark(x.percent(mark[0]), mark[1])]
    below = [draw_legend(list(lines), styles)] if with_legend else []
    if with_table:
        below.append(draw_numbers(title, lines))
    bands = draw_bands(rounds, x, describe_rounds(lines))
    plot = [*draw_grid(x, y), ROUND, *marked, stretch(*curves), *dots, *bands]
    return draw_figure(title, describe_lines(lines), *plot, below=below, class_=class_)


def draw_mark(at: float, text: str) -> Html:
    end = at > 60
    kind = "tick end" if end else "tick"
    return tag(
        "g",
        tag("line", x1=format_percent(at), x2=format_percent(at), y1="0", y2="100%", class_="mark"),
        tag("text", text, x=format_percent(at), y="0", dx="-6" if end else "6", dy="-5", class_=kind),
    )


def describe_lines(lines: Lines) -> str:
    """First and last value of every line, in words."""
    parts = []
    for label, points in list(lines.items())[:MOST_LEGEND]:
        finite = [value for _, value in points if math.isfinite(value)]
        if finite:
            parts.append(f"{plain(label, 32)} from {format_number(finite[0])} to {format_number(finite[-1])}")
    more = len(lines) - MOST_LEGEND
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "") + "." if parts else "No values."


def draw_numbers(title: str, lines: Lines) -> Html:
    """The same as a table, folded away; long runs show every so many rounds."""
    rounds = list_rounds(lines)
    step = max(1, math.ceil(len(rounds) / MOST_TABLE_ROUNDS))
    chosen = [at for place, at in enumerate(rounds) if place % step == 0 or place == len(rounds) - 1]
    values = {label: dict(points) for label, points in list(lines.items())[:MOST_LEGEND]}
    heads = [tag("th", label, scope="col") for label in ("round", *(name(label, 20) for label in values))]
    rows = []
    for at in chosen:
        cells = [tag("td", format_number(entry[at]) if at in entry else "") for entry in values.values()]
        rows.append(tag("tr", tag("th", format_number(at), scope="row"), cells))
    caption = tag("caption", title, class_="unseen")
    table = tag("table", caption, tag("thead", tag("tr", heads)), tag("tbody", rows))
    framed = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=title)
    return details("Numbers", framed)


def area_chart(
    title: str,
    lines: Lines,
    *,
    places: Mapping[str, int] | None = None,
    with_table: bool = True,
    with_legend: bool = True,
    class_: str = "",
) -> Html:
    """Shares of one whole, stacked; for aggregation weights."""
    rounds = list_rounds(lines)
    x = round_axis(rounds)
    if len(rounds) == 1:  # an area needs a width
        lines = {label: [(x.low, p[0][1]), *p, (x.high, p[0][1])] for label, p in lines.items()}
    grown = list_rounds(lines)
    values = {label: dict(points) for label, points in lines.items()}
    sums = [sum(entry.get(at, 0.0) for entry in values.values()) for at in grown]
    y = Axis(0.0, max(1.0, *sums), [0, 0.5, 1])
    styles = dict(places or number_labels(list(lines)))
    base = dict.fromkeys(grown, 0.0)
    areas = []
    for number, (label, entry) in enumerate(values.items()):
        top = {at: base[at] + entry.get(at, 0.0) for at in grown}
        corners = [(at, top[at]) for at in grown] + [(at, base[at]) for at in reversed(grown)]
        path = "L".join(
            f"{10 * x.percent(at):.1f} {1000 - 10 * y.percent(value):.1f}" for at, value in corners
        )
        place = styles.get(label, number)
        areas.append(tag("path", d=f"M{path}Z", class_=f"area {choose_style(place)}"))
        areas += draw_gaps(place, [(at, base[at], top[at]) for at in grown], x, y)
        base = top
    below = [draw_legend(list(lines), styles)] if with_legend else []
    if with_table:
        below.append(draw_numbers(title, lines))
    words = "Shares of one, stacked: " + describe_lines(lines)
    plot = [stretch(*areas), *draw_grid(x, y), ROUND, *draw_bands(rounds, x, describe_rounds(lines))]
    return draw_figure(title, words, *plot, below=below, class_=class_)


def draw_gaps(place: int, edges: Sequence[tuple[float, float, float]], x: Axis, y: Axis) -> list[Html]:
    """Cuts through an area whose colour another label has too: an area in dashes, as its legend is.

    edges: round, lower and upper edge of the area.
    """
    dashes = place // COLOURS % 3
    if not dashes:
        return []
    cuts = []
    for (a, low_a, high_a), (b, low_b, high_b) in pairwise(edges):
        left, right = 10 * x.percent(a), 10 * x.percent(b)
        step = GAPS[dashes]
        for count in range(math.ceil(left / step), math.ceil(right / step)):
            share = (count * step - left) / (right - left)
            low, high = low_a + share * (low_b - low_a), high_a + share * (high_b - high_a)
            if high > low:
                ends = (1000 - 10 * y.percent(low), 1000 - 10 * y.percent(high))
                cuts.append(f"M{count * step} {ends[0]:.1f}V{ends[1]:.1f}")
    return [tag("path", d="".join(cuts), class_=f"gap d{dashes}")] if cuts else []


def reliability_chart(
    title: str, lines: Lines, places: Mapping[str, int], *, axes: tuple[str, str], words: str
) -> Html:
    """Predicted probability against the share that was true; on the diagonal the model means what it says.

    axes: what is along and what is up.
    """
    axis = Axis(0.0, 1.0, [0, 0.25, 0.5, 0.75, 1])
    diagonal = tag("path", d="M0 1000L1000 0", class_="line diagonal")
    curves, dots = [], []
    for number, (label, points) in enumerate(lines.items()):
        style = choose_style(places.get(label, number))
        curves.append(draw_curve(points, axis, axis, style))
        for at, value in points:
            tooltip = f"{plain(label, 32)}: {format_number(value)} of voxels at {format_number(at)} true"
            dots.append(draw_dot(axis.percent(at), axis.percent(value), style, tooltip))
    words += "; ".join(
        f"{plain(label, 32)} "
        + ", ".join(f"{format_number(at)}: {format_number(value)}" for at, value in points)
        for label, points in list(lines.items())[:MOST_LEGEND]
    )
    return draw_figure(
        title, words, *draw_grid(axis, axis), *axis_titles(*axes), stretch(diagonal, *curves), *dots,
        height=280,
        below=[draw_legend(list(lines), places)], class_="square",
    )  # fmt: skip


def scatter_chart(
    title: str,
    spots: Mapping[str, tuple[float, float]],
    *,
    axes: tuple[str, str],
    within: tuple[float, float] = (-math.inf, math.inf),
) -> Html:
    """One numbered spot a label: the legend says who is who, also where colours repeat.

    axes: what is along and what is up; within: where values up can lie.
    """
    x = fit_axis([0.0, *(at for at, _ in spots.values())], within=(0.0, math.inf), count=5)
    y = fit_axis([value for _, value in spots.values()], within=within)
    drawn, entries, words = [], [], []
    for number, (label, (at, value)) in enumerate(spots.items(), start=1):
        if not (math.isfinite(at) and math.isfinite(value)):
            continue
        facts = f"{plain(label, 40)}: {format_number(value)} at {format_number(at)}"
        where = {"x": format_percent(x.percent(at)), "y": format_percent(100 - y.percent(value))}
        drawn.append(tag("svg", draw_number(number), tag("title", facts), overflow="visible", **where))
        icon = tag("svg", tag("g", draw_number(number), transform="translate(6 10)"), width="28",
                   height="20", aria_hidden="true", class_="swatch")  # fmt: skip
        entries.append(tag("li", icon, name(label, 40)))
        words.append(facts)
    said = f"{axes[1]} against {axes[0]}. {'; '.join(words)}."
    legend = tag("ul", entries, class_="legend")
    return draw_figure(
        title, said, *draw_grid(x, y), *axis_titles(*axes), *drawn, height=280, below=[legend],
        class_="titled",
    )  # fmt: skip


def draw_number(number: int) -> Html:
    """A disc and its number beside it."""
    text = tag("text", str(number), x="8", dy="4", class_="disc-number")
    return tag("g", tag("circle", r="5", class_=f"dot {choose_style(number - 1)}"), text)
