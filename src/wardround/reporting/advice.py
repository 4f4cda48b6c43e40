"""What to do next: what a finished run shows that its reader can act on, with the command for it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from wardround.comparison.runs import Run, mapping
from wardround.engine.judging.evaluation import Evaluation
from wardround.metrics import METRICS
from wardround.reporting.charts import format_number
from wardround.reporting.html import Html, join, name, section, tag

RISES = 0.01  # of Dice, between the last quarter of the validations and the one before
FALLS = 0.02  # of Dice, from the best validation to the last ones
LAGS = 0.1  # of Dice, from the other clients' mean
FEWEST = 8  # validations by which a trend is judged
MOST_MISSING = 4  # classes that are named


def next_steps(run: Run, prefix: str) -> Html:
    """One sentence for each thing that stands out; nothing before the test, or where no model was trained."""
    if run.is_evaluation or run.test is None:
        return Html("")
    found = [*judge_curve(run), *judge_classes(run), *judge_annotation(run.test), *judge_clients(run, prefix)]
    if not found:
        found = [
            join(
                "Nothing stands out. Use the model: ",
                tag("code", f"wardround predict {quote(run)} SCANS -o masks"),
                "; or see whether another method does better: ",
                tag("code", "wardround compare"),
                ".",
            )
        ]
    return section(
        f"{prefix}-next", "What to do next", tag("ul", [tag("li", text) for text in found]), level=3
    )


def quote(run: Run, file: str = "") -> str:
    """The run's folder, or a file in it, as a shell takes it."""
    return shlex.quote(str(run.folder / file))


def pick_metric(run: Run) -> str | None:
    """The metric of the curve: the one the best round was chosen by, if it is better when higher."""
    known = [metric for metric in run.records.validation_metrics() if METRICS[metric].higher_is_better]
    wanted = mapping(run.config.get("evaluate")).get("select")
    return str(wanted) if wanted in known else next(iter(known), None)


# The curve


def judge_curve(run: Run) -> Iterator[Html]:
    """Whether training ended too early, or went on for too long."""
    metric = pick_metric(run)
    curve = [] if metric is None else run.records.validation_mean(metric)
    values = [value for _, value in curve if math.isfinite(value)]
    if metric is None or len(values) < FEWEST:
        return
    label, quarter = METRICS[metric].label, len(values) // 4
    last, before = average(values[-quarter:]), average(values[-2 * quarter : -quarter])
    best = max(values)
    if last - before > RISES:
        facts = f"{format_number(last)} over the last {quarter} validations, {format_number(before)} before"
        yield join(f"Validation {label} still rises ({facts}). ", advise_longer(run))
    elif best - last > FALLS:
        at = int(curve[[value for _, value in curve].index(best)][0])
        yield join(
            f"Validation {label} was best after round {at} of {run.rounds} ({format_number(best)}) and is "
            f"{format_number(last)} at the end: more rounds do not help. Try a smaller learning rate, more "
            "augmentation, or fewer local steps."
        )


def advise_longer(run: Run) -> Html:
    """How to train on; a learning rate that has come to its end cannot be resumed with profit."""
    optimizer = mapping(run.config.get("optimizer"))
    schedule = str(mapping(optimizer.get("schedule")).get("name", "constant"))
    if mapping(run.config.get("method")).get("decay_power"):
        schedule = "polynomial"
    if schedule not in ("polynomial", "cosine"):
        command = f"wardround train {quote(run)} --resume --set rounds={2 * run.rounds}"
        return join("Train longer: ", tag("code", command), ".")
    longer = "a larger --budget" if run.plan else f"--set rounds={2 * run.rounds}"
    return join(
        f"The {schedule} learning rate has come to its end, so train anew with ",
        tag("code", longer),
        ".",
    )


def average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# Classes


