"""Predicting: one scan at a time, from its files to a mask on its own grid.

    read -> prepare -> network, window by window -> probabilities and uncertainty -> back to the scan's grid

A mask is the most likely class after the probabilities were brought back, class by class, so that a
resampled scan gets smooth borders and memory holds three volumes whatever the number of classes.

A network that was trained on slices of volumes goes through a volume slice by slice, as they were cut.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.preparing.geometry import Geometry
from wardround.data.preparing.prepare import invert_label, invert_probabilities, prepare_case
from wardround.data.preparing.record import Preparation
from wardround.data.readers.image_files import Volume, read_image
from wardround.data.slices.view import Along, Slices, clip_intensities, restore_axis
from wardround.engine.judging.evaluation import largest_components
from wardround.errors import ConfigError, DataError
from wardround.prediction.inputs import Layout, Scan
from wardround.prediction.trained import TrainedModel
from wardround.prediction.windows import Forward, Watch
from wardround.seeds import derive
from wardround.uncertainty.maps import (
    Accumulator,
    Predicted,
    case_mean,
    case_uncertainty,
    sampling,
    sources,
    structure_uncertainty,
)

log = logging.getLogger(__name__)

Array = NDArray[Any]
DRAWN = ("samples", "dropout")  # kinds of several passes of one model
KINDS = ("auto", "entropy", "evidential", "samples", "dropout", "ensemble")
UNUSUAL = {"q99": "99 %", "q95": "95 %"}  # quantiles a scan is held against, the rarest first
FEW = 20  # validation scans below which a quantile of 95 % is a guess
FAR_SPACING = 1.5  # times the training scans' largest (or smallest) voxel side


@dataclass(frozen=True)
class Prediction:
    """What a model says of one scan, on the scan's own grid.

    mask: uint8, the values the training labels had in their files; classes: value -> name; probabilities:
    (classes, *shape) float32, background first, or None; uncertainty: total, epistemic, aleatoric where the
    model tells them apart, each (*shape) float32 in nats, empty if not asked for; affine: voxel to
    millimetres, None where the file has none; spacing: millimetres a voxel, of the axes longer than one;
    sizes: class -> number of voxels and, where millimetres are known, ml (volumes) or mm2 (pictures);
    doubt: one number for the case, how little mask and probabilities overlap, to rank cases by (it is no
    estimate of Dice); structures: the same by class; mean and highest: of the total map over the scan; kind:
    where the uncertainty comes from; slices: the axis along which a 2D network went through a volume.
    """

    scan: Scan
    mask: NDArray[np.uint8]
    classes: Mapping[int, str]
    probabilities: NDArray[np.float32] | None
    uncertainty: Mapping[str, NDArray[np.float32]]
    affine: NDArray[np.float64] | None
    spacing: tuple[float, ...]
    sizes: Mapping[str, Mapping[str, float]]
    doubt: float
    structures: Mapping[str, float]
    mean: float
    highest: float
    kind: str
    warnings: tuple[str, ...] = ()
    slices: str | None = None

    @property
    def name(self) -> str:
        return self.scan.name

    def facts(self) -> dict[str, Any]:
        """All but the arrays, for predictions.json."""
        return {
            "inputs": [str(file) for file in self.scan.files],
            "shape": list(self.mask.shape),
            "spacing": list(self.spacing) if self.affine is not None else None,
            **({"slices": self.slices} if self.slices else {}),
            "classes": {
                name: {"value": value, **self.sizes[name], "uncertainty": self.structures[name]}
                for value, name in self.classes.items()
                if name in self.sizes
            },
            "uncertainty": {
                "kind": self.kind,
                "case": self.doubt,
                "mean": self.mean,
                "maximum": self.highest,
            },
            "warnings": list(self.warnings),
        }


@dataclass
class Predictor:
    """One or several models that look at scans together.

    uncertainty: which maps to make, None for the numbers alone; samples: passes of kinds that draw, None
    for as many as the run's calibration took; flips: whether the mean over mirror images is taken;
    probabilities: whether they are brought back too; slices: the axis along which a 2D network goes through
    a volume, None for that of its training slices, where the run knows it.
    """

    models: Sequence[TrainedModel]
    uncertainty: str | None = None
    samples: int | None = None
    flips: bool = False
    probabilities: bool = False
    slices: Along | None = None
    say: Callable[[str], None] = log.warning
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("A prediction needs a model.")
        if self.slices is not None and self.preparation.dimensions == 3:
            raise ConfigError("--slices is for 2D networks; this run was trained on volumes. Leave it out.")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples is {self.samples}; give 1 or more.")
        self.kind = self._choose()
        for other in self.models[1:]:
            check_alike(self.models[0], other)
        self._forwards = [
            Forward(
                model.model,
                device=model.device,
                window=model.preparation.window if model.preparation.dimensions == 3 else None,
                autocast=model.autocast,
                say=self.say,
            )
            for model in self.models
        ]

    @property
    def preparation(self) -> Preparation:
        return self.models[0].preparation

    @property
    def layout(self) -> Layout:
        return Layout(self.preparation.in_channels, self.preparation.channels)

    @property
    def temperature(self) -> float:
        """What the run's validation cases say about over-confidence; models together were not asked."""
        known = self.models[0].calibration
        return float(known.get("temperature") or 1.0) if known and len(self.models) == 1 else 1.0

    @property
    def notes(self) -> list[str]:
        """What a user should know beforehand, in sentences."""
        said = [warning for model in self.models for warning in model.warnings]
        if self.samples is not None and self.kind not in DRAWN:
            first = self.models[0]
            drawn = [kind for kind in sources(first.model, first.objective) if kind in DRAWN]
            ask = f" Add --uncertainty {drawn[0]}." if drawn and len(self.models) == 1 else ""
            said.append(
                f"--samples {self.samples} is not used: uncertainty is {self.kind} here, "
                f"which draws nothing.{ask}"
            )
        return said

    def on_test_cases(self) -> tuple[int, float, float] | None:
        """The run's own test cases: how many, mean uncertainty, mean Dice; None where they were not asked so.

        calibration.json has the uncertainty of one plain pass of one model.
        """
        if len(self.models) > 1 or self.kind in DRAWN or self.flips:
            return None
        rows = (self.models[0].calibration or {}).get("cases") or []
        pairs = [(row.get("uncertainty"), row.get("dice")) for row in rows]
        known = [(doubt, dice) for doubt, dice in pairs if doubt is not None and dice is not None]
        if not known:
            return None
        doubt, dice = np.mean(known, axis=0)
        return len(known), float(doubt), float(dice)

    def _choose(self) -> str:
        """The kind of uncertainty asked for, if the model has it."""
        first = self.models[0]
        offered = sources(first.model, first.objective)
        if len(self.models) > 1:
            if self.uncertainty not in (None, "auto", "ensemble"):
                raise ConfigError(
                    f"--uncertainty is {self.uncertainty}, but several models are an ensemble. "
                    "Leave --ensemble out, or ask for ensemble."
                )
            return "ensemble"
        if self.uncertainty == "auto":
            return offered[0]
        if self.uncertainty is None:  # one pass tells these
            return "evidential" if "evidential" in offered else "entropy"
        if self.uncertainty == "ensemble":
            raise ConfigError(
                "--uncertainty ensemble needs further models: --ensemble RUN, or --ensemble all."
            )
        if self.uncertainty not in KINDS:
            raise ConfigError(f"--uncertainty is '{self.uncertainty}'; choose from {', '.join(KINDS)}.")
        if self.uncertainty not in offered:
            raise ConfigError(
                f"--uncertainty is {self.uncertainty}, which this model does not offer. "
                f"It has: {', '.join(offered)}; several models make an ensemble."
            )
        return self.uncertainty

    # One scan

    def __call__(self, scan: Scan, watch: Watch | None = None) -> Prediction:
        """Read, prepare, predict, bring back; a DataError names the scan."""
        image = self.read(scan)
        try:
            slices = self._slices_of(image)
            if slices is not None:
                return self._prediction(scan, image, self._through(slices, scan.name, watch))
            return self._prediction(scan, image, self._see(image, scan.name, watch))
        except DataError as error:
            raise DataError(f"{scan.where}: {error}") from None

    def read(self, scan: Scan) -> Volume:
        """The scan's voxels, if it is of the kind the run was trained on."""
        image = read_image(scan.files)
        wanted, dims = self.preparation, len(image.spatial)
        if image.channels != wanted.in_channels:
            raise DataError(
                f"{scan.where} has {image.channels} channel{'s' if image.channels > 1 else ''}, but this run "
                f"needs {self.layout.expected()}."
            )
        if dims == wanted.dimensions or (dims > wanted.dimensions and self.along is not None):
            return image
        ask = " If those were slices of volumes, say along which axis: --slices S" if dims == 3 else ""
        raise DataError(
            f"{scan.where} is {dims}D, but this run was trained on {wanted.dimensions}D images.{ask}"
        )

    @property
    def along(self) -> Along | None:
        known = self.preparation.settings.slices
        return self.slices or (None if known is None else known.along)

    def _slices_of(self, image: Volume) -> Slices | None:
        """The image slice by slice, turned as the training slices were; None where it is seen as it is."""
        settings = self.preparation.settings
        if self.preparation.dimensions == 3 or self.along is None:
            return None
        if len(image.spatial) == 3:
            cut_off = clip_intensities(image, None if settings.slices is None else settings.slices.clip)
            return Slices.of(cut_off, self.along, settings.orientation)
        if image.thin is None or image.affine is None:
            return None
        one = Slices.of(restore_axis(image), self.along, settings.orientation)
        return one if one.are_reoriented and len(one) == 1 else None

    def _see(self, image: Volume, name: str, watch: Watch | None = None) -> Seen:
        """What the models say of an image, brought back onto its grid."""
        prepared = prepare_case(image, None, self.preparation.settings, self.preparation.labels)
        geometry = prepared.geometry
        predicted = self.look(prepared.image, name, watch)
        del prepared
        label = mask_on_grid(predicted, geometry)
        maps: dict[str, NDArray[np.float32]] = {}
        if self.uncertainty is not None:
            for part in ("total", "epistemic", "aleatoric"):
                found: Tensor | None = getattr(predicted, part)
                if found is not None:
                    maps[part] = invert_probabilities(found[None], geometry)[0]
        probabilities = (
            invert_probabilities(predicted.probabilities, geometry) if self.probabilities else None
        )
        unlike = tuple(unlike_training(self.models[0].calibration, predicted))
        return Seen(predicted, label, maps, probabilities, unlike, tuple(self._far(image, geometry)))

    def _through(self, slices: Slices, name: str, watch: Watch | None) -> Seen:
        """A volume by a 2D network: each slice by itself, then all of them as one scan."""
        seen: list[Seen] = []
        for number, plane in enumerate(slices):
            seen.append(self._see(plane, f"{name}/{number}" if len(slices) > 1 else name))
            if watch is not None:
                watch(number + 1, len(slices))
        return as_volume(seen, slices)

    def _prediction(self, scan: Scan, image: Volume, seen: Seen) -> Prediction:
        predicted, label = seen.predicted, seen.label
        if self.models[0].config.evaluate.postprocess == "largest_component":
            label = largest_components(label)
        values = np.asarray(self.preparation.values)
        if values.max() > 255:
            raise DataError(
                f"class value {values.max()} does not fit a mask of 8 bit; train with other labels."
            )
        structures = structure_uncertainty(predicted)
        sizes = measured(label, image, self.preparation)
        empty = (f"no voxel is '{name}'" for name, size in sizes.items() if not size["voxels"])
        classes = {int(values[number]): name for number, name in self.preparation.numbered}
        return Prediction(
            scan=scan,
            mask=values.astype(np.uint8)[label],
            classes=classes,
            probabilities=seen.probabilities,
            uncertainty=seen.maps,
            affine=image.affine,
            spacing=image.spacing,
            sizes=sizes,
            doubt=case_uncertainty(predicted),
            structures={name: structures.get(number, 0.0) for number, name in self.preparation.numbered},
            mean=float(predicted.total.mean(dtype=torch.float64)),
            highest=float(predicted.total.max()),
            kind=predicted.kind,
            warnings=(*seen.unlike, *seen.far, *empty),
            slices=self.along if len(image.spatial) > self.preparation.dimensions else None,
        )

    def look(self, image: Tensor, name: str = "", watch: Watch | None = None) -> Predicted:
        """What the models say of a prepared scan (C, *spatial), all passes together."""
        objective = self.models[0].objective
        several = None if self.kind in ("entropy", "evidential") else self.kind
        together = Accumulator(objective, temperature=self.temperature, kind=several)
        draws = self.samples or self.models[0].config.evaluate.passes
        passes = draws if self.kind in DRAWN else 1
        mirrored = list(flipped_axes(image.ndim - 1)) if self.flips else [()]
        total = len(self.models) * passes * len(mirrored)
        done = 0
        for model, forward in zip(self.models, self._forwards, strict=True):
            with drawing(model.config.seed, name), sampling(model.model, self.kind):
                for _ in range(passes):
                    logits: Tensor | None = None
                    for axes in mirrored:
                        shown = part_of(watch, done, total)
                        turned = torch.flip(image, axes).contiguous() if axes else image
                        found = forward(turned, shown)
                        found = torch.flip(found, axes) if axes else found
                        logits = found if logits is None else logits.add_(found)
                        done += 1
                    assert logits is not None
                    together.add(logits.div_(len(mirrored)) if len(mirrored) > 1 else logits)
        return together.result()

    def _far(self, image: Volume, geometry: Mapping[str, Any]) -> Iterator[str]:
        """A sentence where voxels are of another size than those of the training scans."""
        seen = self.preparation.spacing
        if seen is None or image.affine is None:
            return
        here = [image.spacing[axis] for axis in Geometry.from_dict(geometry).order]
        for side, low, high in zip(here, *seen, strict=True):
            if not low / FAR_SPACING <= side <= high * FAR_SPACING:
                now, least, most = (" x ".join(f"{v:.3g}" for v in sides) for sides in (here, *seen))
                yield f"voxels of {now} mm are far from those of the training scans ({least} to {most} mm)"
                return


