"""Facts of made-up federations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wardround.configuring.facts import ChannelFacts, ClientFacts, Facts, Quantiles

GB = 10**9


def same(*values: float) -> tuple[Quantiles, ...]:
    """Axes along which all cases are alike."""
    return tuple(Quantiles(value, value, value) for value in values)


@pytest.fixture
def make_facts() -> Callable[..., Facts]:
    """Four hospitals with 24 GB GPUs and a hundred MR volumes of 160x192x160 mm in all, 1 mm a voxel."""

    def make(**changes: Any) -> Facts:
        spacing = changes.pop("spacing", same(1.0, 1.0, 1.0))
        shape = changes.pop("shape", same(160, 192, 160))
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
