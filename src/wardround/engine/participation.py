"""Who takes part in a round: the named clients, or a random share of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from wardround.config import Config
from wardround.data.federation import Federation
from wardround.errors import ConfigError
from wardround.methods.base import Method
from wardround.seeding import generator
from wardround.text import suggest


def check_participation(config: Config, method: Method, federation: Federation, names: Sequence[str]) -> None:
    """Refuse settings that no round could meet; names: everyone who can be asked."""
    share = config.participation
    if not isinstance(share, float):
        if method.pooled:
            raise ConfigError(
                f"participation names clients, but {method.title} trains on everybody's cases. "
                "Leave participation out."
            )
        for name in share:
            if name not in federation.names:
                raise ConfigError(
                    f"participation names '{name}', which is not a client.{suggest(name, federation.names)}"
                )
        if config.min_clients > len(set(share)):
            raise ConfigError(
                f"min_clients is {config.min_clients}, but participation names only {len(set(share))}."
            )
    if config.min_clients > len(names):
        raise ConfigError(f"min_clients is {config.min_clients}, but there are only {len(names)} clients.")


def choose_present(config: Config, method: Method, able: Sequence[str], round: int) -> list[str]:
    """Of the clients that can train, the named ones, or a random share chosen for this round."""
    share = config.participation
    if not isinstance(share, float):
        return [name for name in able if name in share]
    if method.pooled or share == 1.0:
        return list(able)
    order = torch.randperm(len(able), generator=generator(config.seed, "participation", round))
    return sorted(able[index] for index in order[: count_present(config, share, len(able))].tolist())


def count_present(config: Config, share: float, num_able: int) -> int:
    """How many clients a share comes to: rounded half up, at least min_clients."""
    return min(num_able, max(1, config.min_clients, math.floor(share * num_able + 0.5)))