@dataclass(frozen=True)
class Seen:
    """What the models say of an image: on the prepared grid, and the classes and maps on its own.

    unlike, far: warnings of scans unlike those of the training, and of voxels of another size.
    """

    predicted: Predicted
    label: NDArray[np.uint8]
    maps: Mapping[str, NDArray[np.float32]]
    probabilities: NDArray[np.float32] | None
    unlike: tuple[str, ...]
    far: tuple[str, ...]


def as_volume(seen: Sequence[Seen], slices: Slices) -> Seen:
    """Slices as one volume; what lies on the prepared grid is a row of voxels, for its sums."""

    def joined(planes: Sequence[Array]) -> Array:
        whole: Array = slices.join([plane[None] for plane in planes])[0]
        return whole

    def row(name: str) -> Tensor | None:
        parts = [getattr(one.predicted, name) for one in seen]
        if parts[0] is None:
            return None
        return torch.cat([part.flatten(1 if name == "probabilities" else 0).cpu() for part in parts], dim=-1)

    fields = {name: row(name) for name in ("probabilities", "label", "total", "epistemic", "aleatoric")}
    maps = {name: joined([one.maps[name] for one in seen]) for name in seen[0].maps}
    kept = [one.probabilities for one in seen if one.probabilities is not None]
    return Seen(
        Predicted(**fields, kind=seen[0].predicted.kind),  # type: ignore[arg-type]
        joined([one.label for one in seen]),
        maps,
        slices.join(kept) if kept else None,
        tuple(most_say(seen)),
        seen[0].far,
    )


