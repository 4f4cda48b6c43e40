"""The table of contents: METHODS (server rules and exchanges) and OBJECTIVES (what clients minimise)."""

from wardround.losses.contrastive_objectives import InfoNCE, LocalCL, SimCLR, SwAV
from wardround.losses.objective import (
    CrossEntropy,
    Dice,
    DiceBCE,
    FocalTversky,
    GeneralisedDice,
    Objective,
)
from wardround.methods.adaptive_weights import AAW
from wardround.methods.base import Method
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedevi import Evidential, FedEvi
from wardround.methods.fsf3a import CLSL, FSF3A
from wardround.methods.references import Centralised, Local
from wardround.methods.safcf import CFSL, SAFCF

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "centralised": Centralised,
    "fedavg": FedAvg,
    "fedevi": FedEvi,
    "aaw": AAW,
    "safcf": SAFCF,
    "fsf3a": FSF3A,
}

OBJECTIVES: dict[str, type[Objective]] = {
    "dice": Dice,
    "dice_bce": DiceBCE,
    "generalised_dice": GeneralisedDice,
    "focal_tversky": FocalTversky,
    "cross_entropy": CrossEntropy,
    "evidential": Evidential,
    "cfsl": CFSL,
    "clsl": CLSL,
    "infonce": InfoNCE,
    "simclr": SimCLR,
    "local_cl": LocalCL,
    "swav": SwAV,
}
