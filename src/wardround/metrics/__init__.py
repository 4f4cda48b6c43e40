"""Metrics: how similar two masks are. METRICS is the table of contents, `measure` scores one case.

overlap, surface   Dice and relatives; HD95 and other distances, all of two masks
summary            means over the cases of a client, and over clients
"""

from __future__ import annotations

from wardround.metrics.overlap import Confusion, EmptyPolicy, confusion
from wardround.metrics.registry import BOTH, METRICS, MM, MM_OR_PX, PX, Metric, combine_units, measure
from wardround.metrics.summary import (
    ClientsSummary,
    Summary,
    SurfaceMean,
    WorstClient,
    across_clients,
    summarise,
)
from wardround.metrics.surface import SurfaceDistances, SurfacePenalty

__all__ = [
    "METRICS", "Metric", "measure", "BOTH", "MM", "MM_OR_PX", "PX", "combine_units",
    "Confusion", "EmptyPolicy", "confusion", "SurfaceDistances", "SurfacePenalty",
    "ClientsSummary", "Summary", "SurfaceMean", "WorstClient", "across_clients", "summarise",
]  # fmt: skip
