"""Networks we did not write: any of MONAI's by name, a user's own by import path.

`monai:SegResNet` is a class in `monai.networks.nets`; MONAI is imported only when one is asked for.
`mypackage.nets:MyNet` is in the current directory or installed: a subclass of `nn.Module` that takes
(B, channels, *spatial) to logits (B, outputs, *spatial), or to a list whose first entry that is. The numbers
that the data decide go to the arguments with one of the names below; a network without them must fit the data
as it is. A `Segmenter` is used as it is.

Only classes are called, never functions: a configuration may come from someone else.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from wardround.errors import ConfigError
from wardround.models.base import Segmenter
from wardround.models.probe import missing_package
from wardround.models.signature import check_arguments, parameters_of
from wardround.models.tap import TappedSegmenter
from wardround.text import suggest

MONAI_PREFIX = "monai:"
MONAI_DIVISOR = 32  # five halvings, the most that MONAI's networks make at their defaults (SwinUNETR)

# Networks differ in what they call the three numbers that the data decide.
DIMENSIONS = ("spatial_dims", "dimensions")
INPUTS = ("in_channels", "n_channels", "in_chans")
OUTPUTS = ("out_channels", "num_classes", "n_classes", "num_outputs")


class NotHere(ConfigError):
    """The network's module is not on this machine, or not where the command was started."""


def find_monai_network(name: str) -> type[nn.Module]:
    """The class in `monai.networks.nets` that `monai:<network>` means; refused if it cannot segment."""
    from monai.networks import nets

    networks: dict[str, type[nn.Module]] = {
        key: value
        for key, value in vars(nets).items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    network = name.removeprefix(MONAI_PREFIX)
    if network not in networks:
        hint = suggest(network, networks, MONAI_PREFIX)
        raise ConfigError(
            f"model.name is '{name}', which MONAI does not have.{hint} List: monai.networks.nets"
        )
    parameters = parameters_of(networks[network])
    if not any(key in parameters for key in INPUTS) or not any(key in parameters for key in OUTPUTS):
        raise ConfigError(
            f"model.name is '{name}', whose constructor takes no numbers of input and output channels. "
            "It is not a segmentation network that we can build; choose another."
        )
    return networks[network]


def is_import_path(name: str) -> bool:
    """Whether a model's name says where to import it from."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def find_user_network(name: str) -> type[nn.Module]:
    """The class an import path means; refused with the reason if there is none."""
    path, _, attribute = name.partition(":")
    found: Any = import_from_here(path, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = suggest(part, [key for key, value in vars(found).items() if is_network(value)])
            raise ConfigError(f"model.name is '{name}', but {path} has no '{part}'.{hint}")
        found = getattr(found, part)
    if not is_network(found):
        what = f"a {type(found).__name__}" if not inspect.isclass(found) else "another class"
        raise ConfigError(
            f"model.name is '{name}', which is {what}, not a network. Name a subclass of torch.nn.Module."
        )
    network: type[nn.Module] = found
    return network


def is_network(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def import_from_here(path: str, name: str) -> Any:
    try:
        with current_directory_first():
            return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or path
        if path == missing or path.startswith(f"{missing}."):
            raise NotHere(
                f"model.name is '{name}', but there is no module '{missing}' in {Path.cwd()} or among the "
                "installed packages. Start wardround in the folder that has it, or install it."
            ) from None
        raise ConfigError(
            f"model.name is '{name}', whose module {path} needs '{missing}', which is not installed."
        ) from None
    except (Exception, SystemExit) as error:  # whatever the user's file does wrong; a script may also exit
        raise ConfigError(
            f"model.name is '{name}', but {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error


@contextmanager
def current_directory_first() -> Iterator[None]:
    """Let an import find files in the current directory, as `python` does and an installed command does not.

    Afterwards the directory stays last, for what the user's code imports later.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


# Building


def from_data(network_class: Callable[..., nn.Module], sizes: Mapping[str, int]) -> dict[str, int]:
    """The numbers that the data decide, by the names this network has for them."""
    parameters = parameters_of(network_class)
    names = {"dimensions": DIMENSIONS, "in_channels": INPUTS, "num_outputs": OUTPUTS}
    return {name: value for key, value in sizes.items() for name in names[key] if name in parameters}


def build_foreign(
    name: str,
    network_class: type[nn.Module],
    arguments: Mapping[str, Any],
    *,
    in_channels: int,
    num_outputs: int,
    dimensions: int,
    divisor: int | None = None,
    features: str | None = None,
) -> Segmenter:
    """The network, with a view of its inside; arguments are checked against its signature."""
    sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "dimensions": dimensions}
    fixed = from_data(network_class, sizes)
    arguments = check_arguments(name, network_class, arguments, fixed)
    try:
        network = network_class(**fixed, **arguments)
    except (Exception, SystemExit) as error:
        if (package := missing_package(error)) is not None:
            raise ConfigError(
                f"model.name is '{name}', which needs the package '{package}'. Install it."
            ) from error
        raise ConfigError(f"model.arguments: '{name}' cannot be built with them: {error}") from error
    if isinstance(network, Segmenter):
        return network
    return TappedSegmenter(network, name=name, **sizes, divisor=divisor, features=features)