def most_say(seen: Sequence[Seen]) -> Iterator[str]:
    """Warnings that more than half of the slices with something on them have in common, in kind."""
    if len(seen) == 1:
        yield from seen[0].unlike
        return
    shown = [one for one in seen if one.label.any()]
    kinds: dict[str, list[str]] = {}
    for one in shown:
        for sentence in one.unlike:
            kinds.setdefault(re.sub(r"[\d.]+", "#", sentence), []).append(sentence)
    for said in kinds.values():
        if 2 * len(said) > len(shown):
            yield f"{len(said)} of {len(shown)} slices with something on them, such as one where {said[0]}"


# Several models


def check_alike(first: TrainedModel, other: TrainedModel) -> None:
    """Models look at a scan together only if they see and say the same kind of thing."""
    one, two = first.preparation, other.preparation
    for what in ("dimensions", "in_channels", "classes", "values", "settings"):
        if getattr(one, what) != getattr(two, what):
            told = {"settings": "prepare", "in_channels": "channels", "values": "labels"}.get(what, what)
            raise ConfigError(
                f"{other.folder} cannot join {first.folder}: their {told} differ. "
                "An ensemble needs runs on data prepared alike."
            )
    if first.objective != other.objective:
        raise ConfigError(
            f"{other.folder} cannot join {first.folder}: their objectives differ "
            f"({first.objective.title} and {other.objective.title})."
        )


