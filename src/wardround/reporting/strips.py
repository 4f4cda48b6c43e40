"""Strip charts: one dot for each case, so that a mean does not hide single patients."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wardround.reporting.charts import (
    COLOURS,
    MOST_LEGEND,
    Axis,
    draw_figure,
    fit_axis,
    format_number,
    format_percent,
)
from wardround.reporting.html import Html, plain, tag

MOST_POINTS = 400


@dataclass(frozen=True)
class Spot:
    """One case in a strip. label: its tooltip; place: index of its colour."""

    value: float
    label: str
    place: int = 0


def strip_chart(
    title: str,
    rows: Mapping[str, Sequence[Spot]],
    *,
    within: tuple[float, float] = (-math.inf, math.inf),
    worst: Callable[[float], float] = lambda value: value,
    class_: str = "",
) -> Html:
    """One row a label, one dot a case, a tick at the mean, the worst case named.

    worst: larger is worse, to find the case to name; infinite values are counted in the row's label.
    """
    x = fit_axis([spot.value for spots in rows.values() for spot in spots], within=within, count=5)
    height, parts, shown = 62, [], x.written()
    for number, (label, spots) in enumerate(rows.items()):
        finite = [spot for spot in spots if math.isfinite(spot.value)]
        top = number * height
        left_out = len(spots) - len(finite)
        heading = plain(label, 40) + (f"  ({left_out} without a finite value)" if left_out else "")
        parts.append(tag("text", heading, x="0", y=str(top + 12), class_="row-label"))
        parts.append(tag("line", x1="0", x2="100%", y1=str(top + 30), y2=str(top + 30), class_="grid"))
        parts += [draw_spot(spot, x, top + 30) for spot in thin_out(finite)]
        if finite:
            mean = format_percent(x.percent(sum(spot.value for spot in finite) / len(finite)))
            parts.append(tag("line", x1=mean, x2=mean, y1=str(top + 19), y2=str(top + 41), class_="mean"))
            parts.append(draw_worst(max(finite, key=lambda spot: worst(spot.value)), x, top + 30))
    total = height * len(rows)
    ticks = [
        tag("text", shown(tick), x=format_percent(x.percent(tick)), y=str(total + 14), class_="tick mid")
        for tick in x.ticks
    ]
    words = "; ".join(
        describe_strip(label, spots, worst) for label, spots in list(rows.items())[:MOST_LEGEND]
    )
    return draw_figure(
        title, words + ".", *parts, *ticks, height=total + 20, class_=f"strip {class_}".strip()
    )


def draw_spot(spot: Spot, x: Axis, middle: float) -> Html:
    """A dot; a little up or down, always the same for the same case."""
    shift = int(hashlib.sha256(spot.label.encode("utf-8", "replace")).hexdigest()[:4], 16) / 65535 - 0.5
    tooltip = tag("title", f"{plain(spot.label, 60)}  {format_number(spot.value)}")
    at = {"cx": format_percent(x.percent(spot.value)), "cy": f"{middle + 14 * shift:.1f}"}
    return tag("circle", tooltip, **at, r="3.5", class_=f"spot s{spot.place % COLOURS}")


def draw_worst(spot: Spot, x: Axis, middle: float) -> Html:
    at = x.percent(spot.value)
    anchor = "end" if at > 50 else ""
    return tag(
        "text", plain(spot.label, 24), x=format_percent(at), y=f"{middle + 21:.0f}",
        dx="4" if anchor else "-4",
        class_=f"tick named {anchor}",
    )  # fmt: skip


def thin_out(spots: Sequence[Spot]) -> list[Spot]:
    """Not more than can be seen: evenly from the sorted values, both ends kept."""
    if len(spots) <= MOST_POINTS:
        return list(spots)
    order = sorted(spots, key=lambda spot: spot.value)
    return [order[round(step * (len(order) - 1) / (MOST_POINTS - 1))] for step in range(MOST_POINTS)]


def describe_strip(label: str, spots: Sequence[Spot], worst: Callable[[float], float]) -> str:
    finite = [spot for spot in spots if math.isfinite(spot.value)]
    if not finite:
        return f"{plain(label, 40)}: no values"
    mean = sum(spot.value for spot in finite) / len(finite)
    last = max(finite, key=lambda spot: worst(spot.value))
    return (
        f"{plain(label, 40)}: {len(finite)} dots, mean {format_number(mean)}, worst {plain(last.label, 40)} "
        f"with {format_number(last.value)}"
    )
