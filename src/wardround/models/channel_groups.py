"""Channel groups: which tensors must be reordered together so that a network computes the same.

The output channels of a convolution form a group. The layer itself, the norm behind it and every layer
that reads those channels index the group along one of their axes; reorder all of them alike, and the
network's function stays. Pooling, upsampling, ReLU and channel dropout do not mind the order.

Fixed are the image's channels and the classes. A skip by concatenation gives its reader two blocks of
channels, [encoder | upsampled], each with a group of its own; the autoencoder has no skips.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from wardround.errors import ConfigError
from wardround.models.nnunet import ResidualBlock
from wardround.models.norm import full_name
from wardround.models.synergynet import SynergyNet
from wardround.models.unet import NearestStage, PlainStage, UNet, UpStage
from wardround.models.variational import VariationalSegmenter
from wardround.params import Params

Layout = list[tuple[str, int]]  # the channels of a map: blocks of (group, size) in a row
FIXED = ""  # the group of channels whose order has a meaning outside: those of the image


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are reordered together.

    layer: the parameters that make them (convolution and norm); places: every (tensor, axis, offset) that
    follows their order, running statistics and reading layers too; blocks: GroupNorm's groups of channels,
    which stay together (1: any order is allowed).
    """

    size: int
    layer: list[str] = field(default_factory=list)
    places: list[tuple[str, int, int]] = field(default_factory=list)
    blocks: int = 1


def channel_groups(model: nn.Module) -> dict[str, ChannelGroup]:
    """The groups of a network by the name of the layer that makes them, in the order of the forward pass.

    A network, or an addition to one, that is not understood is refused with a `ConfigError`.
    """
    walk = Walk()
    backbone = model.backbone if isinstance(model, VariationalSegmenter) else model
    if isinstance(backbone, SynergyNet):
        raise ConfigError(
            "the channels of SynergyNet cannot be matched: its skips are added, which ties the channels of "
            "encoder and decoder together, and so do its attention heads and its codebook. "
            "Choose a U-Net or the autoencoder."
        )
    if any(isinstance(module, ResidualBlock) for module in backbone.modules()):
        raise ConfigError(
            "the channels of a residual encoder cannot be matched: its blocks add maps, which ties their "
            "channels together. Set model.arguments.encoder to plain, or choose another U-Net."
        )
    if isinstance(model, VariationalSegmenter) and isinstance(model.backbone, UNet):
        stem = model.stem
        channels = walk.group("stem", stem.bias.numel(), {"mu": 0, "rho": 0, "bias": 0})
        walk.unet("backbone", model.backbone, channels)
    elif isinstance(model, UNet):
        walk.unet("", model, [(FIXED, model.in_channels)])
    else:
        raise ConfigError(
            f"the channels of network '{getattr(backbone, 'name', type(model).__name__)}' cannot be matched: "
            "how its layers hand them on is not known. Choose one of wardround's own networks, for example "
            "unet2d."
        )
    odd = next((name for name, _ in model.named_parameters() if name not in walk.known), None)
    if odd is not None:
        raise ConfigError(
            f"the channels of this network cannot be matched: tensor '{odd}' was added to it, and which "
            "channels it reads is not known. Choose an objective and a method that add no layers."
        )
    return walk.groups


def permute(params: Mapping[str, Tensor], group: ChannelGroup, order: Tensor) -> Params:
    """The tensors with channel order[j] of the group in position j, wherever the group is indexed."""
    changed = dict(params)
    for name, axis, offset in group.places:
        if name in changed:
            tensor = changed[name]
            index = torch.arange(tensor.shape[axis])
            index[offset : offset + group.size] = offset + order
            changed[name] = tensor.index_select(axis, index.to(tensor.device))
    return Params(changed)


