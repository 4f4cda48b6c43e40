"""Pictures of test cases: image, truth and prediction side by side.

A client writes slices of its own test cases, with the model's uncertainty, to its own folder; in a
simulation, on one machine, the run joins them to `overlays.png` and the report shows them. Nothing of this
is a message, so nothing of it leaves a hospital.

    clients/<name>/pictures.safetensors
      <n>/image, truth, prediction, uncertainty    (slices, H, W) uint8; uncertainty: 255 is an even guess;
                                                   image: (slices, H, W, 3) where it is in colour
      panel/<n>/image, truth, ..., features        one slice of the cases that every method shows
      calibration                                  (bins, 3): voxels, sum of probabilities, true foreground
      foreground                                   share of foreground in every test case
      metadata: names, cases, panel                as JSON; `Picture` has the facts of a case
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wardround.clients import Client
from wardround.config import EvaluateSettings
from wardround.data.annotation import Annotation, measurable
from wardround.data.cases import Split
from wardround.data.federation import Federation
from wardround.engine.judging.evaluation import Regions, mean_dice
from wardround.engine.judging.postprocessing import postprocess_labels
from wardround.engine.judging.views import View, choose_view
from wardround.files import write_bytes
from wardround.losses.partial import merge_sums
from wardround.metrics import EmptyPolicy
from wardround.params import Params
from wardround.storage import StoredTensors, save_tensors
from wardround.text import clipped
from wardround.training.inference import evaluated_as
from wardround.training.workbench import Workbench

PICTURES = "pictures.safetensors"
COLOURS = ("#19a7ce", "#ff7a45", "#b37feb", "#ffd666")
LAYERS = ("image", "truth", "prediction", "uncertainty")
FACTS = ("kind", "dice", "places", "depth", "shown", "aspect", "plane")
MOST_SLICES = 24
MOST_PIXELS = {2: 320, 3: 160}  # of a side; larger pictures shrink
PANEL = "panel/"
PANEL_PIXELS = 192
PANEL_CASES = 2  # of each client
NUM_BINS = 10

Layer = NDArray[np.uint8]


@dataclass(frozen=True)
class Picture:
    """One test case to look at; layers (slices, H, W), of a colour image (slices, H, W, 3).

    kind: best, median, worst, or "" for another place in the order by Dice; places: where in the volume the
    slices were, of `depth`; shown: the slice with most foreground, where one looks first;
    aspect: height of a pixel divided by its width; plane: axial, coronal or sagittal, where known;
    uncertainty: None in runs before it was kept; features: in a panel, the mean size of the bottleneck's
    activations, as coarse as they are.
    """

    name: str
    image: Layer
    truth: Layer
    prediction: Layer
    uncertainty: Layer | None
    kind: str = ""
    dice: float = math.nan
    places: Sequence[int] = (0,)
    depth: int = 1
    shown: int = 0
    aspect: float = 1.0
    plane: str = ""
    features: Layer | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[1], self.image.shape[2]


# Written by a client


class Album:
    """Takes the test cases of one client one after the other; keeps each small, then the chosen ones."""

    def __init__(
        self,
        split: Split,
        regions: Regions,
        empty_policy: EmptyPolicy,
        orientation: str | None = None,
        annotation: Annotation | None = None,
    ) -> None:
        self._split, self._regions, self._empty_policy = split, regions, empty_policy
        self._orientation, self._annotation = orientation, annotation
        self._pictures: list[Picture] = []
        self._views: list[View] = []
        self._shares: list[float] = []
        self._calibration = torch.zeros(NUM_BINS, 3, dtype=torch.float64)

    def add(self, image: Tensor, truth: Tensor, probabilities: Tensor, labels: NDArray[np.uint8]) -> None:
        """The next case. probabilities: (classes, *spatial); labels: the mask, drawn where it counts."""
        name, spacing = self._split.names[len(self._pictures)], self._split.spacing(len(self._pictures))
        truth, probabilities = truth.cpu(), probabilities.float().cpu()
        counted, shown = torch.ones_like(truth, dtype=torch.bool), torch.from_numpy(labels)
        if self._annotation is not None:
            counted = truth != self._annotation.ignored
            shown, truth = map(self._annotation.hide, self._annotation.drop_ignored(shown, truth))
        dice = mean_dice(shown.numpy(), truth.numpy(), self._regions, spacing, self._empty_policy)
        entropy = entropy_bytes(probabilities)
        view = View() if truth.ndim == 2 else choose_view(truth.shape, spacing, self._orientation)
        picture = picture_of(name, image, truth, shown, entropy, spacing, view)
        self._views.append(view)
        self._pictures.append(replace(picture, dice=dice))
        self._shares.append(float((truth > 0).double().mean()))
        told = merge_sums(probabilities[None], self._annotation)[0]
        self._calibration += count_calibration(told[:, counted], truth[counted])

    def save(
        self,
        path: Path,
        count: int,
        encode: Callable[[int], Tensor | None] = lambda index: None,
        read_colours: Callable[[str], Tensor | None] = lambda name: None,
    ) -> None:
        """Write `count` of the cases, a panel, and what is known of all; nothing without test cases.

        encode: the bottleneck of a case by its index, (C, *spatial), where the network shows one;
        read_colours: a case by its name as it was before its intensities were scaled, where it is in colour.
        """
        chosen = [in_colour(picture, read_colours(picture.name)) for picture in choose(self._pictures, count)]
        panel = []
        for index in choose_by_truth(self._shares) if chosen else ():
            picture = self._pictures[index]
            coloured = in_colour(picture, read_colours(picture.name))
            panel.append(make_panel(coloured, encode(index), self._views[index]))
        if chosen:
            save_pictures(path, chosen, panel, self._calibration, self._shares)


def take_pictures(
    client: Client,
    bench: Workbench,
    params: Params,
    federation: Federation,
    settings: EvaluateSettings,
    path: Path,
) -> None:
    """The task "pictures": a few test cases with their uncertainty, written to the client's own folder."""
    split, objective = client.data.test, client.objective
    annotation = client.data.annotation
    regions = measurable(federation.regions, annotation)
    album = Album(split, regions, settings.empty_policy, federation.orientation, annotation)
    with evaluated_as(client.model, objective, settings.window, settings.tta, client.mirror_axes):
        for logits, batch in client.predictions(split, params):
            for number, labels in enumerate(objective.predict(logits).cpu().numpy()):
                labels = postprocess_labels(labels, settings.postprocess)
                probabilities = objective.probabilities(logits[number : number + 1])[0]
                album.add(batch.image[number], batch.label[number], probabilities, labels)

    def encode(index: int) -> Tensor | None:
        image, window = split.batch([index]).image, settings.window
        too_large = window is not None and any(
            side > most for side, most in zip(image.shape[2:], window, strict=True)
        )
        if not bench.model.has_features or too_large:
            return None
        reference, own = bench.reference("shown", params), client.memory.get("own")
        if own is not None:
            own.load_into(reference.model)
        with bench.autocast():
            return reference.encode(bench.lay_out(image.to(bench.device)))[0]

    album.save(path, settings.overlays, encode, partial(federation.read_colours, client.name))


