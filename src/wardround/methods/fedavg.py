"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan et al., AISTATS 2017. https://arxiv.org/abs/1602.05629

Clients train the received model on their own cases; the server takes the mean of what comes back.

Symbols: w global model, w_k model of client k, n_k its training cases.
What leaves a client: w_k.
Differs: `weighting: uniform` gives the plain mean that some papers call FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from wardround.aggregation.weights import by_samples, uniform
from wardround.messages import Reply, ServerState
from wardround.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Averages client models.

    weighting: by number of training cases (the paper), or all clients alike.
    """

    title = "FedAvg"
    paper = "McMahan et al., AISTATS"
    year = 2017
    link = "https://arxiv.org/abs/1602.05629"

    weighting: Literal["samples", "uniform"] = "samples"

    def weigh(self, state: ServerState, replies: Sequence[Reply]) -> list[float]:
        return by_samples(replies) if self.weighting == "samples" else uniform(replies)  # w = sum n_k/n w_k
