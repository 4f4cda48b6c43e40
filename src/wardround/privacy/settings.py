"""PrivacySettings: what a run asks for, or what a hospital demands; Policy: what holds where both speak."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from wardround.settings import Settings, refuse_boolean

LEVELS = ("none", "case", "client")  # each covers what those before it cover


class PrivacySettings(Settings):
    """Differential privacy of the trained models that clients send, and whether they are summed in secret.

    level: none; case: per-case gradients are clipped and noised, which covers whether any one training case
    took part; client: the whole update is clipped and noised, which covers whatever the client trained on.
    epsilon, delta: what all answers of the run may spend together, at every client. clip: largest norm, of a
    case's gradient or of an update. cases: training cases that a client says it has, and is weighted by,
    whatever their true number; null: the true number, which epsilon then does not cover. scores: withhold
    keeps scores of validation and test cases and calibration at the client; show lets them leave as they
    are, and epsilon then covers training cases alone. secure_sum: the server sees the weighted sum of at
    least three clients' updates and no single one; noise of the client level is then shared among them.
    """

    level: Literal["none", "case", "client"] = "none"
    epsilon: float = Field(8.0, gt=0, allow_inf_nan=False)
    delta: float = Field(1e-5, gt=0, le=1e-2)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    cases: int | None = Field(None, ge=1)
    scores: Literal["withhold", "show"] = "withhold"
    secure_sum: bool = False

    _numbers = field_validator("epsilon", "delta", "clip", "cases", mode="before")(refuse_boolean)

    @property
    def is_on(self) -> bool:
        return self.level != "none"

    @property
    def shares_noise(self) -> bool:
        """Whether the sum has the noise once, instead of every update by itself."""
        return self.secure_sum and self.level == "client"


class Policy(NamedTuple):
    """What holds for one run at one client.

    run: the settings of this run; total: the hospital's own, whose epsilon covers all runs together, or None.
    """

    run: PrivacySettings
    total: PrivacySettings | None = None

    @property
    def is_on(self) -> bool:
        return self.run.is_on

    @property
    def withholds_scores(self) -> bool:
        return self.is_on and self.run.scores == "withhold"


def combine(asked: PrivacySettings, site: PrivacySettings | None) -> Policy:
    """A run may ask for more privacy than the hospital demands, never for less.

    >>> combine(PrivacySettings(level="case", epsilon=2), PrivacySettings(level="client")).run.level
    'client'
    """
    summed = asked.secure_sum or (site is not None and site.secure_sum)
    if site is None or not site.is_on:
        return Policy(asked.model_copy(update={"secure_sum": summed}))
    if not asked.is_on:
        return Policy(site.model_copy(update={"secure_sum": summed}), site)
    shows = asked.scores == site.scores == "show"
    run = PrivacySettings(
        level=max(asked.level, site.level, key=LEVELS.index),
        epsilon=min(asked.epsilon, site.epsilon),
        delta=min(asked.delta, site.delta),
        clip=asked.clip if asked.level == site.level else site.clip,  # noise follows it, so either is safe
        cases=site.cases,
        scores="show" if shows else "withhold",
        secure_sum=summed,
    )
    return Policy(run, site)
