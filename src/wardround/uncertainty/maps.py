"""Uncertainty of one scan: maps of every voxel, one number for the case, one for each structure.

A model gives logits once (one pass) or several times (posterior samples, dropout, an ensemble). What
can be said depends on that, and on whether the logits are evidence:

kind         passes   total                  aleatoric          epistemic
entropy      one      entropy of p           -                  -
several      more     entropy of the mean    mean entropy       the rest (mutual information)
evidential   any      the three of a Dirichlet (`decompose`), averaged over passes

Temperature. p_T ∝ p^(1/T), whatever made p: for logits that is softmax(z / T), for a Dirichlet it acts on
the expected probabilities ρ̄ alone. The Dirichlet's own three maps stay as they are: they say how much
evidence there is, which one number fitted afterwards must not change. The label of a single pass does not
change with T. That of several passes may, because each is tempered before the mean; so may a mask made from
probabilities that were resampled.

>>> from wardround.losses.objective import Dice
>>> scan = Accumulator(Dice())
>>> scan.add(torch.tensor([[0.0, 4.0]]))
>>> found = scan.result()
>>> found.label.tolist(), [round(value, 4) for value in found.total.tolist()], found.kind
([0, 1], [0.6931, 0.0901], 'entropy')
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from wardround.losses.objective import Objective
from wardround.models.variational import VariationalConvolution, VariationalSegmenter

VOXELS_AT_ONCE = 2**20  # bounds what a volume needs beside its maps; a batch of 2D images is one piece

Part = Literal["total", "epistemic", "aleatoric"]


# A Dirichlet: α (B, C, *spatial) are its parameters at each voxel, S their sum, ρ̄ = α / S (FedEvi, Eqs. 1-5).
# Aleatoric uncertainty is the entropy to expect of the class probabilities: what the scan leaves open.
# Epistemic uncertainty is the rest of the total: what more training cases could settle.


@dataclass(frozen=True)
class Uncertainty:
    """Maps (B, *spatial) in nats, float64; total = epistemic + aleatoric (Eq. 3)."""

    total: Tensor
    epistemic: Tensor
    aleatoric: Tensor


def decompose(alpha: Tensor, *, voxels_at_once: int = VOXELS_AT_ONCE) -> Uncertainty:
    """Uncertainty of every voxel, worked out piece by piece (E10).

    All in float64: at logit 15, float32 is wrong by a factor of five (E3).

    >>> flat = decompose(torch.ones(1, 2, 1))
    >>> [round(part.item(), 4) for part in (flat.total, flat.epistemic, flat.aleatoric)]
    [0.6931, 0.1931, 0.5]
    """
    shape = (alpha.shape[0], *alpha.shape[2:])
    voxels = alpha.flatten(2)  # (B, C, *spatial) -> (B, C, V)
    step = max(1, voxels_at_once // len(voxels))
    pieces = [entropies(voxels[..., start : start + step]) for start in range(0, voxels.shape[2], step)]
    total, aleatoric = (torch.cat(maps, dim=1).reshape(shape) for maps in zip(*pieces, strict=True))
    epistemic = (total - aleatoric).clamp_min(0)  # Eq. 4 with the sign of Eq. 3 (E1)
    return Uncertainty(total, epistemic, aleatoric)


def entropies(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The entropy of the expected probabilities, and the expected entropy; (B, C, V) -> (B, V) each."""
    alpha = alpha.double()
    total = alpha.sum(dim=1, keepdim=True)
    mean = alpha / total  # Eq. 2
    of_mean = -(mean * mean.log()).sum(dim=1)  # Eq. 3
    expected = (mean * (torch.digamma(total + 1) - torch.digamma(alpha + 1))).sum(dim=1)  # Eq. 5
    return of_mean, expected


def case_means(values: Tensor) -> Tensor:
    """One number a case, the mean over its voxels (E2): (B, *spatial) -> (B,)."""
    return values.flatten(1).mean(dim=1)


# One scan


@dataclass(frozen=True)
class Predicted:
    """The combined result of all passes over one scan.

    probabilities: (classes, *spatial) float32, background first, their mean over passes;
    label: (*spatial) uint8; total, epistemic, aleatoric: (*spatial) float32 in nats, the last two None
    where one plain pass cannot separate them; kind: source of the uncertainty.
    """

    probabilities: Tensor
    label: Tensor
    total: Tensor
    epistemic: Tensor | None
    aleatoric: Tensor | None
    kind: str

    def part(self, name: Part) -> Tensor | None:
        """A map by its name."""
        found: Tensor | None = getattr(self, name)
        return found


