"""SAFCF: Uncertainty and Scale-Calibrated Contrastive Federated Segmentation under Client Heterogeneity.

Clients minimise Dice plus a contrastive term on encoder features (CFSL): the local model's features should
resemble the received model's more than those of the client's own previous model. The server (DSWA) weighs
small clients up, and clients whose parameters lie far from the resulting mean down.

Symbols: h_c, h_p, h_s bottleneck features of the current local, previous local and received (server)
model; phi temperature-scaled cosine, beta = phi(h_s, h_c) - phi(h_c, h_p); alpha damps the contrastive
term; lambda (`lam`) mixes it with Dice. Server: n_i cases, gamma_i = n_i / sum n, gamma~ its complement,
w_i client parameters, w- their gamma~ mean, U_i mean squared distance from it, a_i the weights.
What leaves a client: w_i. What stays: its last model (for h_p) and alpha.
What the server needs: all models at once, a piece of each in memory at a time; they are read twice.
A third part, the variational first layer, is `model: {stem: variational}` (models/variational.py).

The equations have errors. Ids S1 to S15 name them, docs/methods/safcf.md explains each in full. What the
settings offer beside the default reading is in safcf_readings.py.
Differs: `contrast: margin` replaces Eqs. 6-9, whose gradient does not do what the text says (S4-S6).
Differs: Eq. 13 is a coefficient; we minimise 1 - Eq. 13 (S1).
Differs: epsilon in Eq. 18 is relative to the mean U, since U is 1e-8 and less (S11).
Differs: a client without cases gets no weight (S10).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

import wardround.methods.safcf_readings as readings
from wardround.aggregation.mean import Piece, layerwise_mean, map_pieces, mean, split_pieces
from wardround.aggregation.weights import map_to_clients, normalise
from wardround.clients import Clients
from wardround.config import Config
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses.objective import Context, Objective
from wardround.losses.segmentation import Reduction, at_least_float32, choose_classes, finish, prepare, sums
from wardround.messages import Message, Reply, ServerState
from wardround.methods.base import Method
from wardround.models.variational import variational_pairs
from wardround.params import Params

log = logging.getLogger(__name__)

ALPHA_RATIO = 1 / 3  # Eq. 11: the mean of three numbers over their sum, whatever they are (S7)
LEAST_SQUARE = 1e-30  # under a square root, whose slope at 0 is infinite
CONCENTRATED = 0.9  # a weight above it is worth a warning (S12)

Pool = Literal["flatten", "gap", "voxel"]
Positive = Annotated[float, Field(gt=0)]


# Client: CFSL, Eqs. 1-13


@dataclass(frozen=True)
class CFSL(Objective):
    """lam * contrastive term + (1 - lam) * Dice with squares in its denominator.

    lam: 0 is Dice alone, 1 leaves the decoder without a loss; tau: temperature of the cosines.
    contrast: margin, guarded (Eqs. 6-9 made well-posed) or literal (as printed; for study only).
    divisor: what guarded and literal divide by: log chi (Eq. 9), chi itself, or nothing.
    alpha0, alpha_mode: how (1 - alpha) damps the term: a third of it each batch, a share, or not at all.
    feature_pool: cosines of whole maps, of channel means, or at each voxel.
    dice_literal: minimise the overlap, as Eq. 13 says; smooth_nr: epsilon in Dice's numerator too.
    reduction: whether the sums of Eqs. 3-8 and 13 run over one case or the whole batch.

    Several classes: softmax, Eq. 13 for each foreground class, then their mean.
    """

    title = "CFSL"
    paper = "SAFCF (Uncertainty and Scale-Calibrated Contrastive Federated Segmentation)"
    needs = frozenset({"features", "global", "previous"})

    lam: Annotated[float, Field(ge=0, le=1)] = 0.5
    tau: Positive = 0.5
    contrast: Literal["margin", "guarded", "literal"] = "margin"
    divisor: readings.Divisor = "log_chi"
    alpha0: Annotated[float, Field(ge=0, lt=1)] = 0.5
    alpha_mode: Literal["literal", "share", "off"] = "literal"
    feature_pool: Pool = "flatten"
    eps_cos: Positive = 1e-8
    eps_dist: Positive = 1e-8
    eps_dice: Positive = 1e-5
    dice_literal: bool = False
    smooth_nr: bool = False
    reduction: Reduction = "per_sample"

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        logits = context.forward(model, batch.image).logits
        dice: Tensor = context.supervise(self.dice, logits, batch.label)
        context.note("dice", dice)
        if self.lam == 0:
            return dice
        h_c, h_p, h_s = self.features(batch.image, context)  # Eq. 2
        alpha = self.alpha_of_batch(h_c, h_p, h_s, context)
        found: Contrast = context.run_compiled(self.compare, h_c, h_p, h_s)
        if self.contrast == "literal" and self.divisor == "log_chi":
            readings.refuse_small(found.chi)
        term = (1 - alpha).to(dice.dtype) * found.losses.mean()  # Eq. 9
        context.note("contrast", term)
        context.note("beta", found.beta.mean())
        return self.lam * term + (1 - self.lam) * dice  # Eq. 1

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return self.dice(logits, label, reduce=False)

    def constants(self, context: Context) -> tuple[object, ...] | None:
        return None if self.contrast == "literal" else (context.has_previous,)

    def dice(self, logits: Tensor, label: Tensor, *, reduce: bool = True) -> Tensor:
        return modified_dice(
            logits,
            label,
            eps=self.eps_dice,
            smooth_nr=self.smooth_nr,
            literal=self.dice_literal,
            reduction=self.reduction,
            reduce=reduce,
        )

    def features(self, image: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """h_c, h_p, h_s on the same batch; before a client's first round ends h_p is h_s, so beta is 0."""
        h_s = context.global_.encode(image)
        h_p = context.previous.encode(image) if context.has_previous else h_s
        return context.features, h_p, h_s

    def compare(self, h_c: Tensor, h_p: Tensor, h_s: Tensor) -> Contrast:
        """Eqs. 3-9 without alpha."""
        return contrastive(
            h_c,
            h_p,
            h_s,
            form=self.contrast,
            divisor=self.divisor,
            tau=self.tau,
            pool=self.feature_pool,
            eps_cos=self.eps_cos,
            eps_dist=self.eps_dist,
            reduction=self.reduction,
        )

    def alpha_of_batch(self, h_c: Tensor, h_p: Tensor, h_s: Tensor, context: Context) -> Tensor:
        """alpha of the present pass; the literal one moves once a batch, whatever passes its step takes."""
        if self.alpha_mode != "literal":
            return self.next_alpha(h_c, h_p, h_s, context.memory)
        return context.make_once("alpha", lambda: self.next_alpha(h_c, h_p, h_s, context.memory))

    def next_alpha(self, h_c: Tensor, h_p: Tensor, h_s: Tensor, memory: dict[str, Any]) -> Tensor:
        """The alpha of this batch; no gradient. The literal one is client state, never reset (S7)."""
        if self.alpha_mode == "literal":
            if "alpha" not in memory:
                memory["alpha"] = torch.full((), self.alpha0, dtype=torch.float64, device=h_c.device)
            state: Tensor = memory["alpha"]  # changed in place, so that a captured step finds it again
            alpha = state.clone()
            state.mul_(ALPHA_RATIO)  # Eqs. 10-12, for the next batch
            return alpha
        if self.alpha_mode == "share":
            return readings.alpha_share(h_c.detach(), h_p, h_s, self.eps_dist)
        return torch.zeros((), device=h_c.device)

    def check(self, config: Config) -> None:
        readings.refuse_divisor(self.contrast, self.divisor)

    def warnings(self, config: Config) -> list[str]:
        return readings.list_warnings(self.lam, self.dice_literal, config.model.norm)


