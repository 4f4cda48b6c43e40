"""The parts that a bundle's inference.json names: MONAI builds them, `wardround.prediction` does the work.

    datalist -> preprocessing -> inferer(network) -> postprocessing -> masks

So a bundle's mask is that of `wardround predict`, voxel by voxel, and MONAI's tools find every part under
its usual name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.data.preparing.prepare import prepare_case
from wardround.engine.judging.postprocessing import postprocess_labels
from wardround.errors import DataError
from wardround.exporting.package import network_of, opened
from wardround.files import write_bytes
from wardround.models.base import Segmenter
from wardround.prediction.inputs import find_scans
from wardround.prediction.predicting import Predictor
from wardround.prediction.results import restore_mask
from wardround.prediction.trained import TrainedModel
from wardround.prediction.windows import Forward
from wardround.prediction.writing import encode
from wardround.training.inference import evaluated_as
from wardround.uncertainty.maps import Accumulator

log = logging.getLogger(__name__)

Item = dict[str, Any]


def network_def(model: str) -> Segmenter:
    """The network that model.json describes, without weights."""
    return network_of(json.loads(Path(model).read_text(encoding="utf-8")))


def trained(model: str, weights: str, device: object = "cpu") -> TrainedModel:
    """The network with its weights, and all that prediction needs beside it."""
    return opened(model, weights, str(device))


def datalist(inputs: str | Sequence[str], model: TrainedModel, workplace: str) -> list[Item]:
    """Scans among files, folders and lists, as `wardround predict` finds them; a bad one is a DataError.

    workplace: a folder for DICOM series brought to NIfTI.
    """
    given = [inputs] if isinstance(inputs, str) else list(inputs)
    folder = Path(workplace)
    folder.mkdir(parents=True, exist_ok=True)
    found = find_scans(given, Predictor([model]).layout, folder)
    if found.problems:
        raise DataError(found.problems[0].reason)
    return [{"scan": scan} for scan in found.scans]


class ReadAndPrepare:
    """{"scan"} -> also "image" (C, *spatial) as the network saw images in training, and "geometry"."""

    def __init__(self, model: TrainedModel) -> None:
        self.predictor = Predictor([model])

    def __call__(self, item: Item) -> Item:
        preparation = self.predictor.preparation
        volume, places = self.predictor.read(item["scan"])
        if len(volume.spatial) != preparation.dimensions:
            raise DataError(
                f"{item['scan'].where} is a volume, and this bundle takes slices. Cut it with "
                "`wardround data slices`, or give the run's folder to `wardround predict`."
            )
        prepared = prepare_case(volume, None, preparation.settings, preparation.labels, places=places)
        return {**item, "image": prepared.image, "geometry": prepared.geometry}


class WindowInferer:
    """Logits of prepared images (B, C, *spatial), by windows and over mirror images as the run was tested."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model

    def __call__(self, inputs: Tensor, network: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        model = self.model
        forward = Forward(network, device=model.device, window=model.window, autocast=model.autocast)
        axes = model.config.augmentation.mirror_axes
        with evaluated_as(network, model.objective, tta=model.config.evaluate.tta, axes=axes):
            return torch.stack([forward(image.cpu()) for image in inputs])


class MaskOnOwnGrid:
    """{"logits", "geometry"} -> also "pred": the mask on the scan's own grid, with the labels' values, and
    their "names"."""

    def __init__(self, model: TrainedModel) -> None:
        self.predictor = Predictor([model])

    def __call__(self, item: Item) -> Item:
        model, preparation = self.predictor.models[0], self.predictor.preparation
        together = Accumulator(model.objective, temperature=self.predictor.temperature)
        together.add(item["logits"])
        label = restore_mask(together.result(), item["geometry"])
        label = postprocess_labels(label, model.config.evaluate.postprocess)
        values = np.asarray(preparation.values)
        names = {int(values[number]): name for number, name in preparation.numbered}
        return {**item, "pred": values.astype(np.uint8)[label], "names": names}


class SaveMask:
    """{"pred", "names", "geometry", "scan"} -> a file in the folder: the scan's name, format and geometry."""

    def __init__(self, output_dir: str) -> None:
        self.folder = Path(output_dir)

    def __call__(self, item: Item) -> Item:
        scan = item["scan"]
        path = self.folder / scan.name
        if path.resolve() in {file.resolve() for file in scan.files}:
            raise DataError(f"{scan.where}: its mask would replace the scan itself; choose another folder.")
        found = item["geometry"]["affine"]
        affine = None if found is None else np.asarray(found)
        write_bytes(path, encode(item["pred"], scan, affine, names=item["names"]))
        log.info("%s -> %s", scan.where, path)
        return {**item, "saved": str(path)}


@dataclass
class Evaluator:
    """All scans, one after the other; `run` is what MONAI calls."""

    dataset: Iterable[Mapping[str, Any]]
    network: torch.nn.Module
    inferer: Callable[..., Tensor]
    postprocessing: Callable[[Item], Item]

    def run(self) -> list[str]:
        """The files that were written."""
        saved = []
        for item in self.dataset:
            logits = self.inferer(item["image"][None], self.network)[0]
            saved.append(str(self.postprocessing({**item, "logits": logits})["saved"]))
        return saved
