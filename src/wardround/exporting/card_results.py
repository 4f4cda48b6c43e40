"""What a model reached, for its card: every metric by site and structure, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from wardround.comparison.statistics import Scores, bootstrap
from wardround.engine.judging.evaluation import Evaluation
from wardround.engine.judging.result_tables import find_interval, mark_held_out, name_all
from wardround.exporting.package import Package
from wardround.methods.base import Method
from wardround.metrics import METRICS
from wardround.tables import Table, escaped


def results(package: Package) -> Iterator[str]:
    run = package.run
    if run.test is None or not run.cases:
        yield "The run has no test cases, so the quality of this model is unknown."
        return
    for metric in run.metrics:
        if metric in run.cases and metric in run.test.clients:
            yield from metric_results(package, metric)
    yield (
        "95 % intervals: of a site by Student's t over its test cases, of the mean over sites by resampling "
        "them (bootstrap). They show how much the mean depends on the test cases, not how another site would "
        "do. Infinite distances (one mask is empty) are counted and left out of the means."
    )
    if run.test.held_out:
        yield "Held-out sites took no part in training; they are not in the mean and never the worst site."
    yield from whose_results(package)


def metric_results(package: Package, metric: str) -> Iterator[str]:
    run, entry = package.run, METRICS[metric]
    assert run.test is not None
    regions = run.test.regions
    parts: dict[str, tuple[Evaluation, Scores]] = {"": (run.test, run.cases[metric])}
    if len(regions) > 1:
        parts = {name_all(regions): parts[""]}
        for name in regions:
            own = {key: value for key, value in run.cases[metric].items() if key.region == name}
            parts[name] = run.test.of_region(name), own
    rows = [
        [row[0], *([structure] if structure else []), *row[1:]]
        for structure, (test, scores) in parts.items()
        for row in site_rows(package, test, scores, metric)
    ]
    better = {True: "higher is better", False: "lower is better", None: f"{entry.best:g} is best"}
    yield f"### {entry.title_in(run.lengths)}, {better[entry.higher_is_better]}"
    heads = ["site", *(["structure"] if len(regions) > 1 else [])]
    yield table([*heads, "mean", "95 % interval", "cases", "infinite values"], rows)


def site_rows(package: Package, test: Evaluation, scores: Scores, metric: str) -> list[list[Any]]:
    """The rows of one structure: sites, their mean, the worst, and those that were held out."""
    names, overall, out = package.names, test.overall[metric], test.held_out
    sites = {site: site_values(test, metric, site) for site in test.clients[metric]}
    rows = [[names.get(site, site), *values] for site, values in sites.items() if site not in out]
    trained = {key: value for key, value in scores.items() if key.client not in out}
    cases = sum(values[2] for site, values in sites.items() if site not in out)
    rows.append(["mean over sites", overall.mean, bootstrap(trained), cases, overall.num_infinite])
    if overall.worst is not None:
        site, value = overall.worst
        rows.append([f"worst site: {names.get(site, site)}", value, *sites[site][1:]])
    return rows + [[mark_held_out(names.get(site, site)), *sites[site]] for site in out if site in sites]


def site_values(test: Evaluation, metric: str, site: str) -> list[Any]:
    """Mean, interval, cases and infinite values of a site."""
    summary, cases = test.clients[metric][site], test.summarise_means(metric, site)
    interval = find_interval(replace(cases, mean=summary.mean), metric)
    return [summary.mean, interval, cases.num, summary.num_infinite]


def whose_results(package: Package) -> Iterator[str]:
    """A note where sites were tested with personal models."""
    trained, method = package.trained, package.trained.method
    if type(method).personal is Method.personal and not trained.warnings and trained.client is None:
        return
    if trained.client is not None:
        name = escaped(package.names[trained.client])
        yield f"Each site was tested with its own model: only the row of {name} is about this one."
    elif type(method).personal is not Method.personal or method.kind == "personal":
        yield "Each site was tested with its own personal model; the one exported here is the common one."


def table(heads: list[str], rows: Sequence[Sequence[Any]]) -> str:
    """As Markdown; whole numbers as text, so that they get no decimals."""
    cells = [[str(value) if isinstance(value, int) else value for value in row] for row in rows]
    return Table("", heads, cells).markdown()
