"""A run whose network is known by heart: whatever is bright is lesion. Quick and exact, so geometry can be judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from torch import Tensor

from wardround.config import Config
from wardround.data.preparing.record import Preparation
from wardround.losses.objective import Dice
from wardround.methods.fedavg import FedAvg
from wardround.models.base import Output, Segmenter
from wardround.params import Params
from wardround.prediction.predicting import Predictor
from wardround.prediction.trained import TrainedModel


class Threshold(Segmenter):
    """Logit 20 (x - level), of the first channel alone; it counts its passes."""

    def __init__(
        self, dimensions: int = 3, in_channels: int = 1, level: float = 0.5, divisor: int = 1
    ) -> None:
        super().__init__(in_channels=in_channels, num_outputs=1, dimensions=dimensions, divisor=divisor)
        self.level = level
        self.shapes: list[tuple[int, ...]] = []

    def _output(self, x: Tensor) -> Output:
        self.shapes.append(tuple(x.shape))
        return Output(logits=20 * (x[:, :1] - self.level))


def trained(
    dimensions: int = 3,
    *,
    in_channels: int = 1,
    model: Segmenter | None = None,
    labels: dict[str, tuple[int, ...]] | None = None,
    prepare: dict[str, Any] | None = None,
    calibration: dict[str, Any] | None = None,
    evaluate: dict[str, Any] | None = None,
    folder: Path = Path("runs/threshold"),
    **facts: Any,
) -> TrainedModel:
    """The model of a run that never was."""
    labels = labels or {"lesion": (1,)}
    settings = {"orientation": "RAS", "normalise": "minmax", **(prepare or {})}
    preparation = Preparation(
        dimensions=dimensions,
        in_channels=in_channels,
        classes=("background", *labels),
        regions={name: (number,) for number, name in enumerate(labels, start=1)},
        labels=labels,
        prepare=settings,
        **facts,
    )
    network = model or Threshold(dimensions, in_channels)
    return TrainedModel(
        folder=folder,
        config=Config(name="threshold", evaluate=evaluate or {"metrics": ["dice"]}),  # type: ignore[arg-type]
        method=FedAvg(),
        objective=Dice(),
        model=network.eval(),
        params=Params({}),
        preparation=preparation,
        device=torch.device("cpu"),
        calibration=calibration,
    )


def predictor(*args: Any, options: dict[str, Any] | None = None, **facts: Any) -> Predictor:
    return Predictor([trained(*args, **facts)], **(options or {}))


def ball(shape: tuple[int, ...], centre: np.ndarray, radius: float, affine: np.ndarray) -> np.ndarray:
    """A scan of zeros with a bright ball, given in millimetres (in voxels for pictures)."""
    grid = np.stack(np.meshgrid(*(np.arange(side) for side in shape), indexing="ij"), axis=-1)
    here = grid @ affine[: len(centre), : len(shape)].T + affine[: len(centre), 3]
    return (np.linalg.norm(here - centre, axis=-1) <= radius).astype(np.float32)


def save_nifti(path: Path, values: np.ndarray, affine: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path