@contextmanager
def drawing(seed: int, name: str) -> Iterator[None]:
    """Samples of a scan are the same every time, and the caller's random stream is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, "predict", name))
        yield


def flipped_axes(dimensions: int) -> Iterator[tuple[int, ...]]:
    """Every set of mirrored axes of (C, *spatial), none first."""
    axes = range(1, dimensions + 1)
    yield from chain.from_iterable(combinations(axes, count) for count in range(dimensions + 1))


def part_of(watch: Watch | None, done: int, total: int) -> Watch | None:
    """Progress of one pass as a part of all passes over a scan."""
    if watch is None:
        return None
    return lambda now, windows: watch(done * windows + now, total * windows)


# Back on the scan's grid


def mask_on_grid(predicted: Predicted, geometry: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Classes (*shape) on the scan's own grid."""
    way = Geometry.from_dict(geometry)
    if [stop - start for start, stop in way.box] == list(way.resampled):
        return invert_label(predicted.label, geometry)
    best: NDArray[np.float32] | None = None
    mask: NDArray[np.uint8] = np.zeros(way.shape, dtype=np.uint8)
    for number in range(len(predicted.probabilities)):
        share = invert_probabilities(predicted.probabilities[number : number + 1], geometry)[0]
        if best is None:
            best = share
            continue
        wins = share > best
        mask[wins] = number
        np.maximum(best, share, out=best)
    return mask


