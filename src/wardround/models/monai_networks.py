"""Any network of MONAI by name: `monai:SegResNet`.

MONAI is imported only when such a network is asked for. Its networks tell nothing about their
inside, so they come without features.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from wardround.errors import ConfigError
from wardround.models.base import Output, Segmenter

PREFIX = "monai:"

# Networks differ in what they call the three numbers that the data decide.
DIMENSIONS = ("spatial_dims", "dimensions")
INPUTS = ("in_channels",)
OUTPUTS = ("out_channels", "num_classes")

# Five halvings, the most that MONAI's networks make at their defaults (SwinUNETR).
DIVISOR = 32


class MonaiSegmenter(Segmenter):
    """A MONAI network; of several outputs (deep supervision) the first counts."""

    has_features = False

    def __init__(
        self, network: nn.Module, *, name: str, in_channels: int, num_outputs: int, dimensions: int
    ) -> None:
        super().__init__(
            in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions, divisor=DIVISOR
        )
        self.name = name
        self.network = network

    def _output(self, x: Tensor) -> Output:
        logits = self.network(x)
        if isinstance(logits, list | tuple):
            logits = logits[0]
        if logits.dim() == x.dim() + 1:  # DynUNet stacks its outputs: (B, outputs, C, *spatial)
            logits = logits[:, 0]
        expected = (x.shape[0], self.num_outputs, *x.shape[2:])
        if logits.shape != expected:
            raise ConfigError(
                f"model.name is '{self.name}', which turns an image of {tuple(x.shape)} into "
                f"{tuple(logits.shape)}, not {expected}. It is no segmentation network; take another."
            )
        return Output(logits=logits)

    def _bottleneck(self, x: Tensor) -> Tensor:
        raise ConfigError(
            f"model.name is '{self.name}', whose encoder features are not known. "
            "Choose one of our own networks for a method or objective that compares features."
        )


def build_monai(
    name: str, arguments: Mapping[str, Any], *, in_channels: int, num_outputs: int, dimensions: int
) -> MonaiSegmenter:
    """Build `monai:<network>`; `arguments` are its constructor's, checked by name."""
    network_class = find_network(name)
    parameters = inspect.signature(network_class).parameters
    from_data = {
        parameter: value
        for names, value in ((DIMENSIONS, dimensions), (INPUTS, in_channels), (OUTPUTS, num_outputs))
        for parameter in names
        if parameter in parameters
    }
    if not any(n in from_data for n in INPUTS) or not any(n in from_data for n in OUTPUTS):
        raise ConfigError(
            f"model.name is '{name}', whose constructor takes no numbers of input and output channels. "
            "It is no segmentation network that we can build; take another."
        )
    check_arguments(name, arguments, parameters, from_data)
    try:
        network = network_class(**from_data, **arguments)
    except Exception as error:
        raise ConfigError(f"model.arguments: '{name}' cannot be built with them: {error}") from error
    return MonaiSegmenter(
        network, name=name, in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions
    )


def find_network(name: str) -> type[nn.Module]:
    """The class in `monai.networks.nets` that `monai:<network>` means."""
    from monai.networks import nets

    networks: dict[str, type[nn.Module]] = {
        key: value
        for key, value in vars(nets).items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    network = name.removeprefix(PREFIX)
    if network not in networks:
        hint = did_you_mean(network, networks, PREFIX)
        raise ConfigError(
            f"model.name is '{name}', which MONAI does not have.{hint} List: monai.networks.nets"
        )
    return networks[network]


def check_arguments(
    name: str,
    arguments: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    from_data: Mapping[str, int],
) -> None:
    """Refuse arguments the constructor does not know, those we set, and missing ones."""
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for argument in arguments:
        if argument in from_data:
            raise ConfigError(
                f"model.arguments.{argument} is {arguments[argument]}; leave it out, "
                f"the data and the objective decide it (here {from_data[argument]})."
            )
        if argument not in parameters and not takes_any:
            free = [p for p in parameters if p not in from_data]
            hint = did_you_mean(argument, free)
            raise ConfigError(
                f"model.arguments.{argument} is not known to '{name}'.{hint} It takes: {', '.join(free)}"
            )
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and key not in from_data
        and key not in arguments
    ]
    if missing:
        raise ConfigError(f"model.arguments: '{name}' also needs {', '.join(missing)}.")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """ " Did you mean 'x'?" for the nearest known word, capitals aside; nothing if none is near."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean '{prefix}{by_lower[near[0]]}'?" if near else ""
