"""Pictures a person can judge: image, truth and prediction side by side.

A client writes slices of its own cases to its own folder; in a simulation, on one machine, the run
joins them to `overlays.png`. Nothing of this is a message, so nothing of it leaves a hospital.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.cases import Split
from wardround.storage import StoredTensors, save_tensors, write_bytes

COLOURS = ("#19a7ce", "#ff7a45", "#b37feb", "#ffd666")


def save_pictures(path: Path, split: Split, chosen: Sequence[int], predicted: Sequence[Tensor]) -> None:
    """Store one slice of each chosen case: where the truth (or the prediction) is largest."""
    tensors: dict[str, Tensor] = {}
    names = []
    for number, index in enumerate(chosen):
        batch = split.batch([index])
        image, truth, guess = batch.image[0, 0].cpu(), batch.label[0].cpu(), predicted[index]
        if truth.ndim == 3:
            size = (truth if bool((truth > 0).any()) else guess).gt(0).sum(dim=(1, 2))
            place = int(size.argmax()) if int(size.max()) else truth.shape[0] // 2
            image, truth, guess = image[place], truth[place], guess[place]
        tensors[f"{number}/image"] = image.float().contiguous()
        tensors[f"{number}/truth"] = truth.to(torch.uint8).contiguous()
        tensors[f"{number}/prediction"] = guess.to(torch.uint8).contiguous()
        names.append(split.names[index])
    save_tensors(path, tensors, {"names": json.dumps(names)})


def draw_overlays(sources: Mapping[str, Path], target: Path, title: str) -> bool:
    """One row a client, three panels a case; false when no client has pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    loaded = {name: StoredTensors(path) for name, path in sources.items() if path.exists()}
    if not loaded:
        return False
    cases = {name: json.loads(stored.metadata["names"]) for name, stored in loaded.items()}
    columns = 3 * max(len(names) for names in cases.values())
    figure = Figure(figsize=(1.5 * columns + 0.9, 1.72 * len(loaded) + 0.7), dpi=110, facecolor="white")
    axes = figure.subplots(len(loaded), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, (client, stored) in enumerate(loaded.items()):
        for number, case in enumerate(cases[client]):
            image = stored[f"{number}/image"].numpy()
            panels = {case: None, "truth": "truth", "prediction": "prediction"}
            for offset, (heading, layer) in enumerate(panels.items()):
                axis = axes[row][3 * number + offset]
                axis.imshow(normalised(image), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                if layer is not None:
                    add_contours(axis, stored[f"{number}/{layer}"].numpy())
                axis.set_title(clipped(heading), fontsize=7, pad=2)
        axes[row][0].text(
            -0.12,
            0.5,
            clipped(client),
            transform=axes[row][0].transAxes,
            rotation=90,
            va="center",
            ha="right",
        )
    figure.suptitle(clipped(title, 100), fontsize=10, x=0.01, ha="left")
    figure.tight_layout(pad=0.4, rect=(0.02, 0, 1, 0.98))
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(target, content.getvalue())
    return True


def add_contours(axis: object, labels: NDArray[np.uint8]) -> None:
    """Outline and tint every class of a label map."""
    from matplotlib.colors import to_rgba

    tint = np.zeros((*labels.shape, 4))
    for value in np.unique(labels[labels > 0]):
        colour = COLOURS[(int(value) - 1) % len(COLOURS)]
        tint[labels == value] = (*to_rgba(colour)[:3], 0.35)
        axis.contour(labels == value, levels=[0.5], colors=[colour], linewidths=1.0)  # type: ignore[attr-defined]
    axis.imshow(tint, interpolation="nearest")  # type: ignore[attr-defined]


def normalised(image: NDArray[np.float32]) -> NDArray[np.float32]:
    low, high = np.percentile(image, (1, 99.5))
    scaled: NDArray[np.float32] = np.clip((image - low) / max(high - low, 1e-6), 0, 1)
    return scaled


def clipped(text: str, length: int = 24) -> str:
    """Names from elsewhere: short, one line, and never read as mathematics."""
    flat = "".join(character if character.isprintable() else "?" for character in text).replace("$", r"\$")
    return flat if len(flat) <= length else flat[: length - 1] + "…"
