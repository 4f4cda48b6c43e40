"""Krum: Machine Learning with Adversaries, Byzantine Tolerant Gradient Descent.

Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017.
https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html

The server keeps the one client model that lies nearest to its neighbours; a model that was tampered with
is far from the honest crowd. Multi-Krum averages the m best, which wastes less of the clients' work.

Symbols: K replies, f of them may be bad; s_i the sum of the K - f - 2 smallest squared distances from
model i to others; m models that are kept.
What leaves a client: its model. Numbers of cases play no part.
What the server needs: all models at once, a piece of each in memory at a time.

Differs: models instead of gradients; distances over the tensors that learn. The chosen models bring their
running statistics along.
Differs: with fewer than 2f + 3 replies the rule promises nothing; the median is taken, and records say so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from wardround.aggregation.mean import collect_params, mean
from wardround.aggregation.robust import find_lowest, krum_scores, median_cut, squared_distances, trimmed_mean
from wardround.aggregation.weights import map_to_clients
from wardround.clients import Clients
from wardround.config import Config
from wardround.losses.objective import Objective
from wardround.messages import Message, ServerState
from wardround.methods.base import Method
from wardround.methods.trimmed_mean import refuse_pooled

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Krum(Method):
    """Keeps the client model nearest to its neighbours.

    f: how many clients may be bad; 2f + 3 must answer, else the median of all models is taken.
    """

    title = "Krum"
    paper = "Blanchard et al., NeurIPS"
    year = 2017
    link = "https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html"
    kind = "robust"
    secure_sum = False
    needs_each_model = "it measures distances between the clients' own models"

    f: Annotated[int, Field(ge=0)] = 1

    def run_round(self, state: ServerState, clients: Clients) -> ServerState:
        replies = clients.ask("train", Message(params=state.params))
        sent, num = collect_params(replies), len(replies)
        if num < 2 * self.f + 3:
            params, weights = trimmed_mean(sent, median_cut(num))
            warning = (
                f"{self.title}: {num} replies are fewer than 2f + 3 = {2 * self.f + 3}, so the median was "
                "taken instead. Lower method.f, or choose median."
            )
            log.warning("round %d: %s", state.round + 1, warning)
            notes = self.notes(replies, weights, warnings=[warning])
        else:
            scores = krum_scores(squared_distances(sent, state.trainable), self.f)
            chosen = find_lowest(scores, self.num_kept(num))
            params = mean([sent[k] for k in chosen])
            weights = [1 / len(chosen) if k in chosen else 0.0 for k in range(num)]
            notes = self.notes(replies, weights, krum_scores=map_to_clients(replies, scores))
        return state.next(params=state.params.updated(params), notes=notes)

    def num_kept(self, num_replies: int) -> int:
        return 1

    def check(self, config: Config, objective: Objective) -> None:
        refuse_pooled(config)  # for the median


@dataclass(frozen=True)
class MultiKrum(Krum):
    """Averages the m client models nearest to their neighbours.

    f: how many clients may be bad; 2f + 3 must answer, else the median of all models is taken.
    m: how many models are averaged, never more than K - f; left out, K - f. f = 0 gives FedAvg with
    equal weights.
    """

    title = "Multi-Krum"

    m: Annotated[int | None, Field(ge=1)] = None

    def num_kept(self, num_replies: int) -> int:
        most = num_replies - self.f
        return most if self.m is None else min(self.m, most)