class Accumulator:
    """One scan: add the logits of one or several passes, then ask for the result.

    Sums are kept, not passes, so memory does not grow with their number. Everything stays on the device
    of the first logits. kind: a name for the result ("samples", "dropout", "ensemble"); by default it is
    what logits and number of passes imply.
    """

    def __init__(self, objective: Objective, *, temperature: float = 1.0, kind: str | None = None) -> None:
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature}; it must be a positive number")
        self._objective = objective
        self._temperature = temperature
        self._kind = kind
        self._dirichlet = is_dirichlet(objective)
        self._passes = 0
        self._label: Tensor | None = None  # of a single pass, which decides by its logits
        self._probabilities = torch.empty(0)
        self._parts: dict[str, Tensor] = {}

    def add(self, logits: Tensor) -> None:
        """One more pass: (num_outputs, *spatial)."""
        with torch.no_grad():
            logits = logits.detach()
            if not self._passes:
                self._begin(logits)
            elif logits.shape[1:] != self._probabilities.shape[1:]:
                found, first = tuple(logits.shape[1:]), tuple(self._probabilities.shape[1:])
                raise ValueError(f"a pass has the shape {found}, the first one had {first}")
            else:
                self._label = None
            self._passes += 1
            flat = logits.to(self._probabilities.device).flatten(1)  # (num_outputs, V)
            probabilities = self._probabilities.flatten(1)
            parts = {name: values.flatten() for name, values in self._parts.items()}
            for start in range(0, flat.shape[1], VOXELS_AT_ONCE):
                piece = slice(start, start + VOXELS_AT_ONCE)
                batch = flat[None, :, piece]  # (1, num_outputs, V)
                p = tempered(self._objective, batch, self._temperature)
                probabilities[:, piece] += p[0].to(torch.float32)
                if self._dirichlet:
                    found_parts = decompose(self._objective.alpha(batch.double()))  # type: ignore[attr-defined]
                    for name, values in parts.items():
                        values[piece] += getattr(found_parts, name)[0].to(torch.float32)
                else:
                    parts["aleatoric"][piece] += entropy(p)[0].to(torch.float32)

    def _begin(self, logits: Tensor) -> None:
        spatial = logits.shape[1:]
        self._label = self._objective.predict(logits[None])[0]
        classes = self._objective.count_classes(logits.shape[0])
        self._probabilities = torch.zeros(classes, *spatial, dtype=torch.float32, device=logits.device)
        names = ("total", "epistemic", "aleatoric") if self._dirichlet else ("aleatoric",)
        self._parts = {name: self._probabilities.new_zeros(spatial) for name in names}

    def result(self) -> Predicted:
        """The combined result of all passes so far."""
        if not self._passes:
            raise ValueError("no pass was added")
        n = self._passes
        mean = self._probabilities / n
        label = self._label if self._label is not None else self._objective.decide(mean[None])[0]
        parts = {name: values / n for name, values in self._parts.items()}
        if self._dirichlet:
            kind = self._kind or "evidential"
            return Predicted(mean, label, parts["total"], parts["epistemic"], parts["aleatoric"], kind)
        if n == 1:
            return Predicted(mean, label, parts["aleatoric"], None, None, self._kind or "entropy")
        total = torch.empty_like(parts["aleatoric"])
        flat, voxels = total.flatten(), mean.flatten(1)
        for start in range(0, len(flat), VOXELS_AT_ONCE):
            piece = slice(start, start + VOXELS_AT_ONCE)
            flat[piece] = entropy(voxels[None, :, piece])[0]
        aleatoric = torch.minimum(parts["aleatoric"], total)  # rounding alone could make it larger
        return Predicted(mean, label, total, total - aleatoric, aleatoric, self._kind or "several")


def is_dirichlet(objective: Objective) -> bool:
    """Whether logits are evidence: the objective turns them into Dirichlet parameters."""
    return callable(getattr(objective, "alpha", None))


def scores(objective: Objective, logits: Tensor) -> Tensor:
    """What softmax turns into the probabilities, float64: (B, classes, *spatial).

    The logits, with a zero for the background where there is only one; for a Dirichlet, and for whatever
    else has its own way to probabilities, ln p.
    """
    if type(objective).probabilities is not Objective.probabilities:
        return objective.probabilities(logits.double()).double().log()
    logits = logits.double()
    return torch.cat([torch.zeros_like(logits), logits], dim=1) if logits.shape[1] == 1 else logits


def tempered(objective: Objective, logits: Tensor, temperature: float) -> Tensor:
    """Class probabilities ∝ p^(1/T), (B, classes, *spatial)."""
    if temperature == 1:
        return objective.probabilities(logits)
    return torch.softmax(scores(objective, logits) / temperature, dim=1)


def entropy(probabilities: Tensor) -> Tensor:
    """-Σ p ln p in nats over the classes, with 0 ln 0 = 0: (B, classes, *spatial) -> (B, *spatial)."""
    total: Tensor = torch.special.entr(probabilities).sum(dim=1)
    return total


