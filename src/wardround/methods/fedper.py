"""FedPer: Federated Learning with Personalization Layers.

Arivazhagan et al., arXiv 2019. https://arxiv.org/abs/1912.00818

The layers near the output stay at each client and are trained together with the layers below, which are
averaged: hospitals share what they see and decide on their own how to outline it.

Symbols: W_B base layers, averaged; W_Pk personalization layers of client k.
What leaves a client: W_B.

Differs: the paper cuts after the last blocks of a classifier; for a U-Net the cut is in front of the head,
or in front of the decoder: all that runs behind the encoder. A client that never trained has no W_P of its
own: it uses the initial one, which no client ever trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from wardround.config import Config
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.methods.base import Method
from wardround.models.base import head_names
from wardround.models.tap import decoder_names
from wardround.training.sketch import sketch_model


@dataclass(frozen=True)
class FedPer(Method):
    """Leaves the last layers at the clients and averages the rest.

    layers: what stays, the layer that makes the logits (head) or the decoder with it.
    """

    title = "FedPer"
    paper = "Arivazhagan et al., arXiv"
    year = 2019
    link = "https://arxiv.org/abs/1912.00818"
    kind = "personal"
    needs = frozenset({"state"})
    needs_labels = "the last layers of a client learn from its own labels alone"

    layers: Literal["head", "decoder"] = "head"

    def kept(self, model: nn.Module) -> list[str]:
        """State-dict names of W_P."""
        return head_names(model) if self.layers == "head" else decoder_names(model)

    def shared(self, model: nn.Module) -> list[str]:
        kept = set(self.kept(model))
        return [name for name in model.state_dict() if name not in kept]

    def check(self, config: Config, objective: Objective) -> None:
        model = sketch_model(config, objective) if self.layers == "decoder" else None
        if model is not None and not model.has_features:
            raise ConfigError(
                f"method.layers is 'decoder', but which layers of model '{config.model.name}' are its "
                "decoder is not known. Choose method.layers=head, or name the encoder's last module in "
                "model.features."
            )

    def warnings(self, config: Config, model: nn.Module) -> list[str]:
        if config.participation == 1.0:
            return []
        return [
            f"FedPer: a client that never took part is tested with the initial {self.layers}, which nobody "
            "trained; its scores mean nothing."
        ]
