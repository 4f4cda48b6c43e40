"""The networks: MODELS lists ours, `monai:Network` names any of MONAI's, `package.module:Class` a user's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from wardround.errors import ConfigError
from wardround.models.base import Segmenter
from wardround.models.foreign_networks import (
    MONAI_DIVISOR,
    MONAI_PREFIX,
    Maker,
    build_foreign,
    check_arguments,
    check_value,
    find_monai_network,
    find_user_network,
    from_data,
    is_user_network,
    parameters_of,
    types_of,
)
from wardround.models.norm import Norm
from wardround.models.variational import VariationalSegmenter, VariationalSettings
from wardround.settings import Settings
from wardround.text import suggest


class ModelSettings(Settings):
    """The `model:` part of a configuration. None means the network's own default."""

    name: Annotated[
        str, Field(description="see `wardround models`; or monai:<network>, package.module:Class")
    ] = "unet2d"
    base_filters: Annotated[int | None, Field(ge=1, description="channels of the first convolution")] = None
    levels: Annotated[int | None, Field(ge=2, le=10, description="resolutions, the image's included")] = None
    norm: Annotated[Norm | None, Field(description="norm behind each convolution")] = None
    dropout: Annotated[float | None, Field(ge=0, lt=1, description="chance of dropping a channel")] = None
    bn_stats: Annotated[
        Literal["average", "pooled", "local", "reestimate"],
        Field(description="BatchNorm's running statistics: averaged, pooled exactly, kept, or re-estimated"),
    ] = "average"
    deep_supervision: Annotated[
        bool, Field(description="coarser decoder stages learn too, by heads of their own in training")
    ] = False
    stem: Annotated[
        Literal["none", "variational"], Field(description="a layer with random weights in front, or none")
    ] = "none"
    variational: Annotated[VariationalSettings, Field(description="the variational stem's own")] = (
        VariationalSettings()
    )
    arguments: dict[str, Any] = Field(default_factory=dict, description="further arguments of the network")
    features: Annotated[
        str | None,
        Field(description="module whose output is a MONAI or user network's features; null: the deepest map"),
    ] = None
    divisor: Annotated[
        int | None,
        Field(ge=1, le=1024, description="images for a MONAI or user network are padded to a multiple of it"),
    ] = None
    weights: Annotated[
        Path | None, Field(description="safetensors file to start from, as far as names and shapes match")
    ] = None


COMMON = ("base_filters", "levels", "norm", "dropout")  # settings that several networks share
FROM_DATA = ("in_channels", "num_outputs", "dimensions")


@dataclass(frozen=True)
class ModelInfo:
    """One network of ours.

    source: "module:function" of its builder in this folder, imported when the network is first wanted.
    The builder takes in_channels and num_outputs, dimensions if it can be both, those of `COMMON` that mean
    something to it, and its own, which a user gives in `model.arguments`.
    """

    title: str
    paper: str
    dimensions: tuple[int, ...]
    source: str

    @cached_property
    def builder(self) -> Callable[..., Segmenter]:
        module, _, function = self.source.partition(":")
        builder: Callable[..., Segmenter] = getattr(
            importlib.import_module(f"wardround.models.{module}"), function
        )
        return builder

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The settings a user may give: the common ones this network has, then its own."""
        free = {key: p for key, p in parameters_of(self.builder).items() if key not in FROM_DATA}
        common = {key: free.pop(key) for key in COMMON if key in free}
        return common | free

    @property
    def arguments(self) -> list[str]:
        """The names of its own settings, those of `model.arguments`."""
        return [key for key in self.parameters if key not in COMMON]

    @property
    def defaults(self) -> dict[str, Any]:
        """What each setting is where the user gives none."""
        return {key: parameter.default for key, parameter in self.parameters.items()}


# InstanceNorm is the default where a paper does not ask for batch norm: it has no running statistics to
# average, and a frozen reference model (SAFCF, FSF3A, MOON) then gives the features the trained one would.
# The U-Net papers' own choices are one setting away: none (2015), batch (2016).
MODELS: dict[str, ModelInfo] = {
    "unet2d": ModelInfo("U-Net", "Ronneberger et al., MICCAI 2015", (2,), "unet:unet2d"),
    "unet2d_fedevi": ModelInfo(
        "U-Net of FedEvi's authors, 16 filters",
        "Chen et al., MICCAI 2024 (public code)",
        (2,),
        "unet:unet2d_fedevi",
    ),
    "unet3d": ModelInfo("3D U-Net", "Çiçek et al., MICCAI 2016", (3,), "unet:unet3d"),
    "nnunet": ModelInfo(
        "U-Net of an nnU-Net plan, plain or residual",
        "Isensee et al., Nature Methods 2021",
        (2, 3),
        "nnunet:nnunet",
    ),
    "synergynet": ModelInfo("SynergyNet-8s2h", "Gorade et al., WACV 2024", (2, 3), "synergynet:synergynet"),
    "autoencoder": ModelInfo("U-Net without skips", "-", (2, 3), "unet:autoencoder"),
    "sam3d": ModelInfo(
        "SAM-style 3D transformer, no prompts", "Kirillov et al., ICCV 2023", (3,), "sam3d:sam3d"
    ),
    "gelan": ModelInfo(
        "GELAN encoder with a mask head", "Wang et al., ECCV 2024 (YOLOv9)", (2, 3), "gelan:gelan"
    ),
}


def resolve(settings: ModelSettings) -> ModelSettings:
    """The settings with the network's own defaults written out."""
    if is_foreign(settings):
        check_foreign(settings)
        return settings
    if settings.name not in MODELS:
        hint = suggest(settings.name, MODELS)
        raise ConfigError(
            f"model.name is '{settings.name}'.{hint} "
            f"List all: wardround models. MONAI's networks are written '{MONAI_PREFIX}SegResNet', "
            "yours 'package.module:Class'."
        )
    for key in ("features", "divisor"):
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"model.{key} is for networks of MONAI's or your own, but model.name is '{settings.name}', "
                "which knows its own. Leave it out."
            )
    info = MODELS[settings.name]
    check_common(settings, info)
    arguments = check_arguments(
        settings.name, info.builder, settings.arguments, dict.fromkeys(FROM_DATA), COMMON
    )
    open_ones = [key for key in COMMON if getattr(settings, key) is None]
    defaults = {key: info.defaults[key] for key in open_ones if key in info.defaults}
    return settings.model_copy(update={"arguments": arguments, **defaults})


