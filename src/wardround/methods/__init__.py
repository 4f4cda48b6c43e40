"""The table of contents: METHODS (server rules and exchanges) and OBJECTIVES (what clients minimise).

One paper is one file, its server side and its client side together; `base` is FedAvg, which all extend.
Helpers of several methods: `bank` (what clients pool before round 0), `means` (mean images and masks),
`frequency` (amplitude and phase), `proximal` (the pull to the received model). `safcf_readings` belongs to
SAFCF.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.contrastive_objectives import InfoNCE, LocalCL, SimCLR, SwAV
from wardround.losses.loss_function import NAME as LOSS_FUNCTION
from wardround.losses.loss_function import LossFunction
from wardround.losses.objective import CrossEntropy, Dice, DiceBCE, FocalTversky, GeneralisedDice, Objective
from wardround.losses.regions import RegionDiceBCE
from wardround.methods.adaptive_weights import AAW
from wardround.methods.base import Method
from wardround.methods.condist import ConDist
from wardround.methods.ditto import Ditto
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedbn import FedBN
from wardround.methods.fedbr import FedBR
from wardround.methods.fedce import FedCE
from wardround.methods.feddg import FedDG
from wardround.methods.feddyn import FedDyn
from wardround.methods.fedevi import Evidential, FedEvi
from wardround.methods.fedga import FedGA
from wardround.methods.fedlaw import FedLAW
from wardround.methods.fedma import FedMA
from wardround.methods.fedmix import FedMix
from wardround.methods.fedmix_supervision import FedMixSupervision
from wardround.methods.fednova import FedNova
from wardround.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from wardround.methods.fedper import FedPer
from wardround.methods.fedproto import FedProto
from wardround.methods.fedprox import FedProx
from wardround.methods.fedrcl import FedRCL
from wardround.methods.fedsam import FedSAM
from wardround.methods.feduaa import FedUAA, FedUAAEvidential
from wardround.methods.fsf3a import CLSL, FSF3A
from wardround.methods.geometric_median import GeometricMedian
from wardround.methods.harmofl import HarmoFL
from wardround.methods.krum import Krum, MultiKrum
from wardround.methods.ldawa import LDAWA
from wardround.methods.mean_teacher import MeanTeacher
from wardround.methods.moon import MOON
from wardround.methods.pseudo_labels import PseudoLabels
from wardround.methods.references import Centralised, Local
from wardround.methods.safcf import CFSL, SAFCF
from wardround.methods.scaffold import SCAFFOLD
from wardround.methods.trimmed_mean import Median, TrimmedMean
from wardround.plugins import Registry, accept_subclass
from wardround.settings import explain
from wardround.text import suggest

__all__ = ["METHODS", "OBJECTIVES", "build_method", "build_named", "build_objective"]

_METHODS: dict[str, type[Method]] = {
    # References
    "local": Local,
    "centralised": Centralised,
    "fedavg": FedAvg,
    # The four papers
    "fedevi": FedEvi,
    "aaw": AAW,
    "safcf": SAFCF,
    "fsf3a": FSF3A,
    # Local training that drifts less
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "fedsam": FedSAM,
    # Features that agree
    "moon": MOON,
    "fedrcl": FedRCL,
    "fedproto": FedProto,
    "fedbr": FedBR,
    # Images that look alike, or are mixed
    "fedmix": FedMix,
    "feddg": FedDG,
    "harmofl": HarmoFL,
    # Mixed supervision
    "fedmix_supervision": FedMixSupervision,
    # Other weights and means
    "fednova": FedNova,
    "fedma": FedMA,
    "fedlaw": FedLAW,
    "fedce": FedCE,
    "fedga": FedGA,
    "ldawa": LDAWA,
    "feduaa": FedUAA,
    # An optimizer at the server
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    # Against bad updates
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "krum": Krum,
    "multikrum": MultiKrum,
    "geometric_median": GeometricMedian,
    # A model of its own for each client
    "fedbn": FedBN,
    "fedper": FedPer,
    "ditto": Ditto,
}

_OBJECTIVES: dict[str, type[Objective]] = {
    "dice": Dice,
    "dice_bce": DiceBCE,
    "region_dice_bce": RegionDiceBCE,
    "generalised_dice": GeneralisedDice,
    "focal_tversky": FocalTversky,
    "cross_entropy": CrossEntropy,
    "evidential": Evidential,
    "feduaa_evidential": FedUAAEvidential,
    "cfsl": CFSL,
    "clsl": CLSL,
    "infonce": InfoNCE,
    "simclr": SimCLR,
    "local_cl": LocalCL,
    "swav": SwAV,
    # For clients that annotate some of the classes
    "condist": ConDist,
    # For clients with cases that have no label
    "mean_teacher": MeanTeacher,
    "pseudo_labels": PseudoLabels,
}

METHODS = Registry("method", _METHODS, accept_subclass(Method), "a class that extends wardround.Method")
OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    _OBJECTIVES,
    accept_subclass(Objective),  # type: ignore[type-abstract]
    "a class that extends wardround.Objective",
)
OBJECTIVES.give(LossFunction, LOSS_FUNCTION)  # from Python alone, so not in the table of contents


def build_method(config: Config) -> Method:
    """The chosen method with its settings."""
    method: Method = build_named(METHODS, config.method, "method")
    return method


def build_objective(config: Config) -> Objective:
    """The chosen objective, or the method's own when none is named."""
    chosen = dict(config.objective)
    if "name" not in chosen:
        chosen["name"] = build_method(config).objective
    objective: Objective = build_named(OBJECTIVES, chosen, "objective")
    return objective


def build_named(registry: Registry[Any], settings: Mapping[str, Any], where: str) -> Any:
    """An object of the class that settings name (`method: {name: fedprox, mu: 0.1}`), its fields checked."""
    chosen = dict(settings)
    name = chosen.pop("name", "fedavg" if where == "method" else None)
    kind: Any = registry.find(str(name))
    fields = {entry.name for entry in dataclasses.fields(kind)}
    for key in chosen:
        if key not in fields:
            raise ConfigError(
                f"{where}.{key} is not a setting of '{name}'.{suggest(key, fields)} "
                f"It has: {', '.join(sorted(fields)) or 'none'}."
            )
    try:
        return _adapter(kind).validate_python(chosen)
    except ValidationError as error:
        raise ConfigError(explain(error, None, f"{where}.")) from None


@lru_cache(maxsize=256)
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """The validator of a class; making one takes longer than using it."""
    return TypeAdapter(kind)
