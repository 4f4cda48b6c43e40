"""Variational stem: a 1x1 convolution with random weights in front of any network.

SAFCF puts a "variational dense layer" before its U-Net. A dense layer on (*spatial, channels) acts on
the channels of every voxel alike, so it is a 1x1(x1) convolution; its weights are Gaussian.

Symbols: W = mu + sigma * eps, sigma = softplus(rho), eps ~ N(0, 1), each weight by itself.
Training draws weights from torch's global stream; evaluation, and so every frozen reference model,
uses the mean weights, which is the network with sigma = 0.

Differs: the paper's loss has no term that keeps sigma from shrinking to 0. Ours adds the divergence
from a prior, once a pass over the client's cases; `kl_weight: 0` is the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from wardround.models.base import Output, Segmenter
from wardround.models.norm import full_name
from wardround.settings import Settings

EVALUATION_SEED = 20  # of the draws when evaluation takes several: the same weights for every batch


class VariationalSettings(Settings):
    """The `model.variational:` part of a configuration; read when `model.stem` is variational.

    kl_weight: auto is 1 / (training cases of the client); 0 leaves the divergence out.
    prior: a standard normal, or the weights' distribution in the model this training started from.
    """

    channels: Annotated[int, Field(ge=1, description="channels the network sees")] = 8
    estimator: Annotated[
        Literal["flipout", "reparam"],
        Field(description="one weight draw a batch, with random signs for each case or as it is"),
    ] = "flipout"
    kl_weight: Annotated[
        float | Literal["auto"], Field(description="weight of the divergence from the prior")
    ] = "auto"
    prior: Annotated[
        Literal["standard", "global"], Field(description="N(0, 1), or the received model's distribution")
    ] = "standard"
    eval_samples: Annotated[
        int, Field(ge=1, description="1: mean weights, one pass; more: the mean logits of so many draws")
    ] = 1

    @field_validator("kl_weight")
    @classmethod
    def not_negative(cls, value: float | str) -> float | str:
        if value != "auto" and not 0 <= float(value) < float("inf"):
            raise ValueError(f"it is {value}, but must be auto, 0 or a positive number")
        return value


class VariationalConvolution(nn.Module):
    """A 1x1 convolution with Gaussian weights and a plain bias.

    prior_mu, prior_sigma: what the divergence is measured from; they do not travel.
    """

    prior_mu: Tensor
    prior_sigma: Tensor

    def __init__(
        self, source: int, width: int, *, estimator: Literal["flipout", "reparam"] = "flipout"
    ) -> None:
        super().__init__()
        self.estimator = estimator
        self.mu = nn.Parameter(torch.empty(width, source))
        self.rho = nn.Parameter(torch.empty(width, source))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.normal_(self.mu, 0.0, 0.1)
        nn.init.normal_(self.rho, -3.0, 0.1)  # sigma about 0.049
        self.register_buffer("prior_mu", torch.zeros(width, source), persistent=False)
        self.register_buffer("prior_sigma", torch.ones(width, source), persistent=False)

    @property
    def sigma(self) -> Tensor:
        return F.softplus(self.rho)

    def forward(self, x: Tensor) -> Tensor:
        """(B, source, *spatial) -> (B, width, *spatial); mean weights outside training."""
        if not self.training:
            return self._convolve(x, self.mu.expand(len(x), -1, -1))
        if self.estimator == "reparam":
            return self.draw(x)
        # Flipout (Wen et al., ICLR 2018): x*mu + ((x∘r)*dW)∘s, which is the weights mu + s rᵀ ∘ dW
        width, source = self.mu.shape
        r = random_signs((len(x), 1, source), self.mu)
        s = random_signs((len(x), width, 1), self.mu)
        return self._convolve(x, self.mu + s * r * (self.sigma * torch.randn_like(self.mu)))

    def draw(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The output under one draw of the weights, the same for all cases of the batch."""
        eps = torch.randn(self.mu.shape, dtype=self.mu.dtype, device=self.mu.device, generator=generator)
        return self._convolve(x, (self.mu + self.sigma * eps).expand(len(x), -1, -1))

    def _convolve(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each case with its own weights (B, width, source): one pass over the voxels."""
        y = torch.bmm(weights, x.flatten(2))
        y = y + self.bias[:, None].to(y.dtype)
        return y.reshape(*y.shape[:2], *x.shape[2:])

    def divergence(self) -> Tensor:
        """KL of the weights' distribution from the prior, summed over weights."""
        return gaussian_kl(self.mu, self.sigma, self.prior_mu, self.prior_sigma)

    @torch.no_grad()
    def keep_as_prior(self) -> None:
        """Measure the divergence from the present distribution from now on."""
        self.prior_mu.copy_(self.mu)
        self.prior_sigma.copy_(self.sigma)


class VariationalSegmenter(Segmenter):
    """Any network behind a variational stem; what the network offers, this offers."""

    def __init__(self, backbone: Segmenter, settings: VariationalSettings, *, in_channels: int) -> None:
        sizes = {"num_outputs": backbone.num_outputs, "dimensions": backbone.dimensions}
        super().__init__(in_channels=in_channels, divisor=backbone.divisor, **sizes)
        self.has_features = backbone.has_features
        self.is_deep = backbone.is_deep
        self.settings = settings
        self.stem = VariationalConvolution(in_channels, settings.channels, estimator=settings.estimator)
        self.backbone = backbone

    def forward_features(self, x: Tensor) -> Output:
        output = self.backbone.forward_features(self.stem(x))
        if not self.training and self.settings.eval_samples > 1 and not x.is_meta:
            draws = torch.Generator(x.device).manual_seed(EVALUATION_SEED)
            output.logits = self.sample(x, self.settings.eval_samples, draws).mean(dim=0)
        return output

    def encode(self, x: Tensor) -> Tensor:
        return self.backbone.encode(self.stem(x))

    def with_deep_logits(self, run: Callable[[], Output]) -> Output:
        return self.backbone.with_deep_logits(run)

    def sample(self, x: Tensor, num_samples: int = 10, generator: torch.Generator | None = None) -> Tensor:
        """Logits under several draws of the weights, (num_samples, B, num_outputs, *spatial).

        For uncertainty maps: call it in evaluation mode and look at the spread of the predictions.
        generator: where the draws come from; torch's global stream by default.
        """
        return torch.stack([self.backbone(self.stem.draw(x, generator)) for _ in range(num_samples)])

    def start_fit(self) -> None:
        """With `prior: global`, take the received distribution as the prior of this training."""
        self.backbone.start_fit()
        if self.settings.prior == "global":
            self.stem.keep_as_prior()

    def extra_losses(self, num_examples: int) -> dict[str, Tensor]:
        """The backbone's own, and the weighted divergence "kl"."""
        losses = self.backbone.extra_losses(num_examples)
        chosen = self.settings.kl_weight
        weight = 1 / num_examples if isinstance(chosen, str) else chosen
        return {**losses, "kl": weight * self.stem.divergence()} if weight else losses

    def notes(self) -> dict[str, Tensor]:
        return self.backbone.notes()

    def output_layer(self) -> nn.Module:
        return self.backbone.output_layer()

    @property
    def divisors(self) -> tuple[int, ...]:
        return self.backbone.divisors

    def padded_size(self, size: Sequence[int]) -> list[int]:
        return self.backbone.padded_size(size)


def gaussian_kl(mu: Tensor, sigma: Tensor, prior_mu: Tensor | float, prior_sigma: Tensor | float) -> Tensor:
    """Σ ln(σ₀/σ) + (σ² + (μ - μ₀)²) / 2σ₀² - ½, for factorised Gaussians.

    >>> one = torch.ones(3)
    >>> gaussian_kl(0 * one, one, 0.0, 1.0)
    tensor(0.)
    """
    ratio = sigma / prior_sigma
    shift = (mu - prior_mu) / prior_sigma
    return ((ratio.square() + shift.square() - 1) / 2 - ratio.log()).sum()


def random_signs(shape: Sequence[int], like: Tensor) -> Tensor:
    """+1 or -1 with equal chances, from torch's global stream."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device).bernoulli_(0.5) * 2 - 1


def variational_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """(mu, rho) state-dict names of every layer with Gaussian weights."""
    return [
        (full_name(prefix, "mu"), full_name(prefix, "rho"))
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, VariationalConvolution)
    ]
