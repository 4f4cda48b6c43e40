"""Networks we did not write: any of MONAI's by name, a user's own by import path.

`monai:SegResNet` is a class in `monai.networks.nets`; MONAI is imported only when one is asked for.
`mypackage.nets:MyNet` is in the current directory or installed: a subclass of `nn.Module` that takes
(B, channels, *spatial) to logits (B, outputs, *spatial), or to a list whose first entry that is. The numbers
that the data decide go to the arguments with one of the names below; a network without them must fit the data
as it is. A `Segmenter` is used as it is.

Of what a configuration names only classes are called, never functions: it may come from someone else. A
function that makes a network can be handed over in Python.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any
from weakref import WeakValueDictionary

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError
from torch import nn

from wardround.errors import ConfigError
from wardround.models.base import Segmenter
from wardround.models.probe import missing_package
from wardround.models.tap import TappedSegmenter
from wardround.plugins import Registry, accept_subclass, is_import_path
from wardround.settings import shown
from wardround.text import suggest

ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)
MONAI_PREFIX = "monai:"
MONAI_DIVISOR = 32  # five halvings, the most that MONAI's networks make at their defaults (SwinUNETR)

# Networks differ in what they call the three numbers that the data decide.
DIMENSIONS = ("spatial_dims", "dimensions")
INPUTS = ("in_channels", "n_channels", "in_chans")
OUTPUTS = ("out_channels", "num_classes", "n_classes", "num_outputs")


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


Maker = Callable[..., nn.Module]
"""A class, or a function that was handed over in Python."""

NETWORKS: Registry[Maker] = Registry(
    "network", {}, accept_subclass(nn.Module), "a subclass of torch.nn.Module"
)
_made: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()  # the last network of each function


def find_user_network(name: str) -> Maker:
    """What an import path, an entry point or an object's name means; refused with the reason if nothing."""
    return NETWORKS.find(name, "model.name")


def give_network(found: Any, name: str | None = None) -> str:
    """Take a class or a function that makes a network; the name by which this process knows it."""
    if isinstance(found, nn.Module):
        kind = type(found).__name__
        raise ConfigError(
            f"model is a network, an object of {kind}. Give the class ({kind}) or a function that makes one "
            f"(lambda in_channels, out_channels: {kind}(...)): server and clients each need their own."
        )
    if not callable(found) or (isinstance(found, type) and not issubclass(found, nn.Module)):
        raise ConfigError(
            f"model is {shown(found)}; give a name, a subclass of torch.nn.Module or a function that makes "
            "one."
        )
    if isinstance(found, type) and found.__module__.startswith("monai.networks.nets."):
        return MONAI_PREFIX + found.__name__
    return NETWORKS.give(found, name)


def is_user_network(name: str) -> bool:
    """Whether a name is not one of ours or of MONAI's."""
    return is_import_path(name) or name in NETWORKS.installed


# Building


def from_data(network_class: Callable[..., nn.Module], sizes: Mapping[str, int]) -> dict[str, int]:
    """The numbers that the data decide, by the names this network has for them."""
    parameters = parameters_of(network_class)
    names = {"dimensions": DIMENSIONS, "in_channels": INPUTS, "num_outputs": OUTPUTS}
    return {name: value for key, value in sizes.items() for name in names[key] if name in parameters}


def build_foreign(
    name: str,
    network_class: Maker,
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
    if not isinstance(network_class, type):
        check_made(name, network)
    if isinstance(network, Segmenter):
        return network
    return TappedSegmenter(network, name=name, **sizes, divisor=divisor, features=features)


def check_made(name: str, network: Any) -> None:
    """Refuse what a user's function made if it is no network, or the one it made before."""
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model: {name} returned {shown(network)}; it must return a torch.nn.Module.")
    if _made.get(name) is network:
        raise ConfigError(
            f"model: {name} returned the same network twice. Make a new one in each call: server and clients "
            "each need their own."
        )
    _made[name] = network


# Settings, checked against the signature of what builds the network, so that a mistake is a sentence when the
# configuration is read and no surprise in round 1


def parameters_of(builder: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The arguments a builder takes by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {key: p for key, p in inspect.signature(builder).parameters.items() if p.kind in by_name}


def takes_any(builder: Callable[..., Any]) -> bool:
    """Whether a builder takes arguments it does not name (**kwargs)."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(builder).parameters.values())


def check_arguments(
    name: str,
    builder: Callable[..., Any],
    arguments: Mapping[str, Any],
    from_data: Mapping[str, Any],
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """The user's arguments as the builder's types have them.

    Refused are those it does not know, those the data decide, values of another type, and missing ones.
    elsewhere: arguments that are settings of `model:` itself.
    """
    parameters = parameters_of(builder)
    for argument in arguments:
        if argument in from_data:
            raise ConfigError(
                f"model.arguments.{argument} is {arguments[argument]}; leave it out, "
                "the data and the objective decide it."
            )
        if argument in elsewhere:
            raise ConfigError(
                f"model.arguments.{argument}: write it as model.{argument}, as for all our networks."
            )
        if argument not in parameters and not takes_any(builder):
            free = [key for key in parameters if key not in from_data and key not in elsewhere]
            hint = suggest(argument, free)
            raise ConfigError(
                f"model.arguments.{argument} is not known to '{name}'.{hint} "
                f"It takes: {', '.join(free) or 'none'}"
            )
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and key not in from_data
        and key not in elsewhere
        and key not in arguments
    ]
    if missing:
        names = ", ".join((DIMENSIONS[0], INPUTS[0], OUTPUTS[0]))
        hint = "" if from_data else f" What the data decide is called {names}."
        raise ConfigError(f"model.arguments: '{name}' also needs {', '.join(missing)}.{hint}")
    types = types_of(builder)
    return {
        key: check_value(value, types.get(key), f"model.arguments.{key}") for key, value in arguments.items()
    }


def types_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """The annotated types of a builder's arguments; none where they cannot be read."""
    annotated = builder.__init__ if inspect.isclass(builder) else builder
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def check_value(value: Any, kind: Any, where: str) -> Any:
    """The value as this type has it (a YAML list becomes a tuple); a type we cannot read takes anything."""
    if kind is None:
        return value
    try:
        adapter = TypeAdapter(kind, config=ANY_TYPE)
    except (PydanticUserError, SchemaError):
        try:
            adapter = TypeAdapter(kind)  # settings of its own, such as those of a pydantic model
        except (PydanticUserError, SchemaError):
            return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reasons = [entry["msg"].removeprefix("Input should be ") for entry in error.errors()]
        raise ConfigError(
            f"{where} is {value!r}; it must be {' or '.join(dict.fromkeys(reasons))}."
        ) from None