def picture_of(
    name: str,
    image: Tensor,
    truth: Tensor,
    predicted: Tensor,
    entropy: Tensor,
    spacing: Sequence[float],
    view: View | None = None,
) -> Picture:
    """A case made small: a few slices of the first channel, at most some hundred pixels wide."""
    dimensions, view = truth.ndim, view or View()
    scan = to_bytes(normalise(image[0].float().cpu().numpy()))
    volumes = [torch.from_numpy(scan), *(part.to(torch.uint8).cpu() for part in (truth, predicted, entropy))]
    volumes = [volume[None] if dimensions == 2 else view.turn(volume) for volume in volumes]
    depth = len(volumes[0])
    largest = find_fullest_slice(volumes[1], volumes[2])
    places = choose_slices(depth, MOST_SLICES, largest)
    scan, labels, guess, unsure = (
        shrink(volume[places], MOST_PIXELS[dimensions], smooth=number in (0, 3))
        for number, volume in enumerate(volumes)
    )
    return Picture(
        name, scan, labels, guess, unsure, places=places, depth=depth, shown=places.index(largest),
        aspect=spacing[0] / spacing[1] if dimensions == 2 else view.aspect(spacing), plane=view.plane,
    )  # fmt: skip


def in_colour(picture: Picture, colours: Tensor | None) -> Picture:
    """The same with its colours, (3, H, W) with values up to 1, 255 or more; None leaves it grey."""
    if colours is None:
        return picture
    most = next((limit for limit in (1, 255) if float(colours.max()) <= limit), float(colours.max()))
    values = (255 * colours.float().cpu() / most).round().clamp(0, 255).to(torch.uint8)
    small = [shrink(channel[None], MOST_PIXELS[2], smooth=True) for channel in values]
    return replace(picture, image=np.stack(small, axis=-1))