class Contrast(NamedTuple):
    """What Eqs. 3-9 give: the term of each case without (1 - alpha), beta, and chi (0 where not used)."""

    losses: Tensor
    beta: Tensor
    chi: Tensor


def contrastive(
    h_c: Tensor,
    h_p: Tensor,
    h_s: Tensor,
    *,
    form: Literal["margin", "guarded", "literal"],
    divisor: readings.Divisor = "log_chi",
    tau: float = 0.5,
    pool: Pool = "flatten",
    eps_cos: float = 1e-8,
    eps_dist: float = 1e-8,
    reduction: Reduction = "per_sample",
) -> Contrast:
    """The contrastive term of each case from features (B, C', *spatial), Eqs. 3-9 (S3-S6)."""
    h_c, h_p, h_s = at_least_float32(h_c), at_least_float32(h_p), at_least_float32(h_s)
    if form == "guarded":  # h_p becomes the soft weight in [0, 1] that the text describes
        h_c, h_p, h_s = h_c.sigmoid(), h_p.sigmoid(), h_s.sigmoid()
    h_c, h_p, h_s = (pool_features(h, pool) for h in (h_c, h_p, h_s))  # (B, C', *spatial) -> (B, C', V)
    dims = (1, 2) if reduction == "per_sample" else (0, 1, 2)
    cosine_dims = (1,) if pool == "voxel" else dims
    phi_s = similarity(h_s, h_c, cosine_dims, tau=tau, eps=eps_cos)  # Eq. 4
    phi_c = similarity(h_c, h_p, cosine_dims, tau=tau, eps=eps_cos)
    beta = phi_s - phi_c  # Eq. 5
    if form == "margin":
        return Contrast(F.softplus(-beta).flatten(1).mean(dim=1), beta, beta.new_zeros(()))
    chi = length(h_s, dims)  # Eq. 8
    eta = readings.printed_eta(h_c, h_p, beta, dims, guarded=form == "guarded", eps=eps_dist)
    return Contrast(readings.divide(eta, chi, divisor, guarded=form == "guarded"), beta, chi)


