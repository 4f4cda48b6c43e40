"""Guard: what stands between one client's answers and whoever asked for them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from wardround.messages import Message
from wardround.privacy.accountant import calibrate_noise
from wardround.privacy.budget import PrivacyBudget, PrivacyRefusal
from wardround.privacy.filters import ClientNoise, Filter, Outgoing, Withhold
from wardround.privacy.settings import Policy, PrivacySettings
from wardround.text import clipped

# Tasks that are done at all; of pictures nothing leaves.
PASSING = ("train", "evaluate", "calibrate", "pictures")


class CaseNoise(NamedTuple):
    """Per-case clipping of one task: gradients of single cases are clipped, their sum is noised in each step.

    rate: the chance of a case to be in a step; steps: of the task; batch: what sums are divided by.
    """

    clip: float
    noise: float
    rate: float
    steps: int
    batch: int


class SumNoise(NamedTuple):
    """Noise that the clients of a secure sum share, so that the sum has it once.

    clip, noise: what this client needs; planned: noise times clip that the run's own settings come to, which
    the others add their share of at least.
    """

    clip: float
    noise: float
    planned: float

    def share(self, largest: float, num_members: int) -> float:
        """What this one of at least so many members adds to its weighted update; largest: of all weights.

        Any two updates of one client differ by at most twice the clipping norm times its weight. Who needs
        more than was planned (it spent more, or allows less) adds what the others' shares leave open.
        """
        own = self.planned**2 / num_members
        variance = max(own, (self.noise * self.clip) ** 2 - self.planned**2 + own)
        return 2 * largest * math.sqrt(variance)


class Guard:
    """The policy of one run at one client, with its budget.

    asked: what the run asks of all; rounds: of the run; cases: training cases that the client says it has;
    steps: that so many make in a round; batch: cases of a training step; trainable: names of the tensors that
    learn.
    """

    def __init__(
        self,
        policy: Policy,
        budget: PrivacyBudget,
        run: str,
        *,
        asked: PrivacySettings,
        rounds: int,
        cases: int,
        steps: int,
        batch: int,
        trainable: Collection[str],
    ) -> None:
        self.policy = policy
        self.cases = cases
        self._asked = asked
        self._budget = budget
        self._run = run
        self._rounds = rounds
        self._steps = steps
        self._batch = batch
        self._trainable = frozenset(trainable)

    def check_task(self, task: str, request: Message) -> None:
        """Refuse what would leave without a filter for it."""
        level = f"privacy.level: {self.policy.run.level}"
        if task not in PASSING:
            raise PrivacyRefusal(f"task '{task}' is not answered under {level}")
        if task == "train" and request.optional_params is None:
            raise PrivacyRefusal(f"a request to train brings no model, which {level} measures updates from")
        split = clipped(str(request.scalars.get("split")), 40)
        if task == "evaluate" and split not in ("val", "test"):
            raise PrivacyRefusal(
                f"scores of split '{split}' do not leave under {level}: it has training cases"
            )

    def charge_steps(self, round: int) -> CaseNoise | None:
        """The noise of a task that clips its cases, charged; None where the whole update is noised."""
        settings = self.policy.run
        if settings.level != "case":
            return None
        rate = min(1.0, self._batch / self.cases)
        noise = self._charge(round, rate, self._steps)
        return CaseNoise(settings.clip, noise, rate, self._steps, self._batch)

    def pass_on(self, round: int, outgoing: Outgoing) -> Outgoing:
        """What may leave of an answer, through all filters; charged before noise is drawn."""
        for filter in self._filters(round, outgoing.task):
            outgoing = filter(outgoing)
        return outgoing

    def _filters(self, round: int, task: str) -> list[Filter]:
        settings = self.policy.run
        filters: list[Filter] = [Withhold(self.cases, self._steps, self._trainable)]
        if task == "train" and settings.level == "client":
            noise = (
                0.0 if settings.secure_sum else self._charge(round)
            )  # of a sum it is charged when it is made
            filters.append(ClientNoise(settings.clip, noise, self._trainable))
        return filters

    def charge_sum(self, round: int) -> SumNoise | None:
        """The noise of one secure sum, charged; None where updates need none or have it already."""
        settings, asked = self.policy.run, self._asked
        if settings.level != "client":
            return None
        planned = None
        if asked.level == "client":
            planned = calibrate_noise([], 1.0, self._rounds, asked.epsilon, asked.delta)
        return SumNoise(settings.clip, self._charge(round), (planned or 0.0) * asked.clip)

    def _charge(self, round: int, rate: float = 1.0, steps: int = 1) -> float:
        left = max(self._rounds - round, 1)
        return self._budget.charge(self.policy, self._run, round, rounds_left=left, rate=rate, steps=steps)

    def report(self, outgoing: Outgoing) -> dict[str, Any]:
        """What was done to an answer, and what the run has spent so far, for ledger and records."""
        settings = self.policy.run
        told = {
            "level": settings.level,
            "epsilon": round(self._budget.spent(settings, self._run), 6),
            "delta": settings.delta,
            "scores": settings.scores,
            "counts": "given" if settings.cases is None else "declared",
            "filters": [dict(note) for note in outgoing.notes],
        }
        if settings.shares_noise:
            told["shared"] = True
        if self.policy.total is not None:
            told["total"] = round(self._budget.spent(self.policy.total), 6)
            told["limit"] = self.policy.total.epsilon
        return told
