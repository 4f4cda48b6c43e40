"""The pictures of a comparison as PNG files, for papers and slides: figures/*.png beside its page.

    scores        test score of every client and their mean, row by row
    curves        validation score by round         losses   training loss by round
    weights       aggregation weights by round      cost     score against the time of a round
    cases         the same test cases under every row; uncertainty, features: the same cases again

Colours are those of Okabe and Ito, which colour-blind readers tell apart; where they repeat, dashes differ.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from wardround.comparison.costs import measure_costs
from wardround.comparison.groups import RunGroup, average_losses, first_weights
from wardround.comparison.scores import Sheet, summarise_row
from wardround.engine.judging.pictures import Picture
from wardround.files import write_bytes
from wardround.metrics import METRICS
from wardround.reporting.panels import PALETTES, collect_panel
from wardround.text import clipped

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#7f7f7f")
DASHES = ("-", "--", ":")
MARKERS = "osD^vP*X"
TRUTH, PREDICTION = "#00d0ff", "#ff9f1c"
DPI = 150
MOST_ROWS = 24  # of a legend
WIDTH = 8.0  # inches

Axes = Any  # matplotlib is imported where it draws: the page alone does not need it
Lines = Mapping[str, Sequence[tuple[float, float]]]


def write_figures(group: RunGroup, folder: Path) -> list[Path]:
    """Write the figures that the group has something for; those of an earlier report are replaced."""
    drawings: Mapping[str, Callable[[RunGroup], Any]] = {
        "scores": draw_scores,
        "curves": draw_curves,
        "losses": draw_losses,
        "weights": draw_weights,
        "cost": draw_cost,
        "cases": lambda found: draw_panel(found, "prediction"),
        "uncertainty": lambda found: draw_panel(found, "uncertainty"),
        "features": lambda found: draw_panel(found, "features"),
    }
    written = []
    for name, draw in drawings.items():
        figure, path = draw(group), folder / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=DPI)
        write_bytes(path, content.getvalue())
        written.append(path)
    return written


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """A figure without pyplot and its global state, and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def style_of(place: int) -> dict[str, Any]:
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": DASHES[place // len(COLOURS) % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def finish(axis: Axes, x: str, y: str, *, grid: str = "both") -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(axis=grid, color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def place_legend(figure: Any, axis: Axes) -> None:
    """Beside the plot, so that it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    left_out = len(labels) - MOST_ROWS
    figure.legend(
        handles[:MOST_ROWS],
        labels[:MOST_ROWS],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
        title=f"and {left_out} more" if left_out > 0 else None,
    )


# Scores


def main_title(group: RunGroup, sheet: Sheet) -> str:
    return f"{group.tested}{METRICS[group.metrics[0]].title_in(sheet.lengths)}"


def draw_scores(group: RunGroup) -> Any:
    """One line a row: a mark for every client, a bar at their mean, whiskers over seeds."""
    sheet = group.sheet
    rows = [row for row in sheet.rows if row.replicates] if sheet is not None else []
    if sheet is None or len(rows) < 2:
        return None
    metric = group.metrics[0]
    clients = sheet.clients(metric)
    figure, axes = new_figure(WIDTH, 1.3 + 0.36 * len(rows))
    axis = axes[0][0]
    for place, client in enumerate(clients):
        summaries = [summarise_row(row, metric, clients) for row in rows]
        values = [summary.clients[client].mean for summary in summaries]
        style = {**style_of(place), "linestyle": ""}
        axis.plot(values, range(len(rows)), **style, markersize=6, alpha=0.85, label=clipped(client, 20))
    for place, row in enumerate(rows):
        mean = summarise_row(row, metric, clients).mean
        axis.errorbar(
            mean.mean, place, xerr=mean.sd, fmt="|", color="black", markersize=16, markeredgewidth=2,
            capsize=3, label="mean over clients" if place == 0 else None,
        )  # fmt: skip
    axis.set_yticks(range(len(rows)), [clipped(row.label, 36) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    finish(axis, main_title(group, sheet), "")
    place_legend(figure, axis)
    return figure


def draw_cost(group: RunGroup) -> Any:
    """The score of every row against the time of its round."""
    sheet = group.sheet
    costs = measure_costs(group.replicates, sheet) if sheet is not None else []
    if sheet is None or len(costs) < 2:
        return None
    figure, axes = new_figure(WIDTH, 4.5)
    axis = axes[0][0]
    for place, cost in enumerate(costs):
        style = {**style_of(place), "linestyle": ""}
        filled = "none" if place >= len(COLOURS) else None  # a colour that comes again
        axis.errorbar(
            cost.seconds.mean, cost.score.mean, xerr=cost.seconds.sd, yerr=cost.score.sd, **style,
            markersize=9, elinewidth=1, capsize=3, label=clipped(cost.label, 30), markerfacecolor=filled,
        )  # fmt: skip
    axis.set_xlim(0, 1.05 * axis.get_xlim()[1])  # room for the whole marker
    finish(axis, "seconds a round", f"mean {main_title(group, sheet)}")
    place_legend(figure, axis)
    return figure


# Over rounds


def draw_lines(lines: Lines, y: str) -> Any:
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(WIDTH, 4.5)
    axis = axes[0][0]
    for place, (label, points) in enumerate(lines.items()):
        rounds, values = zip(*points, strict=True)
        every = max(1, len(points) // 8)
        style = style_of(place)
        axis.plot(
            rounds, values, **style, markersize=5, markevery=every, linewidth=1.6, label=clipped(label, 30)
        )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    finish(axis, "round", y)
    place_legend(figure, axis)
    return figure


def draw_curves(group: RunGroup) -> Any:
    for metric, lines in group.curves.items():
        if len(lines) > 1:
            lengths = "" if group.sheet is None else group.sheet.lengths
            return draw_lines(lines, f"validation {METRICS[metric].title_in(lengths)}, mean over clients")
    return None


def draw_losses(group: RunGroup) -> Any:
    lines = average_losses(group.replicates)
    return draw_lines(lines, "training loss, mean over clients") if len(lines) > 1 else None


def draw_weights(group: RunGroup) -> Any:
    """One small plot a row, the weights of its clients stacked."""
    from matplotlib.ticker import MaxNLocator

    weights = first_weights(group.replicates)
    if len(weights) < 2:
        return None
    columns = min(4, len(weights))
    lines = math.ceil(len(weights) / columns)
    figure, axes = new_figure(2.0 * columns + 1.6, 1.9 * lines, lines, columns, sharey=True)
    clients = sorted({client for series in weights.values() for client in series})
    for axis in axes.flat[len(weights) :]:
        axis.set_axis_off()
    for place, (axis, (label, series)) in enumerate(zip(axes.flat, weights.items(), strict=False)):
        rounds: list[float] = sorted({at for points in series.values() for at, _ in points})
        known = {client: dict(series.get(client, [])) for client in clients}
        heights = [[known[client].get(at, 0.0) for at in rounds] for client in clients]
        if len(rounds) == 1:  # as wide as a round, or nothing would be seen
            rounds, heights = [rounds[0] - 0.5, rounds[0] + 0.5], [own * 2 for own in heights]
        colours = [COLOURS[number % len(COLOURS)] for number in range(len(clients))]
        axis.stackplot(rounds, heights, colors=colours, alpha=0.8, edgecolor="white", linewidth=0.7,
                       labels=[clipped(client, 20) for client in clients])  # fmt: skip
        axis.set_title(clipped(label, 26), fontsize=9)
        axis.set_ylim(0, 1)
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
        finish(axis, "round", "weight" if place % columns == 0 else "", grid="y")
    place_legend(figure, axes[0][0])
    return figure


# The same cases


def draw_panel(group: RunGroup, layer: str) -> Any:
    """One line a case: the scan with the truth, then every row.

    layer: prediction, uncertainty or features.
    """
    cases = collect_panel(group.replicates)
    if not cases or all(getattr(picture, layer) is None for case in cases for picture in case.rows.values()):
        return None
    labels = list(cases[0].rows)
    tall = max(case.scan.image.shape[1] * case.scan.aspect / case.scan.image.shape[2] for case in cases)
    size = (1.25 * (len(labels) + 1) + 0.4, 1.25 * min(2.0, tall) * len(cases) + 0.8)
    figure, axes = new_figure(*size, len(cases), len(labels) + 1)
    for line, (row, case) in enumerate(zip(axes, cases, strict=True)):
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        draw_scan(row[0], case.scan, ("truth",))
        where = f"\n{case.scan.plane}" if case.scan.plane else ""
        row[0].set_ylabel(f"{clipped(case.client, 18)}\n{clipped(case.scan.name, 18)}{where}", fontsize=7)
        for axis, label in zip(row[1:], labels, strict=True):
            draw_cell(axis, case.rows[label], layer)
        if line == 0:
            for axis, heading in zip(row, ["truth", *labels], strict=True):
                axis.set_title("\n".join(wrap(clipped(heading, 34), 17)), fontsize=8)
    add_key(figure, layer)
    return figure


def draw_cell(axis: Axes, picture: Picture, layer: str) -> None:
    """The case under one row, with its Dice below."""
    if layer == "prediction":
        draw_scan(axis, picture, ("truth", "prediction"))
    elif getattr(picture, layer) is not None:
        height, width = picture.size
        axis.imshow(
            getattr(picture, layer)[0], PALETTES[layer], vmin=0, vmax=255, interpolation="nearest",
            extent=(-0.5, width - 0.5, height - 0.5, -0.5), aspect=picture.aspect,
        )  # fmt: skip
        draw_outline(axis, picture, "prediction")
    else:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", va="center", fontsize=8)
        return
    if not math.isnan(picture.dice):
        axis.set_xlabel(f"Dice {picture.dice:.3f}", fontsize=7, labelpad=1)


def draw_scan(axis: Axes, picture: Picture, outlines: Sequence[str]) -> None:
    axis.imshow(picture.image[0], "gray", vmin=0, vmax=255, interpolation="nearest", aspect=picture.aspect)
    for kind in outlines:
        draw_outline(axis, picture, kind)


def draw_outline(axis: Axes, picture: Picture, kind: str) -> None:
    """Every class of a label map, on a dark casing: seen on any picture."""
    from matplotlib.patheffects import withStroke

    labels = getattr(picture, kind)[0]
    colour, dashes = (TRUTH, "solid") if kind == "truth" else (PREDICTION, "dashed")
    for value in sorted(set(labels[labels > 0].tolist())):
        if not (labels == value).all():
            drawn = axis.contour(
                labels == value, levels=[0.5], colors=[colour], linewidths=1.0, linestyles=[dashes]
            )
            drawn.set_path_effects([withStroke(linewidth=2, foreground="black")])


def add_key(figure: Any, layer: str) -> None:
    """What outlines and colours mean."""
    from matplotlib.lines import Line2D

    truth = Line2D([], [], color=TRUTH, label="truth")
    prediction = Line2D([], [], color=PREDICTION, linestyle="--", label="prediction")
    says: Mapping[str, str] = {
        "uncertainty": "entropy: 0 (dark) is confident, 1 (bright) an even guess",
        "features": "mean activation: dark is weak, bright is strong (each picture on its own)",
    }
    figure.legend(
        handles=[truth, prediction], loc="outside lower left", ncols=2, frameon=False, fontsize=8,
        title=says.get(layer), title_fontsize=8, alignment="left",
    )  # fmt: skip
