"""Any network of MONAI by name: `monai:SegResNet`.

MONAI is imported only when such a network is asked for.
"""

from __future__ import annotations

import inspect

from torch import nn

from wardround.errors import ConfigError
from wardround.models.signature import parameters_of
from wardround.models.user_networks import INPUTS, OUTPUTS
from wardround.text import suggest

PREFIX = "monai:"

# Five halvings, the most that MONAI's networks make at their defaults (SwinUNETR).
DIVISOR = 32


def find_network(name: str) -> type[nn.Module]:
    """The class in `monai.networks.nets` that `monai:<network>` means; refused if it cannot segment."""
    from monai.networks import nets

    networks: dict[str, type[nn.Module]] = {
        key: value
        for key, value in vars(nets).items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    network = name.removeprefix(PREFIX)
    if network not in networks:
        hint = suggest(network, networks, PREFIX)
        raise ConfigError(
            f"model.name is '{name}', which MONAI does not have.{hint} List: monai.networks.nets"
        )
    parameters = parameters_of(networks[network])
    if not any(key in parameters for key in INPUTS) or not any(key in parameters for key in OUTPUTS):
        raise ConfigError(
            f"model.name is '{name}', whose constructor takes no numbers of input and output channels. "
            "It is no segmentation network that we can build; take another."
        )
    return networks[network]
