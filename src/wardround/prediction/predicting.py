"""Predicting: one scan at a time, from its files to a mask on its own grid.

    read -> prepare -> network, window by window -> probabilities and uncertainty -> back to the scan's grid

The mask is the most likely class after resampling probabilities to the scan's grid class by class, so that
borders are smooth and memory holds three volumes whatever the number of classes.

A network trained on slices of volumes goes through a volume slice by slice, cut as in training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wardround.data.channels import NOT_USED, check_channel_names, find_places
from wardround.data.listing import Places
from wardround.data.preparing.geometry import Geometry, invert_probabilities
from wardround.data.preparing.prepare import prepare_case
from wardround.data.preparing.record import Preparation
from wardround.data.readers.common import join_names
from wardround.data.readers.image_files import Volume, read_image
from wardround.data.slices.cutting import Along, Slices, clip_intensities, restore_axis
from wardround.engine.judging.postprocessing import postprocess_labels
from wardround.errors import ConfigError, DataError
from wardround.prediction.inputs import Layout, Scan
from wardround.prediction.results import (
    GridPrediction,
    Prediction,
    join_slices,
    measure_classes,
    restore_mask,
)
from wardround.prediction.trained import TrainedModel
from wardround.prediction.windows import Forward, Watch
from wardround.seeds import derive
from wardround.training.inference import check_averaging, evaluated_as
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

DRAWN = ("samples", "dropout")  # kinds of several passes of one model
KINDS = ("auto", "entropy", "evidential", "samples", "dropout", "ensemble")


@dataclass
class Predictor:
    """One or several models that predict scans together.

    uncertainty: which maps to make, None for the numbers alone; samples: passes of kinds that sample, None
    for as many as the run's calibration used; tta: average over mirror images, None for as the run was
    tested; probabilities: return them too; channels: what the files hold, in their order, where that is not
    all of the run's channels in theirs; slices: the axis along which a 2D network goes through a volume,
    None for that of its training slices, if the run records it.
    """

    models: Sequence[TrainedModel]
    uncertainty: str | None = None
    samples: int | None = None
    tta: bool | None = None
    probabilities: bool = False
    slices: Along | None = None
    channels: Sequence[str] = ()
    say: Callable[[str], None] = log.warning
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("A prediction needs a model.")
        if self.slices is not None and self.preparation.dimensions == 3:
            raise ConfigError("--slices is for 2D networks; this run was trained on volumes. Leave it out.")
        if self.samples is not None and self.samples < 1:
            raise ConfigError(f"--samples is {self.samples}; give 1 or more.")
        if self.channels:
            check_channel_names(self.preparation.channels, {"--channels": self.channels})
        self.tta = self.models[0].config.evaluate.tta if self.tta is None else self.tta
        self.kind = self._choose_kind()
        if self.tta:
            for model in self.models:
                check_averaging(model.objective, model.config.augmentation.mirror_axes)
        for other in self.models[1:]:
            check_compatible(self.models[0], other)
        self._forwards = [
            Forward(m.model, device=m.device, window=m.window, autocast=m.autocast, say=self.say)
            for m in self.models
        ]

    @property
    def preparation(self) -> Preparation:
        return self.models[0].preparation

    @property
    def layout(self) -> Layout:
        known = self.preparation
        return Layout(known.in_channels, known.channels, all(m.preparation.lacking for m in self.models))

    @property
    def temperature(self) -> float:
        """Fitted on the run's validation cases; 1 for an ensemble, which was not calibrated."""
        known = self.models[0].calibration
        return float(known.get("temperature") or 1.0) if known and len(self.models) == 1 else 1.0

    @property
    def notes(self) -> list[str]:
        """Sentences for the user."""
        said = [warning for model in self.models for warning in model.warnings]
        if self.samples is not None and self.kind not in DRAWN:
            first = self.models[0]
            drawn = [kind for kind in sources(first.model, first.objective) if kind in DRAWN]
            ask = f" Add --uncertainty {drawn[0]}." if drawn and len(self.models) == 1 else ""
            said.append(
                f"--samples {self.samples} is not used: uncertainty is {self.kind} here, "
                f"which does not sample.{ask}"
            )
        return said

    def summarise_test_cases(self) -> tuple[int, float, float] | None:
        """The run's own test cases: how many, mean uncertainty, mean Dice.

        None unless this predictor makes one pass of one model, as calibration.json does.
        """
        as_tested = self.tta == self.models[0].config.evaluate.tta
        if len(self.models) > 1 or self.kind in DRAWN or not as_tested:
            return None
        rows = (self.models[0].calibration or {}).get("cases") or []
        pairs = [(row.get("uncertainty"), row.get("dice")) for row in rows]
        known = [(doubt, dice) for doubt, dice in pairs if doubt is not None and dice is not None]
        if not known:
            return None
        doubt, dice = np.mean(known, axis=0)
        return len(known), float(doubt), float(dice)

    def _choose_kind(self) -> str:
        """The requested kind of uncertainty, if the model offers it."""
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
        if self.uncertainty is None:  # one pass gives these
            return "evidential" if "evidential" in offered else "entropy"
        if self.uncertainty == "ensemble":
            raise ConfigError("--uncertainty ensemble needs more models: --ensemble RUN, or --ensemble all.")
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
        """Read, prepare, predict, restore the scan's grid; a DataError names the scan."""
        image, places = self.read(scan)
        try:
            slices = self._cut_slices(image)
            if slices is not None:
                return self._finish(
                    scan, image, places, self._predict_slices(slices, places, scan.name, watch)
                )
            return self._finish(scan, image, places, self._predict_image(image, places, scan.name, watch))
        except DataError as error:
            raise DataError(f"{scan.where}: {error}") from None

    def read(self, scan: Scan) -> tuple[Volume, Places]:
        """The scan's voxels and the places of its channels, if these and dimensions fit the training."""
        image = read_image(scan.files)
        wanted, dims = self.preparation, len(image.spatial)
        places = self._find_places(scan, image)
        if dims == wanted.dimensions or (dims > wanted.dimensions and self.along is not None):
            return image, places
        ask = " If those were slices of volumes, give their axis: --slices S" if dims == 3 else ""
        raise DataError(
            f"{scan.where} is {dims}D, but this run was trained on {wanted.dimensions}D images.{ask}"
        )

    def _find_places(self, scan: Scan, image: Volume) -> Places:
        """Where the run's channels are in the scan; one that lacks some is refused where training had all."""
        wanted, layout = self.preparation, self.layout
        places, number = scan.places, sum(place >= 0 for place in scan.places) or wanted.in_channels
        if self.channels:
            places, number = find_places(self.channels, wanted.channels), len(self.channels)
        elif scan.is_guess and image.channels == wanted.in_channels:
            places, number = (), wanted.in_channels
        is_other = scan.num_channels not in (0, image.channels)
        if image.channels < number or (image.channels > number and not scan.places) or is_other:
            said, ask = f"this run needs {layout.describe()}", ""
            if is_other:
                said = f"federation.yaml names {scan.num_channels} (channels, channels_of)"
            elif self.channels:
                said = f"--channels names {number} ({', '.join(self.channels)})"
                ask = f" Name all that it holds, in their order, '{NOT_USED}' for one that is not used."
            elif layout.lacking and wanted.channels:
                ask = f" If it lacks some, say what it holds: --channels {','.join(wanted.channels[:-1])}"
                ask += " (of evaluate: channels_of in a federation.yaml)"
            raise DataError(
                f"{scan.where} has {image.channels} channel{'s' if image.channels > 1 else ''}, but "
                f"{said}.{ask}"
            )
        absent = self._name_absent(places)
        if absent and not layout.lacking:
            raise DataError(
                f"{scan.where} lacks {join_names(absent)}, and this run was trained where every scan had all "
                "channels, so that its mask would be worth little. Train with augmentation.drop_channels."
            )
        return places

    def _name_absent(self, places: Places) -> list[str]:
        names = self.preparation.channels or [f"channel {n}" for n in range(self.preparation.in_channels)]
        return [name for name, place in zip(names, places, strict=True) if place < 0] if places else []

    @property
    def along(self) -> Along | None:
        known = self.preparation.settings.slices
        return self.slices or (None if known is None else known.along)

    def _cut_slices(self, image: Volume) -> Slices | None:
        """The image as slices, reoriented like the training slices; None if it is predicted as it is."""
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

    def _predict_image(
        self, image: Volume, places: Places, name: str, watch: Watch | None = None
    ) -> GridPrediction:
        """The models' prediction of an image, on its own grid."""
        known = self.preparation
        prepared = prepare_case(image, None, known.settings, known.labels, places=places)
        geometry = prepared.geometry
        predicted = self.infer(prepared.image, name, watch)
        del prepared
        label = restore_mask(predicted, geometry)
        maps: dict[str, NDArray[np.float32]] = {}
        if self.uncertainty is not None:
            for part in ("total", "epistemic", "aleatoric"):
                found: Tensor | None = getattr(predicted, part)
                if found is not None:
                    maps[part] = invert_probabilities(found[None], geometry)[0]
        shares = invert_probabilities(predicted.probabilities, geometry) if self.probabilities else None
        unlike = tuple(warn_of_uncertainty(self.models[0].calibration, predicted))
        far = tuple(warn_of_spacing(self.preparation.spacing, image, geometry))
        return GridPrediction(predicted, label, maps, shares, unlike, far)

    def _predict_slices(
        self, slices: Slices, places: Places, name: str, watch: Watch | None
    ) -> GridPrediction:
        """A volume by a 2D network: slice by slice, then joined."""
        seen: list[GridPrediction] = []
        for number, plane in enumerate(slices):
            one = f"{name}/{number}" if len(slices) > 1 else name
            seen.append(self._predict_image(plane, places, one))
            if watch is not None:
                watch(number + 1, len(slices))
        return join_slices(seen, slices)

    def _finish(self, scan: Scan, image: Volume, places: Places, seen: GridPrediction) -> Prediction:
        predicted = seen.predicted
        label = postprocess_labels(seen.label, self.models[0].config.evaluate.postprocess)
        values = np.asarray(self.preparation.values)
        top = values.max()
        if top > 255:
            raise DataError(f"class value {top} does not fit an 8-bit mask; train with other label values.")
        structures = structure_uncertainty(predicted)
        sizes = measure_classes(label, image, self.preparation)
        empty = (f"no voxel is '{name}'" for name, size in sizes.items() if not size["voxels"])
        absent = self._name_absent(places)
        lacks = [f"the scan lacks {join_names(absent, 8)}; the mask was made without"] if absent else []
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
            warnings=(*lacks, *seen.unlike, *seen.far, *empty),
            absent=tuple(absent),
            slices=self.along if len(image.spatial) > self.preparation.dimensions else None,
        )

    def infer(self, image: Tensor, name: str = "", watch: Watch | None = None) -> Predicted:
        """Prediction of a prepared scan (C, *spatial), all passes combined."""
        objective = self.models[0].objective
        several = None if self.kind in ("entropy", "evidential") else self.kind
        together = Accumulator(objective, temperature=self.temperature, kind=several)
        draws = self.samples or self.models[0].config.evaluate.passes
        passes = draws if self.kind in DRAWN else 1
        total = len(self.models) * passes
        done = 0
        for model, forward in zip(self.models, self._forwards, strict=True):
            with (
                seed_samples(model.config.seed, name),
                sampling(model.model, self.kind),
                evaluated_as(
                    model.model, objective, tta=bool(self.tta), axes=model.config.augmentation.mirror_axes
                ),
            ):
                for _ in range(passes):
                    together.add(forward(image, scale_progress(watch, done, total)))
                    done += 1
        return together.result()