def judge_classes(run: Run) -> Iterator[Html]:
    """Classes the model never finds, and those that a client's test cases do not have."""
    scores: dict[str, dict[str, list[float]]] = {}
    for key, value in run.cases.get("dice", {}).items():
        scores.setdefault(key.region, {}).setdefault(key.client, []).append(value)
    lost, absent = [], []
    for region, clients in scores.items():
        known = [value for values in clients.values() for value in values if math.isfinite(value)]
        if known and not any(known):
            lost.append(region)
        absent += [
            (region, client) for client, values in clients.items() if all(math.isnan(v) for v in values)
        ]
    for region in lost[:MOST_MISSING]:
        yield join(
            "Class ", name(region), " is found in no test case (Dice 0). Check its label values with ",
            tag("code", "wardround data check"),
            ", then train longer, or on patches around it (", tag("code", "data.foreground"), ").",
        )  # fmt: skip
    for region, client in absent[:MOST_MISSING]:
        yield join(
            "Class ", name(region), " is missing in the test cases of ", name(client),
            ": nothing is known of it there. Look at its splits.",
        )  # fmt: skip


def judge_annotation(test: Evaluation) -> Iterator[Html]:
    """Structures that are tested at the clients which outline them alone, and may be found there alone."""
    clients = test.regions_of
    where = {region: [c for c, own in clients.items() if region in own] for region in test.regions}
    partly = [(region, own) for region, own in where.items() if len(own) < len(clients)]
    if not partly:
        return
    named = [join(name(region), " at ", name(", ".join(own))) for region, own in partly[:MOST_MISSING]]
    more = f" and {len(partly) - MOST_MISSING} more" if len(partly) > MOST_MISSING else ""
    yield join(
        "Tested only where they are outlined: ", *[join(one, "; ") for one in named[:-1]], named[-1], more,
        ". A network that tells hospitals apart by their images may find such a class there alone: outline "
        "it in a few test cases of the others before the model is used there.",
    )  # fmt: skip


# Clients


def judge_clients(run: Run, prefix: str) -> Iterator[Html]:
    """The client that is far behind the others; where they annotate different structures, in one of these."""
    assert run.test is not None
    parts = {"": run.test}
    if len({tuple(own) for own in run.test.regions_of.values()}) > 1:
        parts = {f" in {region}": run.test.of_region(region) for region in run.test.regions}
    gap, where, worst, facts = max(find_last(part, where) for where, part in parts.items())
    if gap < LAGS:
        return
    yield join(
        name(worst), f" lags{where} ({facts}). Look at ", link_to(prefix, "cases", "its worst cases"),
        " and at ", link_to(prefix, "data", "how it differs"), ". ", advise_for_one(run, worst),
    )  # fmt: skip


def find_last(test: Evaluation, where: str) -> tuple[float, str, str, str]:
    """How far the last client is behind the others' mean Dice, where, its name, and both in words."""
    means = {client: found.mean for client, found in test.clients.get("dice", {}).items()}
    means = {client: mean for client, mean in means.items() if math.isfinite(mean)}
    if len(means) < 2:
        return 0.0, where, "", ""
    worst = min(means, key=lambda client: means[client])
    others = average([mean for client, mean in means.items() if client != worst])
    over = f"over {test.clients['dice'][worst].num} values"
    facts = f"Dice {format_number(means[worst])} {over}, {format_number(others)} at the others"
    return others - means[worst], where, worst, facts


def link_to(prefix: str, part: str, text: str) -> Html:
    return tag("a", text, href=f"#{prefix}-{part}")


def advise_for_one(run: Run, client: str) -> Html:
    """What may help one client; held out of training, it can only take part."""
    if run.test is not None and client in run.test.held_out:
        return join("It was held out of training: the model does not carry over to it.")
    return join(
        "Methods that weigh clients by more than their size, or keep a part of the model to each: ",
        tag("code", f"wardround compare {quote(run, 'config.yaml')} --methods fedavg,safcf,fedbn,ditto"),
        ".",
    )