def to_bytes(values: NDArray[np.float32]) -> Layer:
    return np.round(255 * values).astype(np.uint8)


def find_fullest_slice(truth: Tensor, guess: Tensor) -> int:
    """Where the truth (or else the prediction) is largest."""
    size = (truth if bool((truth > 0).any()) else guess).gt(0).sum(dim=(1, 2))
    return int(size.argmax()) if int(size.max()) else len(truth) // 2


def choose_slices(depth: int, most: int, wanted: int) -> list[int]:
    """Evenly spaced slices; the nearest of them gives way to the wanted one.

    >>> choose_slices(3, 24, 1), choose_slices(100, 3, 60)
    ([0, 1, 2], [0, 60, 99])
    """
    if depth <= most:
        return list(range(depth))
    places = [round(step * (depth - 1) / (most - 1)) for step in range(most)]
    places[min(range(most), key=lambda step: abs(places[step] - wanted))] = wanted
    return places


def shrink(layer: Tensor, most: int, smooth: bool) -> Layer:
    """At most so many pixels a side; label maps keep whole labels."""
    height, width = layer.shape[1:]
    longest = max(height, width)
    if longest > most:
        size = (max(1, round(height * most / longest)), max(1, round(width * most / longest)))
        grey = layer[:, None].float()
        small = functional.adaptive_avg_pool2d(grey, size) if smooth else functional.interpolate(grey, size)
        layer = small[:, 0].round().to(torch.uint8)
    return layer.contiguous().numpy()


def entropy_bytes(probabilities: Tensor) -> Tensor:
    """The entropy of the model's probabilities at each voxel, 0 to 255; (C, *spatial) -> (*spatial)."""
    entropy: Tensor = torch.special.entr(probabilities).sum(dim=0) / math.log(len(probabilities))
    return (255 * entropy.clamp(0, 1)).round().to(torch.uint8)


