"""Differential privacy: ordered filters between a client's answer and whoever asked for it.

`PrivacySettings` is the section of run.yaml and site.yaml, a `Guard` applies it at one client: it charges the
client's `PrivacyBudget` before anything leaves, and passes answers through its filters. `secure_sum` is a
room of its own: sums of which the server sees no part.
"""

from wardround.privacy.budget import NAME as BUDGET_FILE
from wardround.privacy.budget import PrivacyBudget, PrivacyRefusal
from wardround.privacy.filters import Outgoing
from wardround.privacy.guard import Guard, SumNoise
from wardround.privacy.settings import Policy, PrivacySettings, combine

__all__ = [
    "BUDGET_FILE",
    "PrivacyBudget",
    "PrivacyRefusal",
    "Guard",
    "Outgoing",
    "Policy",
    "PrivacySettings",
    "SumNoise",
    "combine",
]
