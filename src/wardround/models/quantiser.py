"""Vector quantiser: every feature vector is replaced by the nearest of a few learned codes.

van den Oord et al., Neural Discrete Representation Learning, NeurIPS 2017. https://arxiv.org/abs/1711.00937

Symbols: z feature vector, e the code nearest to it, sg(.) stop-gradient.
Forward gives e; backward hands the gradient of e on to z as it is (straight-through). The codes learn from
the loss  mean (sg(z) - e)² + commitment * mean (z - sg(e))²  alone (Eq. 3), which exists in training only.

The codebook is a parameter like any other: it travels and is averaged.

>>> quantiser = VectorQuantiser(2, 1)
>>> quantiser.codebook.data = torch.tensor([[0.0], [1.0]])
>>> quantiser(torch.tensor([[0.2], [0.9]])).detach().tolist()
[[0.0], [1.0]]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wardround.precision import widen


class VectorQuantiser(nn.Module):
    """The nearest code of each vector, (..., width) -> (..., width).

    loss, usage: of the last forward pass in training, see `take_loss`; usage has "codebook_perplexity", the
    number of codes that would be this surprising if all were equally likely, and "codebook_share", the part
    of the codes that was chosen at all.
    revive: a code that no vector chose in so many training passes of one local training in a row moves onto
    a vector of the present pass, drawn from torch's global stream; 0 leaves it where it is. Clients revive
    on their own, so the mean model has the mean of their choices; and a revived code is one feature vector
    of one case, which then travels with the model.
    """

    idle: Tensor

    def __init__(self, codes: int, width: int, *, commitment: float = 0.25, revive: int = 0) -> None:
        super().__init__()
        self.commitment = commitment
        self.revive = revive
        self.codebook = nn.Parameter(torch.empty(codes, width))
        nn.init.uniform_(self.codebook, -1 / codes, 1 / codes)
        self.register_buffer("idle", torch.zeros(codes, dtype=torch.long), persistent=False)
        self.loss: Tensor | None = None
        self.usage: dict[str, Tensor] = {}

    def forward(self, z: Tensor) -> Tensor:
        vectors = z.reshape(-1, z.shape[-1]).to(self.codebook.dtype)
        index = self.nearest(vectors)
        e = F.embedding(index, self.codebook)
        if self.training and torch.is_grad_enabled():
            self._remember(vectors, e, index)
        through = e.detach() + (vectors - vectors.detach())  # exactly e, with the gradient of z
        return through.to(z.dtype).reshape(z.shape)

    def nearest(self, vectors: Tensor) -> Tensor:
        """Index of the code with the smallest Euclidean distance, (N, width) -> (N,).

        |z - e|² without |z|², which all codes share. In float64: neither autocast nor TF32 rounds that, and
        fresh codes lie so close together that rounding would choose among them.
        """
        with torch.no_grad():
            codes = widen(self.codebook)
            distances = codes.square().sum(dim=1) - 2 * widen(vectors) @ codes.T
            return distances.argmin(dim=1)

    def start_fit(self) -> None:
        """Forget the last training and its idle codes: one model serves many clients."""
        self.idle.zero_()
        self.loss, self.usage = None, {}

    def take_loss(self) -> Tensor | None:
        """The loss of the last forward pass in training, once; its graph can be used once."""
        loss, self.loss = self.loss, None
        return loss

    def _remember(self, vectors: Tensor, e: Tensor, index: Tensor) -> None:
        codebook, commitment = F.mse_loss(e, vectors.detach()), F.mse_loss(vectors, e.detach())
        self.loss = codebook + self.commitment * commitment  # Eq. 3
        with torch.no_grad():
            # compared, not counted with bincount, which waits for the GPU
            counts = (index[:, None] == torch.arange(len(self.codebook), device=index.device)).sum(dim=0)
            shares = counts / len(index)
            perplexity = torch.exp(-torch.xlogy(shares, shares).sum())
            self.usage = {"codebook_perplexity": perplexity, "codebook_share": (counts > 0).float().mean()}
            if self.revive:
                self._revive(vectors, counts > 0)

    def _revive(self, vectors: Tensor, used: Tensor) -> None:
        self.idle.add_(1).masked_fill_(used, 0)
        dead = self.idle >= self.revive
        drawn = torch.randint(len(vectors), (len(self.codebook),), device=vectors.device)
        self.codebook.copy_(torch.where(dead[:, None], vectors[drawn], self.codebook))
        self.idle.masked_fill_(dead, 0)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model has no part in the last pass, whose graph cannot be copied."""
        return self.__dict__ | {"loss": None}
