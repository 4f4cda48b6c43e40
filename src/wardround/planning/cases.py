"""What a run trains on: the shape of its cases, how many each client has, and its steps in a round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from wardround.config import Config
from wardround.data.federation import Federation, ScanSummary
from wardround.data.phantom import cases as phantom
from wardround.data.roles import POOLED
from wardround.data.serving.loading import RealData
from wardround.data.serving.loading import estimate_shape as estimate_prepared_shape
from wardround.text import format_size


@dataclass(frozen=True)
class ClientPlan:
    """One client: its cases, and its training steps in one round."""

    name: str
    train: int
    val: int
    test: int
    steps: int


def estimate_shape(config: Config, federation: Federation) -> tuple[tuple[int, ...], list[str]]:
    """Voxels along each side of a training image, from the first image where cases are not prepared yet."""
    if config.data.patch is not None:
        return tuple(config.data.patch), []
    if config.data.federation is not None:
        data = RealData(config.data.federation, config.data)
        usual = estimate_prepared_shape(data.first_image, data.file.prepare)
        if data.file.prepare.size is not None:
            return tuple(usual), []
        return tuple(data.default_patch), [
            f"The shape is taken from the first image, {format_size(usual)} when prepared; cases of "
            "different shapes are trained on in patches."
        ]
    return config.data.phantom.shape, []


def with_shape(federation: Federation, shape: Sequence[int]) -> Federation:
    """The federation with a known shape, so that nothing is prepared to find it."""
    return replace(federation, summarise_scans=lambda: ScanSummary(None, tuple(shape)))


def count_cases(config: Config, federation: Federation) -> dict[str, tuple[int, int, int]]:
    """Training, validation and test cases of each client."""
    if config.data.federation is None:
        made = config.data.phantom
        return {name: phantom.count_split_cases(made, name) for name in federation.names}
    listing = RealData(config.data.federation, config.data).listing
    splits = {n: Counter(entry.split or "train" for entry in listing.of(n)) for n in federation.names}
    return {n: (found["train"], found["val"], found["test"]) for n, found in splits.items()}


def plan_clients(
    config: Config, counted: Mapping[str, tuple[int, int, int]], *, pooled: bool
) -> list[ClientPlan]:
    def steps(train: int) -> int:
        return config.local_epochs * math.ceil(train / config.batch_size)

    if not pooled:
        return [ClientPlan(name, *cases, steps(cases[0])) for name, cases in counted.items()]
    judged = [ClientPlan(name, 0, val, test, 0) for name, (_, val, test) in counted.items()]
    train = sum(cases[0] for cases in counted.values())
    return [*judged, ClientPlan(POOLED, train, 0, 0, steps(train))]