# What a model supports


def sources(model: nn.Module, objective: Objective) -> tuple[str, ...]:
    """Kinds of uncertainty this model has without being trained again, best first.

    evidential: one pass, all three maps; samples: weights of the variational stem are drawn; dropout:
    its layers stay on; entropy: any model. Ensembles come from several models.
    """
    offered = {
        "evidential": is_dirichlet(objective),
        "samples": any(isinstance(module, VariationalConvolution) for module in model.modules()),
        "dropout": bool(dropout_layers(model)),
        "entropy": True,
    }
    return tuple(kind for kind, has in offered.items() if has)


def dropout_layers(model: nn.Module) -> list[nn.Module]:
    """Dropout layers with a probability above 0."""
    return [module for module in model.modules() if isinstance(module, _DropoutNd) and module.p > 0]


@contextmanager
def sampling(model: nn.Module, kind: str) -> Iterator[None]:
    """Inside, each forward pass in evaluation mode is one more sample of this kind.

    samples: the stem draws weights, the same for all cases of a batch; dropout: its layers are on. All
    else is as in evaluation, so running statistics stay. Draws come from torch's global stream: seed it
    to have the same samples again. Other kinds change nothing.
    """
    with ExitStack() as stack:
        if kind == "samples":
            for module in model.modules():
                if isinstance(module, VariationalConvolution):
                    stack.enter_context(_drawing(module))
                elif isinstance(module, VariationalSegmenter):
                    stack.enter_context(_one_draw(module))
        if kind == "dropout":
            stack.enter_context(_active(model))
        yield


@contextmanager
def _drawing(stem: VariationalConvolution) -> Iterator[None]:
    stem.forward = stem.draw  # type: ignore[method-assign]
    try:
        yield
    finally:
        del stem.forward


@contextmanager
def _one_draw(model: VariationalSegmenter) -> Iterator[None]:
    """`eval_samples` would average several draws inside one pass."""
    settings = model.settings
    model.settings = settings.model_copy(update={"eval_samples": 1})
    try:
        yield
    finally:
        model.settings = settings


@contextmanager
def _active(model: nn.Module) -> Iterator[None]:
    """Dropout active, even if `model.eval()` is called inside."""
    hooks = []
    kept = {layer: layer.training for layer in dropout_layers(model)}

    def on(layer: nn.Module, inputs: object) -> None:
        layer.training = True

    try:
        hooks = [layer.register_forward_pre_hook(on) for layer in kept]
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer, flag in kept.items():
            layer.training = flag


# One number


def case_uncertainty(predicted: Predicted) -> float:
    """How much of the mask is in doubt, 0 to 1: 1 - 2Σpŷ / (Σp² + Σŷ) over foreground classes and voxels.

    p: the probability of a class, ŷ: whether it was predicted. That is the Dice loss of the prediction
    against the model's own probabilities. Background does not count, and squares keep the faint
    probabilities of many distant voxels from adding up to a structure. Σ run over classes as well, so
    two classes mixed up count and an absent one does not. Where nothing is predicted, it is the largest
    probability of any foreground: the doubt that the scan is empty.

    It ranks cases and does not estimate Dice: the truth may differ from the mask more than the model knows.

    Chosen among a dozen on phantoms of a softmax model, where fresh phantoms confirm it; for an evidential
    model an entropy ranks cases better (docs/explanation/uncertainty.md has both).
    """
    p, label = predicted.probabilities[1:], predicted.label
    chosen = [label == number for number in range(1, len(p) + 1)]
    return _doubt(p, torch.stack(chosen))


def structure_uncertainty(predicted: Predicted) -> dict[int, float]:
    """The same for each foreground class by itself: class -> 0 to 1."""
    p, label = predicted.probabilities, predicted.label
    return {number: _doubt(p[number], label == number) for number in range(1, len(p))}


def _doubt(p: Tensor, chosen: Tensor) -> float:
    size = int(chosen.sum())
    if not size:
        return float(p.max()) if p.numel() else 0.0
    agreed = (p * chosen).sum(dtype=torch.float64)
    spread = p.square().sum(dtype=torch.float64)
    return float((1 - 2 * agreed / (spread + size)).clamp(0, 1))


def case_mean(predicted: Predicted, part: Part = "epistemic") -> float | None:
    """A map in one number: its mean over the scan, each voxel weighted by its probability of foreground.

    In nats; None where the passes do not have that map.
    """
    values = predicted.part(part)
    if values is None:
        return None
    weights = (1 - predicted.probabilities[0]).double().clamp_min(1e-12)
    return float((values * weights).sum() / weights.sum())