# Several models


def check_compatible(first: TrainedModel, other: TrainedModel) -> None:
    """Refuse an ensemble of models with different inputs, classes or objectives."""
    one, two = first.preparation, other.preparation
    for what in ("dimensions", "in_channels", "classes", "values", "settings"):
        if getattr(one, what) != getattr(two, what):
            name = {"settings": "prepare", "in_channels": "channels", "values": "labels"}.get(what, what)
            raise ConfigError(
                f"{other.folder} cannot join {first.folder}: their {name} differ. "
                "An ensemble needs runs on data prepared in the same way."
            )
    if first.objective != other.objective:
        raise ConfigError(
            f"{other.folder} cannot join {first.folder}: their objectives differ "
            f"({first.objective.title} and {other.objective.title})."
        )


@contextmanager
def seed_samples(seed: int, name: str) -> Iterator[None]:
    """The samples of a scan are the same every time; the caller's random stream is untouched."""
    with torch.random.fork_rng():
        torch.manual_seed(derive(seed, "predict", name))
        yield


def scale_progress(watch: Watch | None, done: int, total: int) -> Watch | None:
    """Progress of one pass as a part of all passes over a scan."""
    if watch is None:
        return None
    return lambda now, windows: watch(done * windows + now, total * windows)


# Warnings about scans unlike those the run was trained and validated on


