"""The network of a run without numbers: its tensors' names and shapes, before any data are read."""

from __future__ import annotations

from wardround.config import Config
from wardround.data.phantom.cases import PhantomSettings
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.models import MODELS, is_foreign
from wardround.models.base import Segmenter
from wardround.models.measure import sketch
from wardround.plugins import NotInstalled


def sketch_model(config: Config, objective: Objective) -> Segmenter | None:
    """The network without numbers, for checks before any data are read.

    None for one that cannot be built yet: its module lies elsewhere, or it fits only data we do not know.
    """
    phantom = config.data.phantom if config.data.is_phantom else PhantomSettings()
    outputs = objective.num_outputs(phantom.num_classes)
    known, info = config.data.dimensions, MODELS.get(config.model.name)
    guesses = (known,) if known is not None else info.dimensions if info is not None else (2, 3)
    for guess in guesses:
        try:
            return sketch(config.model, in_channels=phantom.channels, num_outputs=outputs, dimensions=guess)
        except NotInstalled:
            return None
        except ConfigError:
            if config.data.is_phantom or not is_foreign(config.model):
                raise
    return None
