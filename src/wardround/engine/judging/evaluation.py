"""Metrics of a model on the cases of one client, and of all clients together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.clients import Client
from wardround.config import EvaluateSettings, Postprocess
from wardround.data.annotation import Annotation
from wardround.data.cases import Split
from wardround.engine.judging.aggregates import Aggregate
from wardround.engine.judging.postprocessing import Steps, name_variant, postprocess_labels
from wardround.losses.objective import Objective, told_losses
from wardround.messages import Reply
from wardround.metrics import METRICS, EmptyPolicy, measure
from wardround.metrics.overlap import Confusion, bounded, label_pairs, region_confusion
from wardround.metrics.summary import ClientsSummary, Summary, WorstClient, across_clients, summarise
from wardround.params import Params
from wardround.training.inference import evaluated_as

Labels = NDArray[Any]
Regions = Mapping[str, Sequence[int]]
Row = dict[str, Any]
Job = Callable[[], Row]

MOST_WAITING = 8  # jobs a thread, before predicting waits for them


def score_cases(
    client: Client,
    params: Params,
    split: Split,
    objective: Objective,
    regions: Regions,
    metrics: Sequence[str],
    settings: EvaluateSettings,
    variants: Sequence[Steps] = (),
    *,
    tta: bool = False,
) -> list[Row]:
    """One row a case: its name, its loss, and every metric of every region.

    variants: score the prediction after the steps of each; regions are named by `name_variant`; tta: average
    over mirror images whatever the split.
    """
    scorer = Scorer(split, regions, metrics, settings, variants, client.data.annotation)
    # not in validation after rounds, which would take several times as long
    tta = tta or (settings.tta and (split is client.data.test or bool(variants)))
    with (
        evaluated_as(client.model, objective, tta=tta, axes=client.mirror_axes),
        Turns(client.device, inline=not scorer.needs_masks) as turns,
    ):
        for logits, batch in client.predictions(split, params):
            losses = told_losses(objective, logits, batch.label, client.data.annotation)
            for job in scorer.jobs(objective.predict(logits), batch.label, losses):
                turns.take(job)
            turns.end_batch()
        return turns.results()


class Scorer:
    """Scores the cases of a split, batch by batch and in their order.

    Overlap is counted where the prediction is, and only counts leave the device. Masks follow if surface
    metrics are asked for or predictions are tidied up first; that work is handed out case by case. Voxels to
    be ignored are taken out after predictions are tidied up, as `predict` does it.
    """

    def __init__(
        self,
        split: Split,
        regions: Regions,
        metrics: Sequence[str],
        settings: EvaluateSettings,
        variants: Sequence[Steps] = (),
        annotation: Annotation | None = None,
    ) -> None:
        self._split, self._regions, self._metrics, self._settings = split, regions, metrics, settings
        self._annotation = annotation
        self._highest = max((label for labels in regions.values() for label in labels), default=0)
        self._variants = variants
        self._tidies = bool(variants) or settings.postprocess not in ("none", "auto")
        self.needs_masks = self._tidies or any(METRICS[name].is_surface for name in metrics)
        self._num_seen = 0

    def jobs(self, predicted: Tensor, label: Tensor, losses: Tensor) -> list[Job]:
        """What is left to do for each case of a batch; it needs nothing of the device."""
        masks = truths = ignored = np.zeros((len(losses), 0))
        whole = predicted
        if self._annotation is not None:
            if self._tidies and self._annotation.ignores:
                ignored = (label == self._annotation.ignored).cpu().numpy()
            predicted, label = self._annotation.drop_ignored(predicted, label)
        pairs = label_pairs(predicted, label, self._highest)
        size = pairs.shape[1:]
        both = torch.cat([losses.double()[:, None], pairs.flatten(1).double()], dim=1)
        numbers = both.cpu()  # one transfer
        counted = numbers[:, 1:].long().reshape(-1, *size).numpy()
        if self.needs_masks:
            shown = whole if self._tidies else predicted
            masks, truths = (bounded(labels, self._highest).cpu().numpy() for labels in (shown, label))
        start, self._num_seen = self._num_seen, self._num_seen + len(losses)
        return [
            partial(self._row, start + k, float(numbers[k, 0]), counted[k], masks[k], truths[k], ignored[k])
            for k in range(len(losses))
        ]

    def _row(
        self, index: int, loss: float, pairs: Labels, predicted: Labels, truth: Labels, ignored: Labels
    ) -> Row:
        """The row of one case."""

        def tidy(how: Postprocess) -> Labels:
            labels = postprocess_labels(predicted, how)
            return np.where(ignored, 0, labels) if ignored.size else labels

        if self._variants:
            scores = {
                name_variant(number, region): found
                for number, steps in enumerate(self._variants)
                for region, found in self._measure(index, tidy(steps), truth).items()
            }
        elif self._tidies:
            scores = self._measure(index, tidy(self._settings.postprocess), truth)
        else:
            counts = {name: region_confusion(pairs, labels) for name, labels in self._regions.items()}
            scores = self._measure(index, predicted, truth, counts)
        return {"case": self._split.names[index], "loss": loss, "regions": scores}

    def _measure(
        self, index: int, predicted: Labels, truth: Labels, counts: Mapping[str, Confusion] | None = None
    ) -> dict[str, dict[str, float]]:
        """The metrics of one case, by region."""
        return measure(
            predicted,
            truth,
            self._regions,
            self._metrics,
            self._split.spacing(index),
            tolerance=self._settings.tolerance,
            empty_policy=self._settings.empty_policy,
            surface_penalty=self._settings.surface_penalty,
            counts=counts,
        )


class Turns:
    """Does jobs in as many threads as torch may use; results come in the order of the jobs.

    While a GPU predicts, the processor is free: jobs of one batch run during the next. Without one the
    network needs the same cores, so the two take turns, and a run never uses more threads than it was given.
    Nothing is left over for the next round: validation leaves surface metrics out, unless one of them chooses
    the best round, and then the round must wait for it.
    inline: jobs too small for threads are done at once.
    """

    def __init__(self, device: torch.device, *, inline: bool) -> None:
        self._waits = device.type == "cpu"
        self._threads = torch.get_num_threads()
        self._inline = inline or (self._waits and self._threads == 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="score")
        self._pending: deque[Future[Row]] = deque()
        self._done: list[Row] = []

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, job: Job) -> None:
        if self._inline:
            self._done.append(job())
            return
        self._pending.append(self._pool.submit(job))
        self._collect(MOST_WAITING * self._threads)

    def end_batch(self) -> None:
        if self._waits:
            self._collect(0)

    def results(self) -> list[Row]:
        self._collect(0)
        return self._done

    def _collect(self, most: int) -> None:
        """Wait until at most so many jobs are left, so that their masks do not pile up."""
        while len(self._pending) > most:
            self._done.append(self._pending.popleft().result())


@dataclass(frozen=True)
class Evaluation:
    """What the clients' case tables say together.

    cases: client -> rows; clients: metric -> client -> Summary over its cases (regions averaged);
    overall: metric -> summary over clients, without those held out; held_out: clients that took no part in
    training; unseen: metric -> summary over these; aggregates: client -> sums, of those that send no rows.
    """

    cases: Mapping[str, Sequence[Mapping[str, Any]]]
    clients: Mapping[str, Mapping[str, Summary]]
    overall: Mapping[str, ClientsSummary]
    held_out: tuple[str, ...] = ()
    aggregates: Mapping[str, Aggregate] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Evaluation:
        """Read back what `as_dict` wrote to result.json; the rows of the cases are in cases.csv."""
        clients: dict[str, dict[str, Summary]] = {}
        overall: dict[str, ClientsSummary] = {}
        held_out: tuple[str, ...] = ()
        for metric, entry in stored.items():
            held_out = tuple(entry.get("held_out", {}).get("clients", ()))
            kept = {key: value for key, value in entry.items() if key not in ("clients", "held_out")}
            facts = {key: parse_number(value) for key, value in kept.items()}
            worst = facts.pop("worst")
            facts["worst"] = None if worst is None else WorstClient(worst[0], parse_number(worst[1]))
            overall[metric] = ClientsSummary(**facts)
            clients[metric] = {
                name: Summary(**{key: parse_number(value) for key, value in summary.items()})
                for name, summary in entry["clients"].items()
            }
        return cls({}, clients, overall, held_out)

    @cached_property
    def regions_of(self) -> dict[str, list[str]]:
        """What the cases of each client were measured in: what it annotates."""
        told = {client: one.regions for client, one in self.aggregates.items()}
        return told | {
            client: list(dict.fromkeys(region for row in rows for region in row["regions"]))
            for client, rows in self.cases.items()
        }

    @cached_property
    def regions(self) -> list[str]:
        """What the cases were measured in, in the order of whoever has most; empty where only the summaries
        are known."""
        each = sorted(self.regions_of.values(), key=len, reverse=True)
        return list(dict.fromkeys(region for own in each for region in own))

    def of_region(self, region: str) -> Evaluation:
        """The same cases in one region alone; a client without it has no value."""
        cases = {
            client: [
                {**row, "regions": {region: row["regions"][region]}}
                for row in rows
                if region in row["regions"]
            ]
            for client, rows in self.cases.items()
        }
        metrics = [metric for metric in self.clients if metric != "loss"]
        aggregates = {client: one.only(region) for client, one in self.aggregates.items()}
        return summarise_cases(cases, metrics, aggregates).set_apart(self.held_out)

    def summarise_means(self, metric: str, client: str) -> Summary:
        """Over the cases of a client, each with the mean over its regions, which vary together."""
        if client in self.aggregates:
            return self.aggregates[client].summarise_means(metric)
        rows = self.cases.get(client, ())
        if metric == "loss" or not rows:
            return self.clients[metric][client]
        return summarise([summarise(column([row], metric)).mean for row in rows])

    @cached_property
    def unseen(self) -> Mapping[str, ClientsSummary]:
        return summarise_clients(self.clients, self.held_out.__contains__) if self.held_out else {}

    def set_apart(self, held_out: Collection[str]) -> Evaluation:
        """The same scores, with some clients held out of the means."""
        names = tuple(sorted({name for found in self.clients.values() for name in found} & set(held_out)))
        if names == self.held_out:
            return self
        overall = summarise_clients(self.clients, lambda name: name not in names)
        return replace(self, overall=overall, held_out=names)

    @property
    def is_broken(self) -> bool:
        """Whether the model has no finite loss on any case of any client."""
        losses = self.clients.get("loss", {}).values()
        return bool(losses) and not any(summary.num for summary in losses)

    def scores(self, metric: str) -> dict[str, float]:
        """The mean of each client that has one, without those held out."""
        found = self.clients[metric]
        return {name: found[name].mean for name in found if found[name].num and name not in self.held_out}

    def value(self, metric: str) -> float:
        """The mean over clients, without those held out."""
        return self.overall[metric].mean

    def as_dict(self) -> dict[str, Any]:
        def apart(metric: str) -> dict[str, Any]:
            if not self.held_out:
                return {}
            return {"held_out": {"clients": list(self.held_out), **vars(self.unseen[metric])}}

        return {
            metric: {
                "clients": {name: dict(vars(summary)) for name, summary in by_client.items()},
                **vars(self.overall[metric]),
                **apart(metric),
            }
            for metric, by_client in self.clients.items()
        }


def parse_number(value: Any) -> Any:
    """A number written as a word ("nan", "inf") as a number again."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def gather(replies: Sequence[Reply], metrics: Sequence[str], held_out: Collection[str] = ()) -> Evaluation:
    """Join the clients' answers to "evaluate"."""
    cases = {reply.client: reply.scalars["cases"] for reply in replies if reply.scalars.get("cases")}
    aggregates = {
        r.client: Aggregate.read(r.scalars["aggregate"]) for r in replies if "aggregate" in r.scalars
    }
    return summarise_cases(cases, ["loss", *metrics], aggregates).set_apart(held_out)