class Walk:
    """Follows the channels through a U-Net and writes down who indexes them."""

    def __init__(self) -> None:
        self.groups: dict[str, ChannelGroup] = {}
        self.known: set[str] = set()

    def unet(self, prefix: str, model: UNet, image: Layout) -> None:
        maps: list[Layout] = []
        x = image
        for level, units in enumerate(model.encoder):
            x = self.units(full_name(prefix, f"encoder.{level}"), units, x)
            maps.append(x)
        x = maps.pop()
        for number, stage in enumerate(model.decoder):
            x = self.stage(full_name(prefix, f"decoder.{number}"), stage, x, maps.pop())
            if model.is_deep and 0 < number < len(model.decoder) - 1:
                self.classify(full_name(prefix, f"deep_heads.{number - 1}"), model.deep_heads[number - 1], x)
        self.classify(full_name(prefix, "head"), model.head, x)

    def stage(self, name: str, stage: nn.Module, x: Layout, skip: Layout) -> Layout:
        if isinstance(stage, UpStage):
            up = self.convolution(f"{name}.up", stage.up, x)
            return self.units(f"{name}.convs", stage.convs, skip + up)
        if isinstance(stage, PlainStage):
            return self.units(f"{name}.convs", stage.convs, self.convolution(f"{name}.up", stage.up, x))
        if isinstance(stage, NearestStage):
            if not isinstance(stage.reduce, nn.Identity):
                x = self.unit(f"{name}.reduce", stage.reduce, x)
            x = self.unit(f"{name}.narrow", stage.narrow, x)
            return self.unit(f"{name}.merge", stage.merge, skip + x)
        raise TypeError(f"{name} is a {type(stage).__name__}, which Walk.stage does not know")

    def units(self, name: str, units: nn.Module, x: Layout) -> Layout:
        for part, unit in units.named_children():
            x = self.unit(f"{name}.{part}", unit, x)
        return x

    def unit(self, name: str, unit: nn.Module, x: Layout) -> Layout:
        """Convolution and norm; a ReLU behind them changes no order."""
        x = self.convolution(f"{name}.conv", unit.get_submodule("conv"), x)
        self.norm(f"{name}.norm", unit.get_submodule("norm"), x)
        return x

    def convolution(self, name: str, conv: nn.Module, x: Layout) -> Layout:
        self.read(name, conv, x)
        assert isinstance(conv, _ConvNd)
        axes = {"weight": 1 if isinstance(conv, _ConvTransposeNd) else 0}
        return self.group(name, conv.out_channels, axes | ({} if conv.bias is None else {"bias": 0}))

    def norm(self, name: str, norm: nn.Module, x: Layout) -> None:
        ((group, _),) = x
        if isinstance(norm, nn.GroupNorm):
            made = self.groups[group]
            self.groups[group] = ChannelGroup(made.size, made.layer, made.places, norm.num_groups)
        elif not isinstance(norm, _BatchNorm | _InstanceNorm | nn.Identity):
            raise TypeError(f"{name} is a {type(norm).__name__}, which Walk.norm does not know")
        self.made(group, name, {part: 0 for part, _ in norm.named_parameters()})
        for part, buffer in norm.named_buffers():
            if buffer.dim():  # not the counter of batches
                self.groups[group].places.append((f"{name}.{part}", 0, 0))

    def classify(self, name: str, head: nn.Module, x: Layout) -> None:
        """A head reads channels and makes classes, whose order is fixed."""
        self.read(name, head, x)
        self.known.add(f"{name}.bias")

    # Writing down

    def group(self, name: str, size: int, axes: Mapping[str, int]) -> Layout:
        """A new group, made by these parameters of a layer, each along its axis."""
        self.groups[name] = ChannelGroup(size)
        self.made(name, name, axes)
        return [(name, size)]

    def made(self, group: str, name: str, axes: Mapping[str, int]) -> None:
        for part, axis in axes.items():
            self.groups[group].layer.append(f"{name}.{part}")
            self.groups[group].places.append((f"{name}.{part}", axis, 0))
            self.known.add(f"{name}.{part}")

    def read(self, name: str, conv: nn.Module, x: Layout) -> None:
        """A convolution's input axis follows the blocks of channels it is given."""
        if not isinstance(conv, _ConvNd) or conv.groups != 1 or conv.in_channels != sum(n for _, n in x):
            raise TypeError(
                f"{name} is no plain convolution of the {sum(n for _, n in x)} channels before it"
            )
        axis, offset = (0 if isinstance(conv, _ConvTransposeNd) else 1), 0
        for group, size in x:
            if group != FIXED:
                self.groups[group].places.append((f"{name}.weight", axis, offset))
            offset += size
        self.known.add(f"{name}.weight")
