"""A metric of one's own: a function of two boolean masks and the voxel spacing; higher is better, 1 is best.

For anything else (a distance, a unit, lower is better) make a `wardround.Metric`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def volume_similarity(
    prediction: NDArray[np.bool_], truth: NDArray[np.bool_], spacing: Sequence[float]
) -> float:
    """1 - |V_p - V_t| / (V_p + V_t) (Taha and Hanbury, BMC Medical Imaging 2015)."""
    predicted, true = int(prediction.sum()), int(truth.sum())
    return 1.0 if predicted + true == 0 else 1 - abs(predicted - true) / (predicted + true)