UNUSUAL = {"q99": "99 %", "q95": "95 %"}  # quantiles a scan is compared with, the rarest first
FEW = 20  # validation scans below which a quantile of 95 % is a guess
FAR_SPACING = 1.5  # times the training scans' largest (or smallest) voxel side


def warn_of_uncertainty(calibration: Mapping[str, Any] | None, predicted: Predicted) -> Iterator[str]:
    """A warning for each uncertainty of the case that exceeds nearly all of the run's validation scans.

    Few scans give no quantile: a value must then exceed all of them, and the warning says how often that
    happens by chance (of N + 1 scans alike, each is as likely as any other to be the highest).
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
                said = "{} {} lies beyond {}".format(what, *format_apart(value, limit))
                scans = "validation scans" if count is None else f"{count} validation scans"
                if few is not None:
                    yield f"{said}, and so beyond all {scans}; by chance one scan in {few + 1} does"
                else:
                    stay = f"which {UNUSUAL[mark]} of their {scans} stay below"
                    yield f"unlike the training hospitals: {said}, {stay}"
                break


def warn_of_spacing(
    seen: tuple[Sequence[float], Sequence[float]] | None, image: Volume, geometry: Mapping[str, Any]
) -> Iterator[str]:
    """A warning if voxels are far smaller or larger than those of the training scans (seen: their range)."""
    if seen is None or image.affine is None:
        return
    here = [image.spacing[axis] for axis in Geometry.from_dict(geometry).order]
    for side, low, high in zip(here, *seen, strict=True):
        if not low / FAR_SPACING <= side <= high * FAR_SPACING:
            now, least, most = (" x ".join(f"{v:.3g}" for v in sides) for sides in (here, *seen))
            yield f"voxels of {now} mm are far from those of the training scans ({least} to {most} mm)"
            return


def format_apart(one: float, other: float) -> tuple[str, str]:
    """Two unequal numbers with three digits, or as many as show the difference.

    >>> format_apart(0.17812, 0.17784)
    ('0.1781', '0.1778')
    """
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(3, 18))
    return next((a, b) for a, b in texts if a != b)