def count_calibration(probabilities: Tensor, truth: Tensor) -> Tensor:
    """For bins of the foreground's probability: voxels, sum of probabilities, truly foreground."""
    foreground = 1 - probabilities[0].double().flatten()
    index = (foreground * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    hit = (truth > 0).flatten().double()
    columns = [torch.ones_like(hit), foreground, hit]
    return torch.stack([torch.bincount(index, column, NUM_BINS) for column in columns], dim=1)


def choose(pictures: Sequence[Picture], count: int) -> list[Picture]:
    """Best, median and worst by Dice (for three); one alone is the median. Cases without a Dice come last."""
    order = sorted(pictures, key=lambda picture: math.inf if math.isnan(picture.dice) else -picture.dice)
    last, count = len(order) - 1, min(count, len(order))
    if count < 2:
        return [replace(order[last // 2], kind="median")] if count else []
    steps = [round(step * last / (count - 1)) for step in range(count)]
    kinds = {last // 2: "median", (last + 1) // 2: "median", 0: "best", last: "worst"}
    return [replace(order[step], kind=kinds.get(step, "")) for step in steps]


# The panel: the same cases in all runs on the same data, whatever their models


def choose_by_truth(shares: Sequence[float], count: int = PANEL_CASES) -> list[int]:
    """Cases from small to large by their share of foreground; none that is empty.

    >>> choose_by_truth([0.0, 0.4, 0.1, 0.3, 0.2])
    [4, 1]
    """
    order = sorted((index for index, share in enumerate(shares) if share > 0), key=lambda i: (shares[i], i))
    steps = {(2 * step + 1) * len(order) // (2 * count) for step in range(count)}
    return [order[step] for step in sorted(steps) if order]


def make_panel(picture: Picture, features: Tensor | None, view: View | None = None) -> Picture:
    """The slice with most foreground alone, small, with the features (C, *spatial) there."""
    at = picture.shown
    layers: dict[str, Any] = {}
    for layer in LAYERS:
        values = torch.from_numpy(getattr(picture, layer)[at : at + 1])
        smooth = layer in ("image", "uncertainty")
        parts = [
            shrink(part, PANEL_PIXELS, smooth)
            for part in (values.unbind(3) if values.ndim == 4 else [values])
        ]
        layers[layer] = parts[0] if len(parts) == 1 else np.stack(parts, axis=-1)
    place = picture.places[at]
    where = place / max(1, picture.depth - 1)
    seen = None if features is None else draw_features(features, where, view or View())
    return replace(picture, **layers, kind="", places=[place], shown=0, features=seen)


def draw_features(features: Tensor, at: float, view: View) -> Layer:
    """The mean absolute activation over channels, from its smallest to its largest value, (1, H, W).

    at: where the slice of a volume lies, 0 to 1.
    """
    size = features.float().abs().mean(dim=0).cpu()
    if size.ndim == 3:
        size = view.turn(size)
        size = size[round(at * (len(size) - 1))]
    low, high = size.min(), size.max()
    scaled = (255 * (size - low) / (high - low).clamp_min(1e-12)).round().to(torch.uint8)
    return shrink(scaled[None], PANEL_PIXELS, smooth=True)


def save_pictures(
    path: Path, chosen: list[Picture], panel: list[Picture], calibration: Tensor, shares: list[float]
) -> None:
    """Store the pictures, the panel, the calibration and the foreground shares of one client."""
    tensors = {"calibration": calibration, "foreground": torch.tensor(shares, dtype=torch.float64)}
    for prefix, pictures in (("", chosen), (PANEL, panel)):
        for number, picture in enumerate(pictures):
            for layer in (*LAYERS, "features"):
                if getattr(picture, layer) is not None:
                    tensors[f"{prefix}{number}/{layer}"] = torch.from_numpy(getattr(picture, layer))
    metadata = {
        "names": json.dumps([picture.name for picture in chosen]),
        "cases": json.dumps([list_facts(picture) for picture in chosen]),
        "panel": json.dumps([{"name": picture.name, **list_facts(picture)} for picture in panel]),
    }
    save_tensors(path, tensors, metadata)


def list_facts(picture: Picture) -> dict[str, Any]:
    return {key: getattr(picture, key) for key in FACTS}


# Read again


def read_pictures(stored: StoredTensors) -> list[Picture]:
    """The pictures of a client; runs before uncertainty was kept have one slice a case, as floats."""
    names = json.loads(stored.metadata["names"])
    facts: list[dict[str, Any]] = json.loads(stored.metadata.get("cases", "[]")) or [{} for _ in names]
    pictures = []
    for number, (name, entry) in enumerate(zip(names, facts, strict=True)):
        image, truth, prediction = (slices(stored[f"{number}/{layer}"]) for layer in LAYERS[:3])
        unsure = stored.get(f"{number}/{LAYERS[3]}")
        if image.dtype != np.uint8:
            image = to_bytes(normalise(image))
        uncertainty = None if unsure is None else slices(unsure)
        pictures.append(Picture(name, image, truth, prediction, uncertainty, **entry))
    return pictures


def read_panel(stored: StoredTensors) -> list[Picture]:
    """The cases of a client that every run on the same data shows; none in older runs."""
    facts: list[dict[str, Any]] = json.loads(stored.metadata.get("panel", "[]"))
    found = []
    for number, entry in enumerate(facts):
        layers: dict[str, Any] = {layer: slices(stored[f"{PANEL}{number}/{layer}"]) for layer in LAYERS}
        seen = stored.get(f"{PANEL}{number}/features")
        found.append(Picture(**entry, **layers, features=None if seen is None else slices(seen)))
    return found


def slices(layer: Tensor) -> NDArray[Any]:
    """(H, W) or (slices, H, W) -> (slices, H, W); colours (slices, H, W, 3) as they are."""
    values: NDArray[Any] = layer.numpy()
    return values[None] if values.ndim == 2 else values


# overlays.png


def draw_overlays(sources: Mapping[str, Path], target: Path, title: str) -> bool:
    """One row a client, three panels a case; false when no client has pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    loaded = {name: StoredTensors(path) for name, path in sources.items() if path.exists()}
    if not loaded:
        return False
    cases = {name: read_pictures(stored) for name, stored in loaded.items()}
    columns = 3 * max(len(pictures) for pictures in cases.values())
    if not columns:
        return False
    figure = Figure(figsize=(1.5 * columns + 0.9, 1.72 * len(loaded) + 0.7), dpi=110, facecolor="white")
    axes = figure.subplots(len(loaded), columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for row, (client, pictures) in enumerate(cases.items()):
        for number, picture in enumerate(pictures):
            panels = [(picture.name, None), ("truth", picture.truth), ("prediction", picture.prediction)]
            for offset, (heading, layer) in enumerate(panels):
                axis = axes[row][3 * number + offset]
                image = picture.image[picture.shown]
                axis.imshow(image, "gray", vmin=0, vmax=255, interpolation="nearest", aspect=picture.aspect)
                if layer is not None:
                    add_contours(axis, layer[picture.shown], picture.aspect)
                axis.set_title(clipped(heading), fontsize=7, pad=2)
        left = axes[row][0]
        left.text(-0.12, 0.5, clipped(client), transform=left.transAxes, rotation=90, va="center", ha="right")
    figure.suptitle(clipped(title, 100), fontsize=10, x=0.01, ha="left")
    figure.tight_layout(pad=0.4, rect=(0.02, 0, 1, 0.98))
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_bytes(target, content.getvalue())
    return True


def add_contours(axis: object, labels: Layer, aspect: float = 1.0) -> None:
    """Outline and tint every class of a label map."""
    from matplotlib.colors import to_rgba

    tint = np.zeros((*labels.shape, 4))
    for value in np.unique(labels[labels > 0]):
        colour = COLOURS[(int(value) - 1) % len(COLOURS)]
        tint[labels == value] = (*to_rgba(colour)[:3], 0.35)
        axis.contour(labels == value, levels=[0.5], colors=[colour], linewidths=1.0)  # type: ignore[attr-defined]
    axis.imshow(tint, interpolation="nearest", aspect=aspect)  # type: ignore[attr-defined]


def normalise(image: NDArray[np.float32]) -> NDArray[np.float32]:
    low, high = np.percentile(image, (1, 99.5))
    scaled: NDArray[np.float32] = np.clip((image - low) / max(high - low, 1e-6), 0, 1)
    return scaled
