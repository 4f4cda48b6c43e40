"""FedEvi: Improving Federated Medical Image Segmentation via Evidential Weight Aggregation.

Chen et al., MICCAI 2024. https://papers.miccai.org/miccai-2024/319-Paper2717.html

Networks put out evidence, so each voxel has a distribution of class probabilities and two kinds of
uncertainty. A client gains weight where the global model does not know its data (epistemic, the gap G)
and where its own model is dependable (low aleatoric uncertainty, the reliability R).

Symbols: z logits, e evidence, α = e + 1, S = Σα, ρ̄ = α/S; θ_k client model, θ̂ surrogate, θ global model;
β_k aggregation weight, δ its step; λ weight of the KL.
What leaves a client: θ_k, then two numbers, G_k and R_k.

Differs: Eq. 4 as printed is negative; U_epi = U_total - U_ale, as in the authors' code (E1).
Differs: logits are capped smoothly at 10, and KL and scores are float64 (E3); the code clamps at 80.
Differs: the Dice has E[ρ²] in its denominator, which is Eq. 9; the code has ρ̄² (`dice_mode: plug_in`, E4).
Differs: R is the mean of 1/U_ale over images, which is Eq. 7; the code has 1/mean (`reliability: ratio`, E2).
Differs: a floor of 1e-3 under β, as in the code, but β is normalised after it (`floor_renormalise`, E6).
Differs: a client without scores keeps its weight (E7); paper and code know no such client.
`configs/methods/fedevi-as-released.yaml` follows the authors' code in all of this.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.weights import (
    add_newcomers,
    by_class,
    collect,
    normalise,
    redistribute,
    renormalise,
)
from wardround.clients import Client, Clients
from wardround.config import Config
from wardround.data.annotation import Annotation
from wardround.data.cases import Batch
from wardround.errors import ClientError, ConfigError
from wardround.losses.evidential import (
    CapKind,
    DiceMode,
    EvidenceKind,
    aggregated_kl,
    dirichlet_dice_loss,
    evidence,
    expected_probabilities,
    fits_kernels,
    invert_evidence,
    misleading_kl,
    two_class_terms,
)
from wardround.losses.objective import Context, Objective, Smooth
from wardround.losses.partial import merge_sums
from wardround.losses.segmentation import Reduction, at_least_float32, matching_targets
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.uncertainty.maps import case_means, decompose

log = logging.getLogger(__name__)

LEAST_ALEATORIC = 1e-12  # keeps 1/U_ale finite (E2)
LARGEST_SCORE = 1.01 / LEAST_ALEATORIC  # no honest client sends more
USUAL_SUM = (0.01, 10.0)  # below it weights hardly move, above it they have no memory (E5)


# What a client minimises


@dataclass(frozen=True)
class Evidential(Objective):
    """Dice of a Dirichlet distribution, plus a KL against evidence for wrong classes (Eq. 11).

    lam: weight of the KL, 0 leaves it out; anneal_rounds: rounds over which that weight rises, 0 has it
    in full at once; evidence: how logits become evidence; cap, cap_kind: the limit of exp's logits (E3);
    dice_mode: E[ρ²] (bayes) or ρ̄² (plug_in) in the denominator (E4); reduction: whether the Dice sums
    run over the batch or each case. All classes count, background too.
    """

    title = "Evidential Dice + KL"
    paper = "Chen et al., MICCAI 2024"
    counts_background = True

    lam: Annotated[float, Field(ge=0)] = 0.01
    anneal_rounds: Annotated[int, Field(ge=0)] = 10
    evidence: EvidenceKind = "exp"
    cap: Annotated[float, Field(gt=0, le=80)] = 10.0
    cap_kind: CapKind = "smooth"
    dice_mode: DiceMode = "bayes"
    smooth: Smooth = 1e-5
    reduction: Reduction = "batch"

    def num_outputs(self, num_classes: int) -> int:
        """Every class has evidence of its own, also of two."""
        return num_classes

    def alpha(self, logits: Tensor) -> Tensor:
        """Dirichlet parameters α = e + 1, at least float32."""
        return self._evidence(at_least_float32(logits)) + 1

    def probabilities(self, logits: Tensor) -> Tensor:
        return expected_probabilities(self.alpha(logits))  # Eq. 2

    def to_average(self, logits: Tensor) -> Tensor:
        """Evidence, so that a view counts for as much as it has."""
        return self._evidence(at_least_float32(logits))

    def from_average(self, average: Tensor) -> Tensor:
        return invert_evidence(average, self.evidence, self.cap, self.cap_kind)

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        logits = context.forward(model, batch.image).logits
        dice, kl = context.supervise(self.terms, logits, batch.label)
        context.note("dice", dice)
        if kl is None:
            only: Tensor = dice
            return only
        context.note("kl", kl)
        loss: Tensor = dice + context.number("kl", self.numbers(context)["kl"]) * kl  # Eq. 11
        return loss

    def sample_losses(self, logits: Tensor, label: Tensor, *, annotation: Annotation | None = None) -> Tensor:
        """Each case's own Dice and KL; the KL in full, so that rounds compare."""
        dice, kl = self.terms(logits, label, reduce=False, annotation=annotation)
        return dice if kl is None else dice + self.lam * kl

    def restrict(self, function: Callable[..., Any], annotation: Annotation) -> Callable[..., Any]:
        """Parameters of classes that are not told apart are added up: exactly a Dirichlet of the groups."""
        return partial(function, annotation=annotation)

    def terms(
        self, logits: Tensor, label: Tensor, *, reduce: bool = True, annotation: Annotation | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The Dice (Eq. 9) and the mean KL (Eq. 10), or None where it has no weight."""
        if annotation is not None:
            return self._aggregated_terms(logits, annotation.to_groups(label), annotation, reduce)
        usual = (self.evidence, self.cap_kind, self.dice_mode) == ("exp", "smooth", "bayes")
        if usual and self.lam and fits_kernels(logits, label):
            how: dict[str, Any] = {"smooth": self.smooth, "reduction": self.reduction, "reduce": reduce}
            return two_class_terms(logits, label, cap=self.cap, **how)
        logits = at_least_float32(logits)
        y = matching_targets(logits, label)
        e = self._evidence(logits)
        dice = dirichlet_dice_loss(
            e + 1, y, mode=self.dice_mode, smooth=self.smooth, reduction=self.reduction, reduce=reduce
        )
        if not self.lam:
            return dice, None
        voxels = misleading_kl(e, y, one_hot=not label.is_floating_point())
        kl = voxels.mean() if reduce else case_means(voxels)
        return dice, kl.to(dice.dtype)

    def _aggregated_terms(
        self, logits: Tensor, label: Tensor, annotation: Annotation, reduce: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The same of groups of classes; label: numbers of groups."""
        alpha = merge_sums(self.alpha(logits), annotation)
        y = matching_targets(alpha, label)
        dice = dirichlet_dice_loss(
            alpha, y, mode=self.dice_mode, smooth=self.smooth, reduction=self.reduction, reduce=reduce
        )
        if not self.lam:
            return dice, None
        voxels = aggregated_kl(alpha, y, [len(annotation.members(m)) for m in range(annotation.num_groups)])
        kl = voxels.mean() if reduce else case_means(voxels)
        return dice, kl.to(dice.dtype)

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return ()

    def numbers(self, context: Context) -> dict[str, float]:
        """The weight of the KL."""
        return {"kl": self.lam * self.annealing(context.round)}

    def annealing(self, round: int) -> float:
        """min(1, r / anneal_rounds), r the number of the round from 1."""
        return min(1.0, (round + 1) / self.anneal_rounds) if self.anneal_rounds else 1.0

    def _evidence(self, logits: Tensor) -> Tensor:
        return evidence(logits, self.evidence, self.cap, self.cap_kind)


# How the server weighs clients


@dataclass(frozen=True)
class FedEvi(Method):
    """Raises the weight of clients the global model does not know and whose own model is dependable.

    delta: step of the weights, 0 gives FedAvg; reliability: mean of reciprocals over images, or the
    reciprocal of the mean; floor: least weight of a scored client, floor_renormalise: whether weights are
    normalised after it; init: first weights; missing_scores: a client without scores keeps its weight
    (hold), is scored on its training cases if it has no others (train), or is left out of the mean until
    it has scores (exclude); use_gap, use_reliability: leave G or R out (both out gives FedAvg).
    """

    title = "FedEvi"
    paper = "Chen et al., MICCAI"
    year = 2024
    link = "https://papers.miccai.org/miccai-2024/319-Paper2717.html"
    sends = "two numbers (G, R), in a second exchange"
    secure_sum = False
    needs_each_model = "the same replies are averaged twice, with two sets of weights"
    needs = frozenset({"validation", "state"})
    tasks = ("train", "score")
    up = frozenset({"G", "R"})
    objective = "evidential"

    delta: Annotated[float, Field(ge=0)] = 1.0
    reliability: Literal["image", "ratio"] = "image"
    floor: Annotated[float, Field(ge=0, lt=1)] = 1e-3
    floor_renormalise: bool = True
    init: Literal["samples", "uniform"] = "samples"
    missing_scores: Literal["hold", "train", "exclude"] = "hold"
    use_gap: bool = True
    use_reliability: bool = True

    @property
    def moves(self) -> bool:
        """Whether weights change at all; if not, the second exchange is left out."""
        return self.delta > 0 and (self.use_gap or self.use_reliability)

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        beta = add_newcomers(state.memory.get("weights", {}), self.first_weights(clients))
        state = replace(state, memory={"weights": beta})
        weights = self.weigh(state, replies)
        if not self.moves:
            params = self.average(state, replies, weights)
            return state.next(params=params, notes=self.notes(replies, weights))

        surrogate = self.average(state, replies, weights)  # θ̂ = Σ β_k^{r-1} θ_k^r
        trained = [reply.client for reply in replies]
        scores = clients.ask("score", Message(params=surrogate), to=trained)
        g = self.increments(scores)
        state = replace(state, memory={"weights": self.update(beta, g)})

        voters = [reply for reply in replies if reply.client in g]
        if self.missing_scores != "exclude" or not voters:
            voters = list(replies)
        weights = self.weigh(state, voters)
        params = self.average(state, voters, weights)  # θ = Σ β_k^r θ_k^r, the same local models
        return state.next(
            params=params, notes=self.notes(voters, weights, **self.ingredients(state, trained, scores, g))
        )

    def first_weights(self, clients: Clients) -> dict[str, float]:
        """β^0: N_k / ΣN over training cases (E8), or all alike."""
        names, sizes = list(clients.sizes), list(clients.sizes.values())
        shares = normalise(sizes) if self.init == "samples" else [1 / len(names)] * len(names)
        return dict(zip(names, shares, strict=True))

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        """Remembered weights of those who answered, which sum to one.

        Without `floor_renormalise` and with all clients present, they are taken as they are: the sum may
        exceed one by what the floor added.
        """
        beta = state.memory["weights"]
        if not self.floor_renormalise and len(replies) == len(beta):
            return by_class([beta[reply.client] for reply in replies], replies)
        return by_class(renormalise(beta, replies), replies)

    def increments(self, scores: Sequence[Reply]) -> dict[str, float]:
        """g_k = G_k R_k of every client that has the scores."""
        gap, reliability = collect(scores, "G", 0, LARGEST_SCORE), collect(scores, "R", 0, LARGEST_SCORE)
        if not self.use_reliability:
            return gap
        if not self.use_gap:
            return reliability
        return {name: gap[name] * reliability[name] for name in gap if name in reliability}

    def update(self, beta: Mapping[str, float], g: Mapping[str, float]) -> dict[str, float]:
        """The next weights of all clients; those without an increment keep theirs (hold rule, E7)."""
        after = redistribute(beta, {name: beta[name] + self.delta * g[name] for name in g})  # Eq. 8
        lifted = {name: max(after[name], self.floor) for name in g}
        if all(lifted[name] == after[name] for name in g):
            return after
        return redistribute(after, lifted) if self.floor_renormalise else {**after, **lifted}  # E6

    def ingredients(
        self, state: ServerState, trained: Sequence[str], scores: Sequence[Reply], g: Mapping[str, float]
    ) -> dict[str, Any]:
        """For the records: G, R, g and its sum, who kept its weight, and what looks wrong (E5)."""
        total = math.fsum(g.values())
        held = [name for name in trained if name not in g]
        log.info("round %d: sum of g is %.4g, %d held", state.round + 1, total, len(held))
        notes = {
            "G": collect(scores, "G"),
            "R": collect(scores, "R"),
            "g": dict(g),
            "sum_g": total,
            "held": held,
            "beta": dict(state.memory["weights"]),
        }
        warning = check_increments(g)
        if warning is not None:
            log.warning("round %d: %s", state.round + 1, warning)
            notes["warnings"] = [warning]
        return notes

    # Client

    def train(self, client: Client, message: Message) -> Message:
        params = client.fit(start=message.params).params
        if self.moves and self.use_reliability:
            client.memory["trained"] = params  # until it is scored
        return Message(params=params)

    def score(self, client: Client, message: Message) -> Message:
        """G_k of the surrogate and R_k of the client's own model, on validation cases if it has any."""
        objective = client.objective
        assert isinstance(objective, Evidential)
        fallback = self.missing_scores == "train"

        def alpha(logits: Tensor) -> Tensor:
            """Of what the client's labels tell apart: it does not answer for classes it never saw."""
            return merge_sums(objective.alpha(logits.double()), client.data.annotation)

        def epistemic(logits: Tensor, batch: Batch) -> Tensor:
            return case_means(decompose(alpha(logits)).epistemic)

        def aleatoric(logits: Tensor, batch: Batch) -> Tensor:
            means = case_means(decompose(alpha(logits)).aleatoric)
            return means.clamp_min(LEAST_ALEATORIC)

        def certainty(logits: Tensor, batch: Batch) -> Tensor:
            return 1 / aleatoric(logits, batch)

        scores: dict[str, float | None] = {}
        if self.use_gap:
            scores["G"] = client.evaluate(message.params, epistemic, fallback=fallback)  # Eq. 6
        if self.use_reliability:
            own = client.memory.pop("trained", None)
            if own is None:
                raise ClientError(f"client '{client.name}' was asked for scores before it trained a model.")
            if self.reliability == "image":
                scores["R"] = client.evaluate(own, certainty, fallback=fallback)  # Eq. 7
            else:
                mean = client.evaluate(own, aleatoric, fallback=fallback)
                scores["R"] = None if mean is None else 1 / mean
        return Message(scalars={name: value for name, value in scores.items() if value is not None})

    # Both

    def check(self, config: Config, objective: Objective) -> None:
        if not isinstance(objective, Evidential):
            name = config.objective.get("name")
            raise ConfigError(
                f"method 'fedevi' weighs clients by the uncertainty of a Dirichlet model, which objective "
                f"'{name}' does not train. Use objective: {{name: evidential}}, or leave the objective out."
            )


def check_increments(g: Mapping[str, float]) -> str | None:
    """What is unusual about the increments' size, in a sentence, or None (E5)."""
    if not g:
        return (
            "FedEvi: no client has scores, so weights stay. Give clients validation cases, "
            "or set method.missing_scores=train."
        )
    least, most = USUAL_SUM
    total = math.fsum(g.values())
    if least <= total <= most:
        return None
    effect = "weights hardly move" if total < least else "weights forget all earlier rounds"
    return (
        f"FedEvi: the sum of g is {total:.3g}, outside {least:g} to {most:g}; {effect}. Adapt method.delta."
    )