def pool_features(h: Tensor, pool: Pool) -> Tensor:
    """Features as (B, C', voxels); "gap" keeps one mean for each channel."""
    h = h.flatten(2)
    return h.mean(dim=2, keepdim=True) if pool == "gap" else h


def similarity(a: Tensor, b: Tensor, dims: tuple[int, ...], *, tau: float, eps: float) -> Tensor:
    """Eq. 3: the cosine of two feature maps over these axes, divided by the temperature."""
    product = (a * b).sum(dims, keepdim=True)
    return product / (length(a, dims) * length(b, dims) + eps) / tau


def length(h: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The Euclidean norm over these axes; all zeros have slope 0, not NaN."""
    return h.square().sum(dims, keepdim=True).clamp_min(LEAST_SQUARE).sqrt()


def modified_dice(
    logits: Tensor,
    label: Tensor,
    *,
    eps: float = 1e-5,
    smooth_nr: bool = False,
    literal: bool = False,
    reduction: Reduction = "per_sample",
    reduce: bool = True,
) -> Tensor:
    """1 - Eq. 13, mean over foreground classes; literal: Eq. 13 itself (S1).

    An empty truth gives 1 and no gradient; with smooth_nr false alarms count there too (S2).
    """
    p, y = choose_classes(*prepare(logits, label), include_background=False)
    over = reduction if reduce else "per_sample"
    squares, error = sums(over, y.square() + p.square(), (y - p).square())  # (B, classes)
    # 1 - 2Σyp / (Σy² + Σp² + ε), without the subtraction
    ratio = (error if smooth_nr else error + eps) / (squares + eps)
    return finish((1 - ratio if literal else ratio).mean(dim=1), reduce)


# Server: DSWA, Eqs. 14-19


@dataclass(frozen=True)
class SAFCF(Method):
    """Weighs clients by the complement of their size and by their parameters' distance from the mean.

    scale_mode: complement favours small clients (Eq. 15), proportional large ones, uniform none.
    uncertainty: U over all parameters, as the mean of each tensor's, per tensor with weights of its own,
    or off (weights are gamma~).
    eps, eps_mode: epsilon of Eq. 18, as a share of the mean U or added as it is.
    max_weight: the most one client may have; null leaves it open.
    variational: how Gaussian weights are joined: mu and rho averaged, or the moments of their mixture.
    """

    title = "SAFCF"
    paper = "Uncertainty and Scale-Calibrated Contrastive Federated Segmentation under Client Heterogeneity"
    secure_sum = False
    needs_each_model = "U needs every client's own parameters"
    objective = "cfsl"

    scale_mode: Literal["complement", "proportional", "uniform"] = "complement"
    uncertainty: Literal["global", "mean_of_tensor_means", "per_tensor", "off"] = "global"
    eps: Annotated[float, Field(ge=0)] = 1e-8
    eps_mode: Literal["relative", "additive"] = "relative"
    max_weight: Annotated[float | None, Field(gt=0, le=1)] = None
    variational: Literal["mean", "moment_match"] = "mean"

    def start(self, model: nn.Module) -> ServerState:
        pairs = [list(pair) for pair in variational_pairs(model)]
        return replace(super().start(model), memory={"variational": pairs})

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = drop_empty(clients.ask("train", Message(params=state.params)))
        found = self.measure(state, replies)
        notes = self.notes(
            replies,
            found.weights,
            gamma=map_to_clients(replies, found.gamma),
            gamma_tilde=map_to_clients(replies, found.gamma_tilde),
        )
        if found.U:
            notes["U"] = map_to_clients(replies, found.U)
        if found.by_tensor:
            columns = list(zip(*found.by_tensor.values(), strict=True))  # one a client
            notes["weights_min"] = map_to_clients(replies, [min(column) for column in columns])
            notes["weights_max"] = map_to_clients(replies, [max(column) for column in columns])
        warnings = check_concentration(notes["weights"])
        if warnings:
            notes["warnings"] = warnings
            log.warning("round %d: %s", state.round + 1, warnings[0])
        return state.next(params=self.combine(state, replies, found), notes=notes)

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        kept = drop_empty(replies)
        weights = map_to_clients(kept, self.measure(state, kept).weights)
        return [weights.get(reply.client, 0.0) for reply in replies]

    def measure(self, state: ServerState, replies: Sequence[Reply]) -> Dswa:
        """Eqs. 14-18 for the clients that answered."""
        sizes = [reply.num_examples for reply in replies]
        gamma, shares = normalise(sizes), scale_shares(sizes, self.scale_mode)  # Eqs. 14, 15
        if self.uncertainty == "off":
            return Dswa(gamma, shares, self.cap(shares))
        items = [reply.params for reply in replies]
        trainable = set(state.trainable)  # buffers do not count in U (S12)
        names = [name for name in items[0] if name in trainable]
        totals = squared_distances(items, shares, names)  # (tensors, K)
        counts = torch.tensor([prod(items[0].spec(name)[0]) for name in names], dtype=torch.float64)
        tensor_means = totals / counts[:, None]
        if self.uncertainty == "mean_of_tensor_means":
            U = tensor_means.mean(dim=0).tolist()
        else:
            U = (totals.sum(dim=0) / counts.sum()).tolist()  # Eq. 17
        if self.uncertainty != "per_tensor":
            return Dswa(gamma, shares, self.weights(shares, U), U)
        by_tensor = {
            name: self.weights(shares, row.tolist()) for name, row in zip(names, tensor_means, strict=True)
        }
        return Dswa(gamma, shares, readings.overall_weights(by_tensor, counts), U, by_tensor)

    def weights(self, shares: Sequence[float], U: Sequence[float]) -> list[float]:
        """Eq. 18, with its largest omega scaled to 1; where U + epsilon is 0, its limit."""
        eps = self.eps * sum(U) / len(U) if self.eps_mode == "relative" else self.eps  # S11
        floors = [spread + eps for spread in U]
        least = min(floors)
        if least == 0:
            omega = [float(floor == 0) for floor in floors]
        else:
            omega = [least / floor for floor in floors]
        return self.cap(normalise([share * each for share, each in zip(shares, omega, strict=True)]))

    def cap(self, weights: list[float]) -> list[float]:
        return weights if self.max_weight is None else readings.cap_weights(weights, self.max_weight)

    def combine(self, state: ServerState, replies: Sequence[Reply], found: Dswa) -> Params:
        """Eq. 19. Buffers are averaged with the same weights."""
        items = [reply.params for reply in replies]
        if found.by_tensor:
            sent = layerwise_mean(items, {name: found.of(name) for name in items[0]})
        else:
            sent = mean(items, found.weights)
        if self.variational == "moment_match":
            pairs = [(mu, rho) for mu, rho in state.memory["variational"] if mu in sent]
            sent = sent.updated({rho: readings.match_rho(items, found.of(mu), mu, rho) for mu, rho in pairs})
        return state.params.updated(sent)

    def check(self, config: Config, objective: Objective) -> None:
        if self.variational == "moment_match" and config.model.stem != "variational":
            raise ConfigError(
                "method.variational is moment_match, but the model has no Gaussian weights. "
                "Set model.stem to variational, or leave method.variational out."
            )


@dataclass(frozen=True)
class Dswa:
    """What DSWA found in a round, each list in the order of the replies.

    U is empty when uncertainty is off; by_tensor is filled when every tensor has its own weights, and
    `weights` is then their mean over all parameters.
    """

    gamma: list[float]
    gamma_tilde: list[float]
    weights: list[float]
    U: list[float] = field(default_factory=list)
    by_tensor: dict[str, list[float]] = field(default_factory=dict)

    def of(self, name: str) -> list[float]:
        return self.by_tensor.get(name, self.weights)


def drop_empty(replies: Sequence[Reply]) -> list[Reply]:
    """Clients with training cases: Eq. 15 would give one without any the largest share (S10)."""
    return [reply for reply in replies if reply.num_examples > 0] or list(replies)


def scale_shares(
    sizes: Sequence[float], mode: Literal["complement", "proportional", "uniform"]
) -> list[float]:
    """gamma~ of Eq. 15, or what stands in its place (S9); one client alone has all.

    >>> scale_shares([900, 100], "complement")
    [0.1, 0.9]
    """
    if mode == "uniform" or len(sizes) == 1:
        return [1 / len(sizes)] * len(sizes)
    if mode == "proportional":
        return normalise(sizes)
    total = sum(sizes)
    return normalise([total - size for size in sizes])


def squared_distances(items: Sequence[Params], shares: Sequence[float], names: Sequence[str]) -> Tensor:
    """Sums of (w_i - w-)² for each tensor and client, (tensors, K) in float64 (Eqs. 16, 17).

    A piece of all clients is in memory at a time, read once for both equations. Distances are taken from the
    first client's tensor, so that equal models are at exactly 0.
    """

    def spread(piece: Piece) -> Tensor:
        sent = [piece.of(item) for item in items]
        first = sent[0].double()
        centre, room = torch.zeros_like(first), torch.empty_like(first)  # w- less the first
        for part, share in zip(sent[1:], shares[1:], strict=True):
            centre.add_(room.copy_(part).sub_(first), alpha=share)
        return torch.stack([room.copy_(part).sub_(first).sub_(centre).square_().sum() for part in sent])

    found = split_pieces(items[0], names)
    totals = {name: torch.zeros(len(items), dtype=torch.float64) for name in names}
    for piece, squares in zip(found, map_pieces(spread, found), strict=True):
        totals[piece.name] += squares.cpu()
    return torch.stack(list(totals.values()))


def check_concentration(weights: dict[str, float]) -> list[str]:
    """A sentence when one client has nearly all weight: 1/U has no bound (S12)."""
    client, most = max(weights.items(), key=lambda entry: entry[1])
    if len(weights) < 2 or most <= CONCENTRATED:
        return []
    return [
        f"client '{client}' has {most:.1%} of the aggregation weight. "
        "method.max_weight limits it; docs/methods/safcf.md says how this comes about."
    ]
