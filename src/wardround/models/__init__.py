"""Networks: built by name, and what every one of them promises.

`build` makes a `Segmenter` from `ModelSettings`; `MODELS` lists our own, one file each. `base` says what a
network promises, `norm` finds norm layers by type, `measure` tells what a network costs and supports.
"""

from wardround.models.base import Output, Segmenter, head_names
from wardround.models.registry import (
    MODELS,
    ModelInfo,
    ModelSettings,
    build,
    check_dimensions,
    is_foreign,
    resolve,
)

__all__ = [
    "MODELS", "ModelInfo", "ModelSettings", "build", "check_dimensions", "is_foreign", "resolve",
    "Output", "Segmenter", "head_names",
]  # fmt: skip
