"""The table of contents: METHODS (server rules and exchanges) and OBJECTIVES (what clients minimise)."""

from wardround.losses.objective import (
    CrossEntropy,
    Dice,
    DiceBCE,
    FocalTversky,
    GeneralisedDice,
    Objective,
)
from wardround.methods.base import Method
from wardround.methods.fedavg import FedAvg
from wardround.methods.references import Centralised, Local

METHODS: dict[str, type[Method]] = {
    "local": Local,
    "centralised": Centralised,
    "fedavg": FedAvg,
}

OBJECTIVES: dict[str, type[Objective]] = {
    "dice": Dice,
    "dice_bce": DiceBCE,
    "generalised_dice": GeneralisedDice,
    "focal_tversky": FocalTversky,
    "cross_entropy": CrossEntropy,
}
