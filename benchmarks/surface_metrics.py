"""HD95, ASSD and surface Dice of two tumour-like masks, against MONAI's functions.

Two masks of 128 voxels a side: a ragged blob and the same one shifted and frayed, with a false island, as a
prediction looks. Ours and MONAI's take turns on the same pairs; the ratio is MONAI's time over ours. The
difference is the largest between the three values, relative to those above 1: MONAI's are float32. MONAI:
`compute_hausdorff_distance(percentile=95)`, `compute_average_surface_distance(symmetric=True)` and
`compute_surface_dice`, whose boundaries are voxels too.

    python benchmarks/surface_metrics.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from monai.metrics import (
    compute_average_surface_distance,
    compute_hausdorff_distance,
    compute_surface_dice,
)
from numpy.typing import NDArray
from scipy import ndimage

from wardround.metrics import measure

NAMES = ("hd95", "assd", "surface_dice")
TOLERANCE = 1.0
Mask = NDArray[np.bool_]


def tumour(size: int, radius: float, seed: int) -> NDArray[np.float64]:
    """How deep a voxel lies inside a ragged blob; its mask is where this is positive."""
    draw = np.random.default_rng(seed)
    axes = np.meshgrid(*[np.linspace(-1, 1, size)] * 3, indexing="ij")
    stretch, middle = draw.uniform(0.8, 1.3, 3), draw.uniform(-0.2, 0.2, 3)
    away = np.sqrt(sum(((axis - at) * by) ** 2 for axis, at, by in zip(axes, middle, stretch, strict=True)))
    rough = ndimage.gaussian_filter(draw.standard_normal((size, size, size)), size / 20)
    return radius * (1 + 0.25 * rough / rough.std()) - away


def pair(size: int, radius: float, seed: int) -> tuple[Mask, Mask]:
    """A predicted and a true mask."""
    depth = tumour(size, radius, seed)
    frayed = ndimage.gaussian_filter(np.random.default_rng(seed + 1000).standard_normal(depth.shape), 2)
    predicted = (
        ndimage.shift(depth, (1.5, -1.0, 2.0), order=1, mode="nearest") + 0.03 * frayed / frayed.std() > 0
    )
    corner = slice(size // 10, size // 10 + max(2, size // 24))
    predicted[corner, corner, corner] = True
    return predicted, depth > 0


def ours(pred: Mask, truth: Mask, spacing: tuple[float, ...]) -> list[float]:
    scores = measure(pred, truth, {"tumour": [1]}, NAMES, spacing, tolerance=TOLERANCE)["tumour"]
    return [scores[name] for name in NAMES]


def theirs(pred: Mask, truth: Mask, spacing: tuple[float, ...]) -> list[float]:
    y_pred, y = (torch.from_numpy(mask)[None, None].float() for mask in (pred, truth))
    found = [
        compute_hausdorff_distance(y_pred, y, include_background=True, percentile=95, spacing=spacing),
        compute_average_surface_distance(y_pred, y, include_background=True, symmetric=True, spacing=spacing),
        compute_surface_dice(y_pred, y, [TOLERANCE], include_background=True, spacing=spacing),
    ]
    return [float(value) for value in found]


def timed(function: Callable[..., list[float]], *args: object) -> tuple[list[float], float]:
    started = time.perf_counter()
    values = function(*args)
    return values, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch, for MONAI; ours takes one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="monai")

    rows: list[dict[str, Any]] = []
    for label, radius, spacing in (
        ("small", 0.2, (1.0, 1.0, 1.0)),
        ("medium", 0.35, (1.0, 1.0, 1.0)),
        ("large", 0.55, (1.0, 1.0, 1.0)),
        ("medium, 3 mm slices", 0.35, (0.75, 0.75, 3.0)),
    ):
        pred, truth = pair(options.size, radius, seed=7)
        turns = []
        for _ in range(options.turns + 1):
            (mine, our_time), (monai, their_time) = (
                timed(function, pred, truth, spacing) for function in (ours, theirs)
            )
            turns.append((our_time, their_time))
        our_median, their_median = (statistics.median(column) for column in zip(*turns[1:], strict=True))
        rows.append(
            {
                "masks": label,
                "voxels": int(truth.sum()),
                "values": dict(zip(NAMES, mine, strict=True)),
                "largest_difference": max(
                    abs(a - b) / max(1.0, abs(b)) for a, b in zip(mine, monai, strict=True)
                ),
                "ours_seconds": our_median,
                "monai_seconds": their_median,
                "ratio": their_median / our_median,
            }
        )
    result = {
        "size": options.size,
        "ratio": min(row["ratio"] for row in rows),
        "largest_difference": max(row["largest_difference"] for row in rows),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"HD95 + ASSD + surface Dice, {options.size}³, median of {options.turns}")
    print(f"{'masks':22s}{'voxels':>9s}{'MONAI s':>10s}{'ours s':>10s}{'ratio':>8s}{'difference':>12s}")
    for row in rows:
        print(
            f"{row['masks']:22s}{row['voxels']:>9,}{row['monai_seconds']:10.4f}{row['ours_seconds']:10.4f}"
            f"{row['ratio']:8.1f}{row['largest_difference']:12.1e}"
        )


if __name__ == "__main__":
    main()
