"""Metrics of a model on the cases of one client, and of all clients together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from wardround.config import EvaluateSettings
from wardround.data.cases import Split
from wardround.engine.clients import Client
from wardround.losses.objective import Objective
from wardround.messages import Reply
from wardround.metrics import METRICS, measure
from wardround.metrics.summary import ClientsSummary, Summary, WorstClient, across_clients, summarise
from wardround.params import Params


def score_cases(
    client: Client,
    params: Params,
    split: Split,
    objective: Objective,
    regions: Mapping[str, Sequence[int]],
    metrics: Sequence[str],
    settings: EvaluateSettings,
) -> list[dict[str, Any]]:
    """One row a case: its name, its loss, and every metric of every region."""
    rows: list[dict[str, Any]] = []
    for logits, batch in client.predictions(split, params):
        losses = objective.sample_losses(logits, batch.label).tolist()
        predicted = objective.predict(logits).cpu().numpy()
        if settings.postprocess == "largest_component":
            predicted = np.stack([largest_components(labels) for labels in predicted])
        truth = batch.label.cpu().numpy()
        for number, loss in enumerate(losses):
            index = len(rows)
            scores = measure(
                predicted[number],
                truth[number],
                regions,
                metrics,
                split.spacing(index),
                tolerance=settings.tolerance,
                empty_policy=settings.empty_policy,
                surface_penalty=settings.surface_penalty,
            )
            rows.append({"case": split.names[index], "loss": loss, "regions": scores})
    return rows


def largest_components(labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Only the largest connected part of each class."""
    kept = np.zeros_like(labels)
    for value in np.unique(labels[labels > 0]):
        parts, _ = ndimage.label(labels == value)
        sizes = np.bincount(parts.ravel())
        sizes[0] = 0
        kept[parts == sizes.argmax()] = value
    return kept


@dataclass(frozen=True)
class Evaluation:
    """What the clients' case tables say together.

    cases: client -> rows; clients: metric -> client -> Summary over its cases (regions averaged);
    overall: metric -> summary over clients.
    """

    cases: Mapping[str, Sequence[Mapping[str, Any]]]
    clients: Mapping[str, Mapping[str, Summary]]
    overall: Mapping[str, ClientsSummary]

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Evaluation:
        """Read back what `as_dict` wrote to result.json; the rows of the cases are in cases.csv."""
        clients: dict[str, dict[str, Summary]] = {}
        overall: dict[str, ClientsSummary] = {}
        for metric, entry in stored.items():
            facts = {key: number(value) for key, value in entry.items() if key != "clients"}
            worst = facts.pop("worst")
            facts["worst"] = None if worst is None else WorstClient(worst[0], number(worst[1]))
            overall[metric] = ClientsSummary(**facts)
            clients[metric] = {
                name: Summary(**{key: number(value) for key, value in summary.items()})
                for name, summary in entry["clients"].items()
            }
        return cls({}, clients, overall)

    def value(self, metric: str) -> float:
        """The mean over clients."""
        return self.overall[metric].mean

    def as_dict(self) -> dict[str, Any]:
        return {
            metric: {
                "clients": {name: vars_of(summary) for name, summary in by_client.items()},
                **vars_of(self.overall[metric]),
            }
            for metric, by_client in self.clients.items()
        }


def number(value: Any) -> Any:
    """A number written as a word ("nan", "inf") as a number again."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def vars_of(record: Any) -> dict[str, Any]:
    """The fields of a small dataclass."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def gather(replies: Sequence[Reply], metrics: Sequence[str]) -> Evaluation:
    """Join the clients' answers to "evaluate"."""
    cases = {reply.client: reply.scalars["cases"] for reply in replies if reply.scalars["cases"]}
    clients: dict[str, dict[str, Summary]] = {}
    for metric in ["loss", *metrics]:
        clients[metric] = {name: summarise(column(rows, metric)) for name, rows in cases.items()}
    overall = {
        metric: across_clients(by_client, best=METRICS[metric].best if metric in METRICS else 0.0)
        for metric, by_client in clients.items()
    }
    return Evaluation(cases, clients, overall)


def column(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """One number for every case and region."""
    if metric == "loss":
        return [float(row["loss"]) for row in rows]
    return [float(region[metric]) for row in rows for region in row["regions"].values()]
