"""Distance: how much clients differ by their fingerprints, in numbers, words and a picture.

`compare` gives a lower bound for every two clients: two standard errors are subtracted, so that a small
client is not called different by chance.

    brightness  area between the intensity quantile curves (1-Wasserstein), by their 5-to-95 % width
    contrast    the same of curves with mean 0 and SD 1 in each case: what is left after a z-score
    spacing     log2 of the ratio of median spacings, the axis where it is largest
    shape       log2 of the ratio of median numbers of voxels, the axis where it is largest
    foreground  log2 of the ratio of median foreground sizes, the class where it is largest
    amount      log2 of the ratio of numbers of cases

The verdict is by the pair that differs most. It calls an aspect different from the first of these values on,
strongly different from the second: brightness 0.1 and 0.3 widths; contrast 0.1 and 0.25 SD; spacing a factor
of 1.25 and 2; shape 1.5 and 2; foreground 1.5 and 2.5; amount 3 and 10. The values are our choice, set on
synthetic hospitals and on polyp, fundus and glioma images. The client that a plain average serves worst is
estimated: the one farthest from all cases, its own included, every aspect in units of "strongly".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.integrate import trapezoid

from wardround.data.fingerprint.case import ALL, LEVELS, Matrix
from wardround.data.fingerprint.histogram import Histogram, round_all
from wardround.data.fingerprint.measure import Fingerprint
from wardround.data.partitions import save_figure
from wardround.errors import DataError
from wardround.tables import Table, one_line
from wardround.text import clipped

FARTHEST = 10.0  # largest distance reported for two quantile curves
ASPECTS = {
    "brightness": (0.1, 0.3),
    "contrast": (0.1, 0.25),
    "spacing": (math.log2(1.25), 1.0),
    "shape": (math.log2(1.5), 1.0),
    "foreground": (math.log2(1.5), math.log2(2.5)),
    "amount": (math.log2(3), math.log2(10)),
}
WORDS = {
    "spacing": "voxel spacing",
    "shape": "image size",
    "foreground": "foreground size",
    "amount": "number of cases",
}


@dataclass(frozen=True)
class FingerprintComparison:
    """How much clients differ.

    clients: those that could be compared; distances: aspect -> (clients, clients), as the top of this file
    defines them; withheld: clients with too few cases.
    """

    fingerprints: tuple[Fingerprint, ...]
    clients: tuple[str, ...]
    distances: Mapping[str, Matrix]
    withheld: tuple[str, ...]
    verdict: str

    def as_table(self) -> Table:
        """One row per client: what it has, and its mean distance to the others."""
        rows: list[list[Any]] = []
        for one in self.fingerprints:
            known = one.client in self.clients
            shape, spacing = format_sides(one.shape), format_sides(one.spacing)
            row: list[Any] = [one.client, one.cases, one.groups, shape, spacing, format_foreground(one)]
            for matrix in self.distances.values():
                others = len(self.clients) - 1
                place = self.clients.index(one.client) if known else 0
                row.append(float(matrix[place].sum() / others) if known and others else "withheld")
            rows.append(row)
        distances = [f"{name} distance" for name in self.distances]
        heads = ["client", "cases", "groups", "shape", "spacing", "foreground", *distances]
        return Table("Fingerprints", heads, rows, self.verdict, width=60)

    def as_dict(self) -> dict[str, Any]:
        return {
            "fingerprints": [one.as_dict() for one in self.fingerprints],
            "clients": list(self.clients),
            "distances": {name: matrix.round(4).tolist() for name, matrix in self.distances.items()},
            "thresholds": {name: list(limits) for name, limits in ASPECTS.items()},
            "withheld": list(self.withheld),
            "verdict": self.verdict,
        }


def compare(fingerprints: Sequence[Fingerprint]) -> FingerprintComparison:
    """Measure the distances between clients, and say what they mean."""
    known = [one for one in fingerprints if one.is_open]
    check_comparable(known)
    distances = {name: np.zeros((len(known), len(known))) for name in ASPECTS}
    for (a, one), (b, other) in itertools.combinations(enumerate(known), 2):
        for name, value in measure_distances(one, other).items():
            distances[name][a, b] = distances[name][b, a] = value
    names = tuple(one.client for one in known)
    withheld = tuple(one.client for one in fingerprints if not one.is_open)
    verdict = judge(known, distances, withheld)
    return FingerprintComparison(tuple(fingerprints), names, distances, withheld, verdict)


def check_comparable(known: Sequence[Fingerprint]) -> None:
    """Refuse two clients of one name, and clients that differ in dimensions or channels."""
    for one, what in itertools.product(known, ("dimensions", "channels")):
        field = "shape" if what == "dimensions" else "intensity"
        here, there = len(getattr(one, field)), len(getattr(known[0], field))
        if here != there:
            raise DataError(
                f"client '{one.client}' has {here} {what}, client '{known[0].client}' {there}; "
                "one model needs the same everywhere. Check with: wardround data check"
            )
    names = [one.client for one in known]
    if len(set(names)) < len(names):
        raise DataError(f"Two fingerprints are of client '{max(names, key=names.count)}'; rename one.")


def measure_distances(one: Fingerprint, other: Fingerprint) -> dict[str, float]:
    """The distance of two clients in every aspect."""
    pairs = zip(one.intensity, other.intensity, strict=True)
    widths = [  # 5 to 95 %
        (a.mean[-2] - a.mean[1] + b.mean[-2] - b.mean[1]) / 2 if a and b else 1.0 for a, b in pairs
    ]
    spacings = [log_ratio(a.median, b.median) for a, b in zip(one.spacing, other.spacing, strict=True)]
    shapes = [log_ratio(a.median, b.median) for a, b in zip(one.shape, other.shape, strict=True)]
    return {
        "brightness": measure_curves(one, other, "intensity", widths),
        "contrast": measure_curves(one, other, "contrast", [1.0] * len(widths)),
        "spacing": max(spacings, default=0.0),
        "shape": max(shapes, default=0.0),
        "foreground": measure_foreground(one, other),
        "amount": log_ratio(float(one.cases), float(other.cases)),
    }


def measure_curves(one: Fingerprint, other: Fingerprint, field: str, units: Sequence[float]) -> float:
    """1-Wasserstein distance of the quantile curves less two standard errors, in units; the worst channel."""
    found = [0.0]
    for a, b, unit in zip(getattr(one, field), getattr(other, field), units, strict=True):
        if a is None or b is None:  # a channel that one of them lacks
            continue
        gap = np.abs(np.subtract(a.mean, b.mean))
        noise = np.sqrt(np.square(a.sd) / int(one.groups) + np.square(b.sd) / int(other.groups))
        span = LEVELS[-1] - LEVELS[0]
        area = float(trapezoid(gap - 2 * noise, LEVELS)) / span
        found.append(min(area / max(unit, 1e-12), FARTHEST))
    return max(found)


def measure_foreground(one: Fingerprint, other: Fingerprint) -> float:
    """Ratio of median sizes (as log2) less two standard errors; the class where it is largest."""
    found = [0.0]
    for name in one.foreground.keys() & other.foreground.keys():
        a, b = one.foreground[name], other.foreground[name]
        if a is None or b is None:
            continue
        measured = a.volume is not None and b.volume is not None
        sizes = [(s.volume if measured and s.volume else s.fraction) for s in (a, b)]
        numbers = [max(1.0, s.share * int(f.groups)) for s, f in ((a, one), (b, other))]
        # Of a median: 1.25 SD / sqrt(n).
        errors = [1.25 * log_spread(size) / math.sqrt(n) for size, n in zip(sizes, numbers, strict=True)]
        found.append(log_ratio(sizes[0].median, sizes[1].median) - 2 * math.hypot(*errors))
    return max(found)


def log_ratio(one: float, other: float) -> float:
    """log2 of the larger over the smaller; 0 where a number is not above 0."""
    return abs(math.log2(one / other)) if one > 0 and other > 0 else 0.0


def log_spread(sizes: Histogram) -> float:
    """SD of log2 of the sizes, were they log-normal."""
    return math.sqrt(math.log1p((sizes.sd / sizes.mean) ** 2)) / math.log(2) if sizes.mean > 0 else 0.0


# Verdict


def judge(known: Sequence[Fingerprint], distances: Mapping[str, Matrix], withheld: Sequence[str]) -> str:
    """The verdict, by the limits at the top of this file."""
    if len(known) < 2:
        sentences = ["Fewer than two clients have enough cases to be compared."]
    else:
        largest = {name: float(matrix.max()) for name, matrix in distances.items()}
        strong = [name for name, value in largest.items() if value >= ASPECTS[name][1]]
        some = [name for name, value in largest.items() if ASPECTS[name][0] <= value < ASPECTS[name][1]]
        sentences = [
            describe_differences(known, distances, strong, some),
            *advise(strong, some),
            *describe_missing_classes(known),
        ]
    if withheld:
        names = join_words([quote(name) for name in withheld])
        sentences.append(f"Not compared, because of too few patients: {names}.")
    sentences.append("These are summary numbers: annotation styles show only where they change sizes.")
    return " ".join(sentences)


def describe_differences(
    known: Sequence[Fingerprint], distances: Mapping[str, Matrix], strong: Sequence[str], some: Sequence[str]
) -> str:
    """Say in what clients differ, and what to expect of a plain average."""
    if not strong and not some:
        return "Clients are alike: a plain average (fedavg) should serve all of them about equally well."
    parts = [
        f"{how} in {join_words([WORDS.get(n, n) for n in names])}"
        for how, names in (("strongly", strong), ("somewhat", some))
        if names
    ]
    text = f"Clients differ {' and '.join(parts)}"
    if not {*strong, *some} - {"amount"}:
        most = max(known, key=lambda one: int(one.cases))
        return f"{text}: a plain average (fedavg) weighs by cases and will follow {quote(most.client)}."
    farthest = find_farthest(known, distances)
    share = int(farthest.cases) / sum(int(one.cases) for one in known)
    who = f"{quote(farthest.client)}, the farthest from the others and {share:.0%} of the cases"
    if {"contrast", "foreground"} & set(strong):
        return f"{text}: expect a plain average (fedavg) to serve {who}, worst."
    if set(strong) - {"amount"}:  # what preparing takes out
        return f"{text}: unprepared, a plain average (fedavg) would serve {who}, worst."
    return f"{text}: a plain average (fedavg) is a fair start; watch {who}."


def find_farthest(known: Sequence[Fingerprint], distances: Mapping[str, Matrix]) -> Fingerprint:
    """The client farthest from all cases, which a plain average weighs by; aspects in units of "strongly"."""
    cases = np.array([float(one.cases) for one in known])
    together = sum(matrix / ASPECTS[name][1] for name, matrix in distances.items() if name != "amount")
    apart = (together * cases).sum(axis=1)
    return known[int(np.argmax(apart))]


def advise(strong: Sequence[str], some: Sequence[str]) -> list[str]:
    """Say what can be done about it."""
    sentences = []
    either = {*strong, *some}
    if "brightness" in either:
        rest = ", but not the contrast" if "contrast" in either else ""
        sentences.append(f"A z-score of each case (prepare.normalise) takes out the brightness{rest}.")
    if "spacing" in either:
        sentences.append("Resample all to one spacing (prepare.spacing).")
    elif "shape" in either:
        sentences.append("Bring all to one size (prepare.size), or to one spacing where files state it.")
    if {"contrast", "foreground"} & set(strong):
        sentences.append("Compare it with methods for clients that differ (wardround methods).")
    return sentences


def describe_missing_classes(known: Sequence[Fingerprint]) -> list[str]:
    """A sentence on each class that some clients have too rarely to describe."""
    every = sorted({name for one in known for name, own in one.foreground.items() if own is not None})
    sentences = []
    for name in every:
        without = [quote(one.client) for one in known if one.foreground.get(name) is None]
        if without:
            sentences.append(f"{quote(name)} is labelled in few or no cases of {join_words(without)}.")
    return sentences


def quote(name: str) -> str:
    """A client's or class name on one line, not too long."""
    return f"'{one_line(name, 40)}'"


