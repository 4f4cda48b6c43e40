"""FSF3A: federated brain tumour segmentation with the CLSL objective and ASWA aggregation.

The paper's title is lost in the copy we hold; its formulas are restored from a damaged scan.

Clients minimise CLSL: Dice, agreement of the mask's edges with the truth's, and a penalty that
compares patches of their encoder features with those of the last local and of the received model.
The server takes the mean weighted by training cases (ASWA).

Symbols: y, p truth and probability; F features (pres of the trained, prev of the last local, serv of
the received model); s patch side; γ weight of the penalty, ω of the edges, τ temperature; n_i cases.
What leaves a client: w_i. The last local model stays there.

Differs: patches are compared by cosine (F4; `normalise: false` for the printed products), and Eqs.
9-11 are evaluated as a softplus, exact and finite where exp() overflows.
Differs: "previous" is the client's last model of the round before (F5; `prev_scope: epoch`).
Differs: γ and s are not given in the paper; 0.5 and 4 are ours.
Same: Eq. 12 is FedAvg of McMahan et al. (F1), so there is no separate `aswa`: `fsf3a` is it, and
`fedavg` with `objective: clsl` gives the same bytes. The paper's own "FedAvg" row must be
`fedavg` with `weighting: uniform`.
Same: with the printed pairs (F2) nothing pulls towards the received model: the gradient points along
prev, and serv only sets how far (F3). `pairing: moon` aligns with the received model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.aggregation.weights import by_samples
from wardround.config import Config
from wardround.data.cases import Batch
from wardround.losses.contrastive import SHORTEST
from wardround.losses.objective import Context, Objective
from wardround.losses.segmentation import at_least_float32, choose_classes, divide, prepare, sums
from wardround.messages import Reply, ServerState
from wardround.methods.base import Method

Pairing = Literal["paper", "moon", "anchor_pres"]
Border = Literal["valid", "pad"]


# Client: the CLSL objective


@dataclass(frozen=True)
class CLSL(Objective):
    """Dice, edge agreement and a patch-wise contrast of encoder features.

    gamma, omega: weights of contrast and edges, 0 leaves them out; tau: temperature of the contrast;
    patch: side of a patch in bottleneck voxels; stride: step between patches, null: no overlap;
    normalise: compare patches by cosine, not by their products;
    pairing: who is pulled to whom. paper: prev to pres, away from serv; moon: pres to serv, away from
    prev; anchor_pres: pres to prev, away from serv;
    prev_scope: "previous" is the model of the last round, or of the last local epoch;
    grad_border: differences inside the image only, or padded to all voxels;
    smooth_nr: eps_dice in the numerator too, so that two empty masks give 0;
    lcp_warmup_rounds: first rounds without the contrast.
    """

    title = "CLSL"
    paper = "FSF3A"
    counts_background = True  # by its edges
    needs = frozenset({"features", "global", "previous"})

    gamma: Annotated[float, Field(ge=0)] = 0.5
    omega: Annotated[float, Field(ge=0)] = 0.5
    tau: Annotated[float, Field(gt=0)] = 0.5
    patch: Annotated[int, Field(ge=1)] = 4
    stride: Annotated[int | None, Field(ge=1)] = None
    normalise: bool = True
    pairing: Pairing = "paper"
    prev_scope: Literal["round", "epoch"] = "round"
    grad_border: Border = "valid"
    eps_dice: Annotated[float, Field(gt=0)] = 1e-5
    smooth_nr: bool = False
    lcp_warmup_rounds: Annotated[int, Field(ge=0)] = 0

    def loss(self, model: nn.Module, batch: Batch, context: Context) -> Tensor:
        output = context.forward(model, batch.image)
        terms: dict[str, Tensor] = context.supervise(self.supervised, output.logits, batch.label)
        for name, samples in terms.items():
            context.note(name, samples.mean())
        loss = self.together(terms).mean()
        if self.gamma and context.round >= self.lcp_warmup_rounds:  # F6
            contrast = self.contrast(batch.image, context)
            context.note("contrast", contrast)
            loss = loss + self.gamma * contrast  # Eq. 1
        return loss

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        """L_SSC of each case: what can be judged without features."""
        return self.together(self.supervised(logits, label))

    def supervised(self, logits: Tensor, label: Tensor) -> dict[str, Tensor]:
        """L_Dice, and L_grad unless ω is 0, of each case."""
        p, y = choose_classes(*prepare(logits, label), include_background=False)
        terms = {"dice": linear_dice(p, y, self.eps_dice, self.smooth_nr)}
        if self.omega:
            terms["gradient"] = edge_disagreement(p, y, self.grad_border)
        return terms

    def together(self, terms: dict[str, Tensor]) -> Tensor:
        """L_SSC = L_Dice + ω L_grad (Eq. 8), (B,)."""
        if "gradient" not in terms:
            return terms["dice"]
        return terms["dice"] + self.omega * terms["gradient"]

    def contrast(self, image: Tensor, context: Context) -> Tensor:
        """L_LCP of the batch; the two frozen encoders see the same augmented images."""
        pres, serv = context.features, context.global_.encode(image)
        has_moved = self.prev_scope == "epoch" and context.epoch > 0
        prev = context.previous.encode(image) if context.has_previous or has_moved else serv  # F6
        contrast: Tensor = context.run_compiled(self.compare, prev, pres, serv)
        return contrast

    def compare(self, prev: Tensor, pres: Tensor, serv: Tensor) -> Tensor:
        """Eqs. 9-11; every case has as many patches."""
        patches = patch_contrast(
            prev,
            pres,
            serv,
            patch=self.patch,
            stride=self.stride,
            tau=self.tau,
            normalise=self.normalise,
            pairing=self.pairing,
        )
        return patches.mean()

    def constants(self, context: Context) -> tuple[object, ...] | None:
        has_moved = self.prev_scope == "epoch" and context.epoch > 0
        return context.round >= self.lcp_warmup_rounds, context.has_previous or has_moved

    def start_epoch(self, model: nn.Module, context: Context) -> None:
        """`prev_scope: epoch` (F5): the model as the last epoch left it becomes the previous one."""
        if self.prev_scope == "epoch" and context.epoch > 0:
            context.previous.copy_from(model)

    def warnings(self, config: Config) -> list[str]:
        found = []
        if self.gamma and config.model.norm == "batch":
            found.append(
                "objective clsl compares the trained network's features with those of frozen ones; BatchNorm "
                "makes them differ even where the weights are equal. Prefer model.norm instance or group."
            )
        once = config.local_epochs == 1 and config.local_steps is None
        if self.gamma and self.prev_scope == "epoch" and once:
            found.append("objective.prev_scope is epoch, but local_epochs is 1: it is the same as round.")
        return found


def linear_dice(p: Tensor, y: Tensor, eps: float, smooth_nr: bool = False) -> Tensor:
    """1 - 2Σyp / (Σ(y + p) + ε), mean over classes: (B, K, *spatial) -> (B,). Eq. 2.

    An empty truth gives 1 and no gradient, whatever is predicted (S2). smooth_nr: ε in the numerator
    too, which is the plain `dice` objective, bit for bit.
    """
    total, overlap = sums("per_sample", p + y, p * y)
    if smooth_nr:
        return divide(total - 2 * overlap, total + eps).mean(dim=1)
    return (1 - 2 * overlap / (total + eps)).mean(dim=1)


def edge_disagreement(p: Tensor, y: Tensor, border: Border = "valid") -> Tensor:
    """L_grad, mean over axes and classes: (B, K, *spatial) -> (B,). Eqs. 3-7."""
    axes = range(2, p.ndim)
    return torch.stack([axis_disagreement(p, y, axis, border) for axis in axes]).mean(dim=0).mean(dim=1)


def axis_disagreement(p: Tensor, y: Tensor, axis: int, border: Border) -> Tensor:
    """(1/N) Σ (∇y - ∇p)² along one axis, (B, K). Eqs. 3-6.

    border (F7): N counts the differences, or all voxels. An axis of one voxel has no edges: 0.
    """
    edges = torch.diff(y - p, dim=axis)
    count = edges[0, 0].numel() if border == "valid" else p[0, 0].numel()
    return edges.square().flatten(2).sum(dim=2) / max(count, 1)


def patch_contrast(prev: Tensor, pres: Tensor, serv: Tensor, **settings: Any) -> Tensor:
    """-log(sim_pos / (sim_pos + sim_neg)) of every patch: (B, C', *spatial) -> (B, patches). Eqs. 9-11."""
    positive, negative = patch_logits(prev, pres, serv, **settings)
    return F.softplus(negative - positive)


def patch_logits(
    prev: Tensor,
    pres: Tensor,
    serv: Tensor,
    *,
    patch: int,
    stride: int | None,
    tau: float,
    normalise: bool,
    pairing: Pairing,
) -> tuple[Tensor, Tensor]:
    """The logarithms of sim_pos (Eq. 9) and sim_neg (Eq. 10), for the chosen pairs (F2)."""
    prev, pres, serv = (at_least_float32(features) for features in (prev, pres, serv))
    pairs = {
        "paper": ((prev, pres), (prev, serv)),
        "moon": ((pres, serv), (pres, prev)),
        "anchor_pres": ((pres, prev), (pres, serv)),
    }
    side = min(patch, *pres.shape[-2:])  # F8
    step = stride or side
    compare = patch_cosines if normalise else patch_products  # F4
    positive, negative = (compare(a, b, side, step) / tau for a, b in pairs[pairing])
    return positive, negative


def patch_products(a: Tensor, b: Tensor, side: int, step: int) -> Tensor:
    """a·b over the channels and voxels of each patch, in the order d, i, j: (B, patches).

    patch(d, i, j) = F[:, d, i:i+s, j:j+s]: a patch lies in one depth slice. Channels are summed
    first, so that no patch is ever copied out.
    """
    products = (a * b).sum(dim=1)  # (B, C', D', H', W') -> (B, D', H', W')
    windows = products.unfold(-2, side, step).unfold(-2, side, step)  # (B, D', M, N, s, s)
    return windows.sum(dim=(-1, -2)).flatten(1)


def patch_cosines(a: Tensor, b: Tensor, side: int, step: int) -> Tensor:
    """`patch_products` of patches of length one. An empty patch has the cosine 0, and no gradient."""
    squares = patch_products(a, a, side, step), patch_products(b, b, side, step)
    lengths = [square.clamp_min(SHORTEST**2).sqrt() for square in squares]
    has_direction = (squares[0] > SHORTEST**2) & (squares[1] > SHORTEST**2)
    cosines = patch_products(a, b, side, step) / (lengths[0] * lengths[1])
    return torch.where(has_direction, cosines, 0.0)


# Server: ASWA


@dataclass(frozen=True)
class FSF3A(Method):
    """Averages client models by their training cases; clients minimise CLSL."""

    title = "FSF3A"
    paper = "FSF3A (CLSL and ASWA)"
    objective = "clsl"

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return by_samples(replies)  # n_i / N_total, Eq. 12
