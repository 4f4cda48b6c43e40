"""Prediction: from a run's folder and a scan to a mask in the scan's own geometry.

trained      the model of a run, from its folder alone
inputs       files, folders, DICOM series and lists -> scans
windows      a network over a scan too large for it
predicting   one scan: read, prepare, predict, back to its own grid
writing      masks and maps as files
session      many scans into one folder
evaluating   any model on any labelled set
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Prediction", "Predictor", "Preparation", "TrainedModel"]

if TYPE_CHECKING:
    from wardround.data.preparing.record import Preparation
    from wardround.prediction.predicting import Prediction, Predictor
    from wardround.prediction.trained import TrainedModel

_HOMES = {
    "Prediction": "predicting",
    "Predictor": "predicting",
    "Preparation": "trained",
    "TrainedModel": "trained",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: a run that only writes its preparation needs no sliding window."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wardround.prediction' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"wardround.prediction.{_HOMES[name]}"), name)
