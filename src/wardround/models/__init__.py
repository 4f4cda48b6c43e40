"""The networks: MODELS lists ours, `monai:<network>` names any of MONAI's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from wardround.errors import ConfigError
from wardround.models.base import Output, Segmenter, head_names
from wardround.models.monai_networks import PREFIX, build_monai, did_you_mean
from wardround.models.norm import Norm
from wardround.models.unet import unet2d, unet2d_fedevi, unet3d
from wardround.models.variational import VariationalSegmenter, VariationalSettings

__all__ = [
    "MODELS",
    "ModelInfo",
    "ModelSettings",
    "build",
    "offers_features",
    "resolve",
    "Output",
    "Segmenter",
    "head_names",
]


class ModelSettings(BaseModel):
    """The `model:` part of a configuration. None means the network's own default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(description="see `wardround models`, or monai:<network>")] = "unet2d"
    base_filters: Annotated[int | None, Field(ge=1, description="channels of the first convolution")] = None
    levels: Annotated[int | None, Field(ge=2, le=8, description="resolutions, the image's included")] = None
    norm: Annotated[Norm | None, Field(description="norm behind each convolution")] = None
    dropout: Annotated[float, Field(ge=0, lt=1, description="chance of dropping a channel")] = 0.0
    bn_stats: Annotated[
        Literal["average", "pooled", "local", "reestimate"],
        Field(description="BatchNorm's running statistics: averaged, pooled exactly, kept, or measured anew"),
    ] = "average"
    stem: Annotated[
        Literal["none", "variational"], Field(description="a layer with random weights in front, or none")
    ] = "none"
    variational: Annotated[VariationalSettings, Field(description="the variational stem's own")] = (
        VariationalSettings()
    )
    arguments: Annotated[dict[str, Any], Field(description="constructor arguments of a monai: network")] = {}


@dataclass(frozen=True)
class ModelInfo:
    """One network of ours. `defaults` holds its settings where the user gives none."""

    title: str
    paper: str
    dimensions: int
    builder: Callable[..., Segmenter]
    defaults: ModelSettings


# InstanceNorm is the default throughout: it has no running statistics to average, and a frozen
# reference model (SAFCF, FSF3A, MOON) then gives the features the trained one would. The U-Net
# papers' own choices are one setting away: none (2015), batch (2016).
MODELS: dict[str, ModelInfo] = {
    "unet2d": ModelInfo(
        title="U-Net",
        paper="Ronneberger et al., MICCAI 2015",
        dimensions=2,
        builder=unet2d,
        defaults=ModelSettings(name="unet2d", base_filters=64, levels=5, norm="instance"),
    ),
    "unet2d_fedevi": ModelInfo(
        title="U-Net of FedEvi's authors, 16 filters",
        paper="Chen et al., MICCAI 2024 (public code)",
        dimensions=2,
        builder=unet2d_fedevi,
        defaults=ModelSettings(name="unet2d_fedevi", base_filters=16, levels=5, norm="instance"),
    ),
    "unet3d": ModelInfo(
        title="3D U-Net",
        paper="Çiçek et al., MICCAI 2016",
        dimensions=3,
        builder=unet3d,
        defaults=ModelSettings(name="unet3d", base_filters=32, levels=4, norm="instance"),
    ),
}


def resolve(settings: ModelSettings) -> ModelSettings:
    """The settings with the network's own defaults written out."""
    if settings.name.startswith(PREFIX):
        check_monai(settings)
        return settings
    if settings.name not in MODELS:
        hint = did_you_mean(settings.name, MODELS)
        raise ConfigError(
            f"model.name is '{settings.name}'.{hint} "
            f"List all: wardround models. MONAI's networks are written '{PREFIX}SegResNet'."
        )
    if settings.arguments:
        raise ConfigError(
            f"model.arguments is for '{PREFIX}' networks, but model.name is '{settings.name}'. "
            "Use base_filters, levels, norm and dropout."
        )
    defaults = MODELS[settings.name].defaults
    open_ones = [key for key in ("base_filters", "levels", "norm") if getattr(settings, key) is None]
    return settings.model_copy(update={key: getattr(defaults, key) for key in open_ones})


def offers_features(settings: ModelSettings) -> bool:
    """Whether the network shows its inside; MONAI's do not."""
    return not settings.name.startswith(PREFIX)


def build(settings: ModelSettings, *, in_channels: int, num_outputs: int, dimensions: int) -> Segmenter:
    """The network; its first weights come from PyTorch's global random stream."""
    settings = resolve(settings)
    if settings.stem == "variational":
        backbone = build(
            settings.model_copy(update={"stem": "none"}),
            in_channels=settings.variational.channels,
            num_outputs=num_outputs,
            dimensions=dimensions,
        )
        return VariationalSegmenter(backbone, settings.variational, in_channels=in_channels)
    if settings.name.startswith(PREFIX):
        return build_monai(
            settings.name,
            settings.arguments,
            in_channels=in_channels,
            num_outputs=num_outputs,
            dimensions=dimensions,
        )
    info = MODELS[settings.name]
    if info.dimensions != dimensions:
        fitting = [f"'{name}'" for name, other in MODELS.items() if other.dimensions == dimensions]
        raise ConfigError(
            f"model.name is '{settings.name}', a {info.dimensions}D network, but the data are "
            f"{dimensions}D. Use {' or '.join(fitting)}."
        )
    return info.builder(
        in_channels=in_channels,
        num_outputs=num_outputs,
        base_filters=settings.base_filters,
        levels=settings.levels,
        norm=settings.norm,
        dropout=settings.dropout,
    )


def check_monai(settings: ModelSettings) -> None:
    """Refuse our own networks' settings for a MONAI network, which has its own names for them."""
    for key in ("base_filters", "levels", "norm"):
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"model.{key} is for our own networks, but model.name is '{settings.name}'. "
                "Give its constructor's arguments in model.arguments."
            )
    if settings.dropout:
        raise ConfigError(
            f"model.dropout is for our own networks, but model.name is '{settings.name}'. "
            "Give its constructor's own, if it has one, in model.arguments."
        )
