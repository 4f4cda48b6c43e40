"""Facts of made-up federations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from wardround.configuring.facts import ChannelFacts, ClientFacts, Facts, Quantiles

GB = 10**9


def to_quantiles(axes: Sequence[float | Sequence[float]]) -> tuple[Quantiles, ...]:
    """One number an axis where all cases are alike, or three."""
    return tuple(Quantiles(*(axis if isinstance(axis, Sequence) else [axis] * 3)) for axis in axes)


@pytest.fixture
def make_facts() -> Callable[..., Facts]:
    """Four hospitals with 24 GB GPUs and a hundred MR volumes of 160x192x160 mm in all, 1 mm a voxel."""

    def make(**changes: Any) -> Facts:
        shape = to_quantiles(changes.pop("shape", (160, 192, 160)))
        spacing = to_quantiles(changes.pop("spacing", (1.0,) * len(shape)))
        extent = tuple(
            Quantiles(side.low * mm.median, side.median * mm.median, side.high * mm.median)
            for side, mm in zip(shape, spacing, strict=True)
        )
        facts = Facts(
            dimensions=len(shape),
            channels=(ChannelFacts("t1", "mr", 100.0, 20.0, 50.0, 150.0),),
            classes=("core", "rim"),
            regions={"core": (1,), "rim": (2,)},
            has_spacing=True,
            spacing=spacing,
            shape=shape,
            extent=extent,
            kept=0.9,
            presence={"core": 1.0, "rim": 0.8},
            sizes={},
            clients=tuple(
                ClientFacts(name, 25, "cuda", 24 * GB, 8) for name in ("east", "north", "south", "west")
            ),
        )
        return replace(facts, **changes)

    return make
