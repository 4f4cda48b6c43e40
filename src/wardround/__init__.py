"""wardround: one segmentation model, every hospital.

>>> import wardround as wr
>>> result = wr.run("configs/quickstart.yaml")  # doctest: +SKIP
>>> print(result.table)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wardround.version import __version__

__all__ = [
    "METHODS",
    "OBJECTIVES",
    "Comparison",
    "Config",
    "Prediction",
    "Result",
    "compare",
    "evaluate",
    "load_config",
    "predict",
    "__version__",
    "run",
]

if TYPE_CHECKING:
    from wardround.api import Result, run
    from wardround.comparison import Comparison, compare
    from wardround.config import Config
    from wardround.config_file import load_config
    from wardround.methods import METHODS, OBJECTIVES
    from wardround.prediction.evaluating import evaluate
    from wardround.prediction.predicting import Prediction
    from wardround.prediction.session import predict

_HOMES = {
    "METHODS": "wardround.methods",
    "OBJECTIVES": "wardround.methods",
    "Comparison": "wardround.comparison",
    "Config": "wardround.config",
    "Prediction": "wardround.prediction.predicting",
    "Result": "wardround.api",
    "compare": "wardround.comparison",
    "evaluate": "wardround.prediction.evaluating",
    "load_config": "wardround.config_file",
    "predict": "wardround.prediction.session",
    "run": "wardround.api",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import wardround` stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wardround' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