def check_common(settings: ModelSettings, info: ModelInfo) -> None:
    """Refuse a common setting that this network lacks, or cannot have with this value."""
    types = types_of(info.builder)
    for key in COMMON:
        value = getattr(settings, key)
        if value is None:
            continue
        if key not in info.parameters:
            common = [name for name in info.parameters if name in COMMON]
            own = f", and in model.arguments: {', '.join(info.arguments)}" if info.arguments else ""
            raise ConfigError(
                f"model.{key} is not a setting of '{settings.name}'. "
                f"It has: {', '.join(common) or 'none of the common ones'}{own}."
            )
        check_value(value, types.get(key), f"model.{key}")


def is_foreign(settings: ModelSettings) -> bool:
    """Whether the network is MONAI's or the user's."""
    name = settings.name
    return name not in MODELS and (name.startswith(MONAI_PREFIX) or is_user_network(name))


def find_foreign_class(name: str) -> Maker:
    return find_monai_network(name) if name.startswith(MONAI_PREFIX) else find_user_network(name)


def build(settings: ModelSettings, *, in_channels: int, num_outputs: int, dimensions: int) -> Segmenter:
    """The network; its first weights come from PyTorch's global random stream."""
    settings = resolve(settings)
    sizes = {"num_outputs": num_outputs, "dimensions": dimensions}
    if settings.stem == "variational":
        bare = settings.model_copy(update={"stem": "none"})
        backbone = build(bare, in_channels=settings.variational.channels, **sizes)
        return VariationalSegmenter(backbone, settings.variational, in_channels=in_channels)
    if is_foreign(settings):
        name, kind = settings.name, find_foreign_class(settings.name)
        divisor = settings.divisor or (MONAI_DIVISOR if name.startswith(MONAI_PREFIX) else None)
        more = {"in_channels": in_channels, **sizes}
        arguments = ask_for_heads(settings) if settings.deep_supervision else settings.arguments
        model = build_foreign(name, kind, arguments, **more, divisor=divisor, features=settings.features)
    else:
        model = build_own(settings, in_channels=in_channels, **sizes)
    if settings.deep_supervision:
        model.supervise_deeply()
    return model


def build_own(settings: ModelSettings, *, in_channels: int, num_outputs: int, dimensions: int) -> Segmenter:
    check_dimensions(settings, dimensions)
    info = MODELS[settings.name]
    common = {key: getattr(settings, key) for key in COMMON if key in info.parameters}
    both = {"dimensions": dimensions} if "dimensions" in parameters_of(info.builder) else {}
    return info.builder(
        in_channels=in_channels, num_outputs=num_outputs, **both, **common, **settings.arguments
    )


def ask_for_heads(settings: ModelSettings) -> dict[str, Any]:
    """The arguments of MONAI's DynUNet with its own deep supervision: all stages but the coarsest."""
    arguments = dict(settings.arguments)
    if settings.name.startswith(MONAI_PREFIX) and "strides" in arguments:
        heads = len(arguments["strides"]) - 3
        if heads < 1:
            raise ConfigError(
                f"model.deep_supervision needs 4 levels or more, but model.arguments.strides has "
                f"{len(arguments['strides'])}. Add some, or leave it out."
            )
        arguments = {"deep_supr_num": heads, **arguments, "deep_supervision": True}
    return arguments


def check_dimensions(settings: ModelSettings, dimensions: int) -> None:
    """Refuse one of our networks for data it is not made for; others are tried."""
    info = MODELS.get(settings.name)
    if info is not None and dimensions not in info.dimensions:
        fitting = [f"'{name}'" for name, other in MODELS.items() if dimensions in other.dimensions]
        kinds = " and ".join(f"{number}D" for number in info.dimensions)
        raise ConfigError(
            f"model.name is '{settings.name}', a {kinds} network, but the data are "
            f"{dimensions}D. Use {' or '.join(fitting)}."
        )


def check_foreign(settings: ModelSettings) -> None:
    """Check the arguments against the network's signature; the settings of our own networks are refused."""
    for key in COMMON:
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"model.{key} is for our own networks, but model.name is '{settings.name}'. "
                "Give the argument of its constructor, if it has one, in model.arguments."
            )
    network_class = find_foreign_class(settings.name)
    fixed = from_data(network_class, dict.fromkeys(FROM_DATA, 0))
    check_arguments(settings.name, network_class, settings.arguments, fixed)