def measured(
    label: NDArray[np.uint8], image: Volume, preparation: Preparation
) -> dict[str, dict[str, float]]:
    """Voxels of each class, and its volume in ml or its area in mm2 where millimetres are known."""
    counts = np.bincount(label.reshape(-1), minlength=preparation.num_classes)
    sizes: dict[str, dict[str, float]] = {}
    for number, name in preparation.numbered:
        sizes[name] = {"voxels": int(counts[number])}
        if image.affine is not None:
            dims = len(image.spatial)
            unit, scale = ("ml", 1000.0) if dims == 3 else ("mm2", 1.0)
            sizes[name][unit] = float(counts[number]) * voxel_size(image) / scale
    return sizes


def voxel_size(image: Volume) -> float:
    """mm3 (mm2 of a picture) one voxel takes up, whatever the angles between its sides."""
    assert image.affine is not None
    axes = [axis for axis in range(3) if axis != image.thin][: len(image.spatial)]
    sides = image.affine[:3, axes]
    return float(np.sqrt(np.linalg.det(sides.T @ sides)))


# Beyond what the run has seen


def unlike_training(calibration: Mapping[str, Any] | None, predicted: Predicted) -> Iterator[str]:
    """A sentence for each number of the case that lies beyond nearly all of the run's validation scans.

    Of few scans no quantile is known: a number must lie beyond all of them, and how often that happens by
    chance is said too (of N + 1 scans alike, each is as likely as any other to be the highest).
    """
    known = ((calibration or {}).get("quantiles") or {}).get(predicted.kind) or {}
    here = {"case": case_uncertainty(predicted), "epistemic": case_mean(predicted, "epistemic")}
    for name, value in here.items():
        limits = known.get(name)
        if value is None or not isinstance(limits, Mapping):
            continue
        count = limits.get("count")
        few = count if isinstance(count, int) and count < FEW else None
        for mark in UNUSUAL if few is None else ("max",):
            limit = limits.get(mark)
            if isinstance(limit, int | float) and value > limit:
                what = "uncertainty" if name == "case" else f"{name} uncertainty"
                said = "{} {} lies beyond {}".format(what, *told_apart(value, limit))
                scans = "validation scans" if count is None else f"{count} validation scans"
                if few is not None:
                    yield f"{said}, and so beyond all {scans}; by chance one scan in {few + 1} does"
                else:
                    stay = f"which {UNUSUAL[mark]} of their {scans} stay below"
                    yield f"unlike the training hospitals: {said}, {stay}"
                break


def told_apart(one: float, other: float) -> tuple[str, str]:
    """Two unequal numbers with as many digits as tell them apart, three or more.

    >>> told_apart(0.17812, 0.17784)
    ('0.1781', '0.1778')
    """
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(3, 18))
    return next((a, b) for a, b in texts if a != b)