def summarise_cases(
    cases: Mapping[str, Sequence[Mapping[str, Any]]],
    metrics: Sequence[str],
    aggregates: Mapping[str, Aggregate] | None = None,
) -> Evaluation:
    """Each metric, or the loss, by client and over clients."""
    sums = aggregates or {}
    names = sorted({*cases, *sums}) if sums else list(cases)
    clients = {
        metric: {
            name: sums[name].summarise(metric) if name in sums else summarise(column(cases[name], metric))
            for name in names
        }
        for metric in metrics
    }
    return Evaluation(cases, clients, summarise_clients(clients, lambda name: True), aggregates=sums)


def summarise_clients(
    clients: Mapping[str, Mapping[str, Summary]], wanted: Callable[[str], bool]
) -> dict[str, ClientsSummary]:
    """Each metric, or the loss, over the wanted clients."""
    best = {metric: METRICS[metric].best if metric in METRICS else 0.0 for metric in clients}
    return {
        metric: across_clients({n: entry for n, entry in found.items() if wanted(n)}, best=best[metric])
        for metric, found in clients.items()
    }


def mean_dice(
    labels: Labels, truth: Labels, regions: Regions, spacing: Sequence[float], empty_policy: EmptyPolicy
) -> float:
    """Of one case, over its regions, as the case table has it; NaN where it is not defined."""
    found = measure(labels, truth, regions, ["dice"], spacing, empty_policy=empty_policy)
    return summarise([region["dice"] for region in found.values()]).mean


def column(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """One number for every case and region."""
    if metric == "loss":
        return [float(row["loss"]) for row in rows]
    return [float(region[metric]) for row in rows for region in row["regions"].values()]
