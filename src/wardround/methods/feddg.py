"""FedDG: Federated Domain Generalization on Medical Image Segmentation via Episodic Learning in
Continuous Frequency Space (ELCFS).

Liu et al., CVPR 2021. https://arxiv.org/abs/2103.06030

Clients share how bright and shaded their images are (low-frequency amplitudes), not where things are (phase).
Each step on a batch shall also help on the same batch in the style of other clients, and at the outlines of
structures the features of both styles shall agree.

Symbols: A, P amplitude and phase; L, b the window's relative and absolute half-width; lambda mixing share;
w parameters, w' after the inner step, beta its rate; l_in, l_out losses of a batch at w and restyled at w'.
What leaves a client: w_k; once, the lowest (2b+1)^d amplitudes of an eighth of its images.

Differs: lambda ~ U(0, 1) in a window of L = 0.01; the release takes over frequency 0 in full (`window: 0,
mixing: full`) and clips to 0..255, we to the range of each image and channel.
Differs: l_in and l_out are the run's objective; the paper has Dice.
Differs: an image and class without contour or ring is left out of the outline term; the release divides by 0.
Same: the outline term's gradient reaches the features at w too; this takes a third pass (`boundary: 0`: two).
Beware: a z-scored image has mean 0, so the amplitude of frequency 0 says nothing and only slow shading is
mixed. Below 1/L voxels the window is frequency 0 alone, and l_out sees the same image: raise `window`.
Beware: the outline term compares the cases of a batch with each other. Where `compute.micro_batch` or want
of memory cuts the batch, it sees one piece at a time; pieces count by their cases.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from wardround.clients import Client, Clients, Registration
from wardround.data.cases import Batch
from wardround.errors import ClientError
from wardround.losses.contrastive import cosines
from wardround.losses.objective import Context
from wardround.losses.segmentation import at_least_float32, targets
from wardround.messages import Message, ServerState
from wardround.methods.bank import Banked
from wardround.methods.frequency import (
    amplitude_window,
    check_amplitudes,
    clip_to_range,
    half_width,
    is_blank,
    restyle,
)
from wardround.params import Params
from wardround.training.learner import Loss, Step

log = logging.getLogger(__name__)

RING = 5  # voxels around a structure, counted along the axes
FAR = -1e30  # a similarity that counts for nothing, and whose gradient is finite


@dataclass(frozen=True)
class FedDG(Banked):
    """Learns from each batch also in the style of other clients.

    outer: whether other styles are learned at all, false gives FedAvg; window: L, the part of the spectrum
    that is style, as a share of the shortest side; 0 is the mean intensity alone; mixing: a random share of
    the other's amplitude, or all of it; bank_share: of how many of its images a client gives amplitudes, at
    least one; inner_learning_rate: beta, the rate of the inner step; clip: the limit of every gradient entry
    in the inner step; boundary: weight of the outline term, 0 leaves it out; temperature: similarities in
    the outline term are divided by it.
    """

    title = "FedDG (ELCFS)"
    paper = "Liu et al., CVPR"
    year = 2021
    link = "https://arxiv.org/abs/2103.06030"
    kind = "objective"
    sends = "low-frequency amplitudes of some images, once"
    needs_every_channel = "it lays the amplitudes of other clients' images over one's own"
    needs_every_class = "it contrasts the features inside and outside of an outline"
    needs_labels = needs_every_class
    needs = frozenset({"features", "decoder"})

    outer: bool = True
    window: Annotated[float, Field(ge=0, lt=0.5)] = 0.01
    mixing: Literal["uniform", "full"] = "uniform"
    bank_share: Annotated[float, Field(gt=0, le=1)] = 1 / 8
    inner_learning_rate: Annotated[float, Field(ge=0)] = 1e-3
    clip: Annotated[float, Field(gt=0)] = 100.0
    boundary: Annotated[float, Field(ge=0)] = 0.1
    temperature: Annotated[float, Field(gt=0)] = 0.05

    # Server

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        """A round with a bank; the first one warns of amplitudes that say nothing."""
        after, bank = super().run_round(state, clients), state.memory.get("bank", {})
        if state.round or not bank or not all(is_blank(given["amplitude"]) for given in bank.values()):
            return after
        warning = (
            "FedDG mixes the mean intensity alone, and that is 0 in all images given to the bank (z-scored). "
            "Set method.window above 1 / (voxels of the shortest side)."
        )
        log.warning(warning)
        return replace(after, notes={**after.notes, "warnings": [warning]})

    def check_contribution(self, given: Params, registration: Registration) -> str | None:
        if list(given) != ["amplitude"]:
            return f"amplitudes are called {list(given)}"
        shape, kind = given.spec("amplitude")
        if len(shape) < 3 or not all(shape) or shape[0] > registration.num_train or kind != torch.float32:
            return f"amplitudes {shape} of {registration.num_train} cases, as {kind}, cannot be"
        return check_amplitudes(given["amplitude"])

    # Client

    def uses_bank(self) -> bool:
        return self.outer

    def make_contribution(self, client: Client, message: Message) -> Params:
        """Amplitudes of a random part of the training images, without augmentation."""
        if not client.num_examples:
            return Params()
        order = torch.randperm(client.num_examples, generator=client.generator("bank"))
        some = order[: max(1, int(self.bank_share * len(order)))]
        return Params({"amplitude": self.amplitudes(client, some)})

    def amplitudes(self, client: Client, indices: Tensor) -> Tensor:
        """Of these training images, as large as training sees them: (N, C, 2b+1, ...)."""
        images = client.data.train.batch(indices, client.generator("patches")).image
        return amplitude_window(images, half_width(images.shape[2:], self.window))

    def styles(self, client: Client, message: Message) -> list[Tensor]:
        """The amplitudes of every other client that gave some of the own images' shape."""
        given = self.read_bank(client, message) if self.outer else {}
        own = self.amplitudes(client, torch.tensor([0])).shape[1:] if given else ()
        misfits = {name: tuple(given[name].shape[1:]) for name in given if given[name].shape[1:] != own}
        for name, shape in misfits.items():
            problem = (
                f"client '{client.name}': the amplitudes '{name}' are {shape}, but those of its own images "
                f"{tuple(own)}. Bring all images to one size."
            )
            if len(misfits) == len(given):
                raise ClientError(problem)
            log.warning(problem)  # one client's must not stop the others
        return [given[name] for name in given if name not in misfits]

    def train(self, client: Client, message: Message) -> Message:
        styles = self.styles(client, message)
        draw = client.generator("styles")

        def episode(step: Step) -> None:
            pieces: list[Outlines] = []
            step.backward(add=keep_outlines(pieces) if self.boundary else None)  # l_in at w
            shift = inner_step(step.model, self.inner_learning_rate, self.clip)
            other = replace(step.batch, image=self.restyle(step.batch.image, styles, draw))
            if self.boundary:
                self.outer_with_outlines(step, other, shift, pieces)
            else:
                with step.shifted(shift):
                    outer = step.backward(other, accumulate=True)
                step.context.note("outer", outer)
            step.apply()

        return Message(params=client.fit(start=message.params, step=episode if styles else None).params)

    def restyle(self, image: Tensor, styles: Sequence[Tensor], draw: torch.Generator) -> Tensor:
        """Each image with the amplitudes of a random image of a random other client mixed in."""
        giver = torch.randint(len(styles), (len(image),), generator=draw)
        place, share = torch.rand(2, len(image), generator=draw)
        count = torch.tensor([len(style) for style in styles])
        index = (count.cumsum(0) - count)[giver] + (place * count[giver]).long()
        if self.mixing == "full":
            share = torch.ones_like(share)
        amplitude = torch.cat(list(styles))[index.to(image.device)]
        return clip_to_range(restyle(image, amplitude, share.to(image)), like=image)

    def outer_with_outlines(
        self, step: Step, other: Batch, shift: Mapping[str, Tensor], pieces: Sequence[Outlines]
    ) -> None:
        """Leave the gradient of l_in + l_out, where l_out has the outline term, which depends on both passes.

        At w' it gives the gradient for w (first order) and for the vectors v of the inner pass; at w, the
        product of that gradient with v, held constant, carries it on. Every pass cuts a batch alike, so the
        pieces of the inner pass come back in their order; each is compared with itself restyled.
        """
        at_outer, at_inner = iter(pieces), iter(pieces)
        terms: list[Tensor] = []

        def outlines(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            piece = next(at_outer)
            vectors = outline_vectors(decoder_map(context), piece.masks)
            term = outline_contrast(piece.inner, vectors, piece.present, self.temperature)
            terms.append(term.detach() * context.share)
            return self.boundary * term

        def carried_on(model: nn.Module, batch: Batch, context: Context) -> Tensor:
            piece = next(at_inner)
            assert piece.inner.grad is not None
            gradient = piece.inner.grad / context.share  # has the share in it, and the product gets it again
            return (gradient * outline_vectors(decoder_map(context), piece.masks)).sum()

        with step.shifted(shift):
            outer = step.backward(other, add=outlines)
        with step.shifted({}):  # at w again; statistics and noted terms are from the first pass
            step.backward(add=carried_on, accumulate=True)
        step.context.note("outer", outer)
        step.context.note("outlines", torch.stack(terms).sum())


def inner_step(model: nn.Module, rate: float, clip: float) -> dict[str, Tensor]:
    """w' - w = -beta clamp(gradient, ±clip), from the gradients that are there."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: -rate * gradient.clamp(-clip, clip) for name, gradient in gradients.items()}


# The outline term


@dataclass(frozen=True)
class Outlines:
    """Of the cases that went through the network at once: the whole batch, or a piece of it.

    masks: (2, B, K, *spatial); inner: their vectors v in the inner pass, (2, B, K, F), which collect a
    gradient; present: which case has contour and ring of which class, (B, K).
    """

    masks: Tensor
    inner: Tensor
    present: Tensor


def keep_outlines(pieces: list[Outlines]) -> Loss:
    """A loss of 0 that keeps the outlines of each piece, whose features are gone when the next one comes."""

    def keep(model: nn.Module, batch: Batch, context: Context) -> Tensor:
        logits = context.output.logits
        masks = outline_masks(batch.label, logits.shape[1])
        inner = outline_vectors(decoder_map(context).detach(), masks).requires_grad_()
        pieces.append(Outlines(masks, inner, (masks.flatten(3).sum(dim=3) > 0).all(dim=0)))
        return logits.new_zeros(())

    return keep


def decoder_map(context: Context) -> Tensor:
    """The last decoder features of the latest pass, (B, F, *spatial)."""
    assert context.output.decoder is not None
    return context.output.decoder


def outline_masks(label: Tensor, num_outputs: int) -> Tensor:
    """Contour (a structure less its erosion) and ring (its dilations less itself): (2, B, K, *spatial).

    K: foreground classes. Beyond the image there is background.
    """
    mask = targets(label, num_outputs)[:, min(1, num_outputs - 1) :]
    border = [1, 1] * (mask.ndim - 2)
    eroded = 1 - F.pad(dilate(F.pad(1 - mask, border, value=1.0)), [-side for side in border])
    return torch.stack([mask - eroded, dilate(mask, RING) - mask])


def dilate(mask: Tensor, times: int = 1) -> Tensor:
    """A mask (B, K, *spatial) grown by a cross, `times` times: a diamond, no square."""
    pool = F.max_pool3d if mask.ndim == 5 else F.max_pool2d
    axes = range(mask.ndim - 2)
    for _ in range(times):
        along = [[3 if axis == chosen else 1 for axis in axes] for chosen in axes]
        grown = [pool(mask, size, stride=1, padding=[side // 2 for side in size]) for size in along]
        mask = torch.stack(grown).amax(dim=0)
    return mask


def outline_vectors(features: Tensor, masks: Tensor) -> Tensor:
    """Mean features inside each mask, 0 if it is empty: (B, F, *spatial), (2, B, K, ...) -> (2, B, K, F)."""
    with torch.autocast(features.device.type, enabled=False):
        features = at_least_float32(features).flatten(2).transpose(1, 2)  # (B, voxels, F)
        masks = masks.to(features.dtype).flatten(3)  # (2, B, K, voxels)
        return masks @ features / masks.sum(dim=3, keepdim=True).clamp_min(1)


def outline_contrast(inner: Tensor, outer: Tensor, present: Tensor, tau: float) -> Tensor:
    """NT-Xent with two classes, contours and rings of both passes, summed over foreground classes.

    -log e^{s(a,p)/τ} / (e^{s(a,p)/τ} + Σ_n e^{s(a,n)/τ}), mean over pairs a, p of one kind; n are all of the
    other. present: (B, K) which images have both; the others count nowhere, and none at all gives 0.
    """
    vectors = torch.cat([inner, outer], dim=1).permute(2, 0, 1, 3).flatten(1, 2)  # (K, 4B, F), contours first
    exists = present.T.repeat(1, 4)  # (K, 4B)
    is_ring = torch.arange(vectors.shape[1], device=vectors.device) >= vectors.shape[1] // 2
    same = is_ring[:, None] == is_ring
    both = exists[:, :, None] & exists[:, None]
    similarity = cosines(vectors, vectors) / tau  # (K, 4B, 4B)
    negatives = similarity.masked_fill(~(both & ~same), FAR).logsumexp(dim=2, keepdim=True)
    pairs = both & same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)
    losses = torch.where(pairs, F.softplus(negatives - similarity), 0.0)
    return (losses.sum(dim=(1, 2)) / pairs.sum(dim=(1, 2)).clamp_min(1)).sum()