def join_words(words: Sequence[str]) -> str:
    """
    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def format_sides(axes: Sequence[Histogram]) -> str:
    """Medians, as 160 x 213."""
    return " x ".join(format_median(axis) for axis in axes) or "withheld"


def format_median(values: Histogram) -> str:
    """To three digits."""
    return f"{round_all([values.median])[0]:g}"


def format_foreground(one: Fingerprint) -> str:
    found = one.foreground.get(ALL)
    if found is None:
        return "withheld" if ALL in one.foreground or not one.is_open else "no labels"
    unit = "mm²" if len(one.shape) == 2 else "mm³"
    return f"{format_median(found.volume)} {unit}" if found.volume else f"{100 * found.fraction.median:.3g} %"


# Picture


def save_picture(found: FingerprintComparison, path: Path) -> None:
    """Draw a heat map of each aspect, and quantile curves of each channel, as stored and standardised."""
    from matplotlib.figure import Figure

    known = [one for one in found.fingerprints if one.client in found.clients]
    channels = min(len(known[0].intensity), 4) if known else 0  # more would not be readable
    figure = Figure(figsize=(13, 6.4 if known else 2), dpi=100)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.1))
    top = grid[0].subgridspec(1, len(ASPECTS))
    for place, (name, matrix) in enumerate(found.distances.items()):
        if known:
            draw_map(figure.add_subplot(top[place]), matrix, name, found.clients if place == 0 else ())
    bottom = grid[1].subgridspec(1, max(1, 2 * channels))
    axes = [figure.add_subplot(bottom[place]) for place in range(2 * channels)]
    for channel in range(channels):
        pairs = (("intensity", "as stored"), ("contrast", "mean 0, SD 1"))
        for axis, (field, words) in zip(axes[2 * channel : 2 * channel + 2], pairs, strict=True):
            draw_curves(axis, known, field, channel)
            axis.set_title(f"channel {channel + 1}, {words}", fontsize=9)
    if not known:
        figure.text(0.01, 0.5, "No client has enough cases to be compared.", fontsize=11)
    elif len(known) <= 20:
        handles = axes[0].get_lines()
        figure.legend(
            handles,
            [clipped(one.client) for one in known],
            loc="lower center",
            ncols=min(len(known), 6),
            fontsize=8,
            frameon=False,
        )
    save_figure(figure, path, margin=0.03 + 0.035 * math.ceil(len(known) / 6) if len(known) <= 20 else 0.0)


def draw_map(axis: Any, matrix: Matrix, name: str, clients: Sequence[str]) -> None:
    """A heat map from 0 to twice the limit of "strongly"."""
    strong = ASPECTS[name][1]
    axis.imshow(matrix, vmin=0, vmax=2 * strong, cmap="YlOrRd")
    axis.set_title(f"{WORDS.get(name, name)}\nstrong from {strong:.2g}", fontsize=9)
    if len(matrix) <= 8:
        for row, column in np.ndindex(matrix.shape):
            value = matrix[row, column]
            colour = "white" if value > 1.3 * strong else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    shown = range(len(clients)) if len(clients) <= 20 else ()
    axis.set_xticks([])
    axis.set_yticks(list(shown), [clipped(clients[place], 16) for place in shown], fontsize=8)


def draw_curves(axis: Any, known: Sequence[Fingerprint], field: str, channel: int) -> None:
    """One line per client: intensity at each level."""
    from matplotlib import colormaps

    palette = colormaps["tab10" if len(known) <= 10 else "viridis"]
    for number, one in enumerate(known):
        colour = palette(number if len(known) <= 10 else number / len(known))
        curve = getattr(one, field)[channel]
        shown = [math.nan] * len(LEVELS) if curve is None else curve.mean
        axis.plot(LEVELS, shown, color=colour, marker=".", linewidth=1.3)
    axis.set_xlabel("% of voxels below", fontsize=8)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
