"""Aggregates: a hospital's scores as sums and histograms over cases, where no row of a case may leave.

Whatever is told has at least `minimum` cases behind it: a score that is undefined or infinite in a few cases
is withheld as a whole, for its counts would point at them. Histograms have bins of as many cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from wardround.data.fingerprint.histogram import FingerprintModel, Histogram, Number, Spread, make_histogram
from wardround.files import parse_json
from wardround.metrics.summary import Summary, summarise

AGGREGATES = "aggregates.json"  # in the run folder, beside cases.csv
WHOLE = ""  # the mean over the regions of each case; the loss stands here too
MOST_REGIONS, MOST_METRICS = 1024, 64
Name = Annotated[str, Field(max_length=200)]
Cases = Annotated[int, Field(ge=0, le=10**7)]


class ScoreSums(FingerprintModel):
    """One metric over cases.

    num: with a finite value; sum: of these; squares: of their deviations from the mean; num_skipped,
    num_infinite: without a value, or an infinite one; histogram: how the finite ones are spread.
    """

    num: Cases
    sum: Number
    squares: Spread
    num_skipped: Cases = 0
    num_infinite: Cases = 0
    histogram: Histogram | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if self.histogram is not None and self.histogram.cases != self.num:
            raise ValueError("the histogram has another number of cases")
        return self

    @property
    def mean(self) -> float:
        return self.sum / self.num if self.num else math.nan

    def summarise(self) -> Summary:
        sd = math.sqrt(self.squares / max(1, self.num - 1)) if self.num else math.nan
        return Summary(self.mean, sd, self.num, self.num_skipped, self.num_infinite)


class Aggregate(FingerprintModel):
    """The scores of one client: region -> metric -> sums, None where too few cases are behind them."""

    minimum: int = Field(ge=1, le=10**6)
    scores: dict[Name, Annotated[dict[Name, ScoreSums | None], Field(max_length=MOST_METRICS)]] = Field(
        max_length=MOST_REGIONS
    )

    @classmethod
    def read(cls, value: Any) -> Aggregate:
        """What a hospital sent, checked; a ValueError says what is wrong."""
        try:
            found = cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            where = ".".join(str(part)[:80] for part in first["loc"])
            raise ValueError(f"its sums of scores are wrong: {where}: {first['msg']}") from None
        if 0 < found.fewest < found.minimum:
            raise ValueError(f"its sums of scores have fewer than {found.minimum} cases behind a number")
        return found

    @property
    def fewest(self) -> int:
        """The fewest cases behind any number; 0 where all are withheld."""
        told = [one for own in self.scores.values() for one in own.values() if one is not None]
        counts = [count for one in told for count in (one.num, one.num_skipped, one.num_infinite)]
        counts += [count for one in told if one.histogram is not None for count in one.histogram.counts]
        return min((count for count in counts if count), default=0)

    @property
    def regions(self) -> list[str]:
        return [region for region in self.scores if region != WHOLE]

    def only(self, region: str) -> Aggregate:
        """One region alone, which is then the whole."""
        own = self.scores.get(region, {})
        return self.model_copy(update={"scores": {region: own, WHOLE: own}})

    def summarise_means(self, metric: str) -> Summary:
        """Over cases, each with the mean over its regions."""
        return summarise_sums([self.scores.get(WHOLE, {}).get(metric)])

    def summarise(self, metric: str) -> Summary:
        """Over cases and regions; the loss over cases."""
        regions = [WHOLE] if metric == "loss" else self.regions
        return summarise_sums([self.scores.get(region, {}).get(metric) for region in regions])

    def list_withheld(self) -> list[str]:
        """Which scores too few cases are behind."""
        found = [(region, metric) for region, own in self.scores.items() for metric in own if not own[metric]]
        return [metric if region == WHOLE else f"{metric} of {region}" for region, metric in found]


def summarise_sums(parts: Sequence[ScoreSums | None]) -> Summary:
    """Several sums as one summary; those withheld are left out.

    Chan, Golub and LeVeque, 1983: squares about the common mean are those about each mean, and between them.
    """
    known = [one for one in parts if one is not None and one.num]
    counted = [one for one in parts if one is not None]
    num, total = sum(one.num for one in known), sum(one.sum for one in known)
    skipped, infinite = sum(one.num_skipped for one in counted), sum(one.num_infinite for one in counted)
    if not num:
        return Summary(math.nan, math.nan, 0, skipped, infinite)
    squares = sum(one.squares + one.num * (one.mean - total / num) ** 2 for one in known)
    return Summary(total / num, math.sqrt(squares / max(1, num - 1)), num, skipped, infinite)


# At the hospital


def aggregate_rows(rows: Sequence[Mapping[str, Any]], minimum: int) -> Aggregate:
    """The rows of an evaluation as sums."""
    regions = list(dict.fromkeys(region for row in rows for region in row["regions"]))
    metrics = list(dict.fromkeys(m for row in rows for scores in row["regions"].values() for m in scores))
    whole = {"loss": [float(row["loss"]) for row in rows if "loss" in row]} | {
        metric: [
            summarise([float(own[metric]) for own in row["regions"].values() if metric in own]).mean
            for row in rows
        ]
        for metric in metrics
    }
    values: dict[str, dict[str, list[float]]] = {
        region: {
            metric: [
                float(row["regions"][region].get(metric, math.nan))
                for row in rows
                if region in row["regions"]
            ]
            for metric in metrics
        }
        for region in regions
    }
    scores = {
        region: {metric: add_up(found, minimum) for metric, found in own.items()}
        for region, own in {WHOLE: whole, **values}.items()
    }
    return Aggregate(minimum=minimum, scores=scores)


def add_up(values: Sequence[float], minimum: int) -> ScoreSums | None:
    """The sums of one metric; None where a number would have fewer than `minimum` cases behind it."""
    found = summarise(values)
    counts = (found.num, found.num_skipped, found.num_infinite)
    if not any(counts) or any(0 < count < minimum for count in counts):
        return None
    finite = [value for value in values if math.isfinite(value)]
    histogram = make_histogram(finite, range(len(finite)), minimum) if finite else None
    squares = sum((value - found.mean) ** 2 for value in finite)
    return ScoreSums(
        num=found.num,
        sum=sum(finite),
        squares=squares,
        num_skipped=found.num_skipped,
        num_infinite=found.num_infinite,
        histogram=histogram,
    )


# In the run folder


def as_json(aggregates: Mapping[str, Aggregate]) -> dict[str, Any]:
    return {client: one.model_dump(mode="json") for client, one in aggregates.items()}


def read_aggregates(path: Path) -> dict[str, Aggregate]:
    """What aggregates.json says; nothing where there is none, or it is damaged."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return {client: Aggregate.read(value) for client, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
