"""Tap: a network that somebody else wrote, with a view of its inside.

Methods that compare features need the deepest encoder map of a network; MONAI's networks and those of users
only give logits. One pass over an empty image, on the meta device and so at no cost, shows what every module
takes and gives. From that follow

  bottleneck  the last map of the smallest size before resolution grows again
  stages      behind it the last map of every larger size
  decoder     what the output layer is given, where that has the size of the image
  head        the output layer: the convolution or linear layer that ran last

What does not grow with the image (global pooling, attention) is not a map. A module inside one that enlarges
its input belongs to the decoder, whatever its size. A transformer's tokens (B, N, C) count as maps where
the patches they stand for are found.

Maps are caught by hooks that live as long as one forward pass, so a network at rest is as it was: it can be
copied, exported and called with other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from wardround.errors import ConfigError
from wardround.models.base import Output, Segmenter, last_layer
from wardround.models.probe import NUM_CASES, Call, Probe, describe_exit, first_output, meta_copy, wrong_shape


@dataclass(frozen=True)
class MapLocation:
    """Where a map leaves a network: the output of a module, in its `call`-th call of a pass.

    step: None for a map (B, C, *spatial); for tokens (B, N, C) the image voxels a token spans a side.
    is_overwritten: whether a later module writes into it, so that it must be copied.
    """

    module: str
    call: int = 0
    step: int | None = None
    is_overwritten: bool = False


@dataclass(frozen=True)
class Tap:
    """What is known of a network's inside. why_not: why there is no bottleneck."""

    head: str | None = None
    bottleneck: MapLocation | None = None
    stages: tuple[MapLocation, ...] = ()
    has_decoder: bool = False
    why_not: str = ""


class TappedSegmenter(Segmenter):
    """A network of MONAI's or a user's; of several outputs (deep supervision) the first counts.

    name: as in `model.name`, for errors; divisor: None tries which one it needs; features: the module whose
    output is the bottleneck, None finds it.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        name: str,
        in_channels: int,
        num_outputs: int,
        dimensions: int,
        divisor: int | None = None,
        features: str | None = None,
    ) -> None:
        super().__init__(in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions, divisor=1)
        self.name = name
        self.network = network
        probe = Probe(network, name, in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions)
        self.divisor = probe.find_divisor() if divisor is None else divisor
        self.needs_two = not probe.takes(self.divisor)
        self.tap = find_tap(probe, self.divisor, features)
        self.has_features = self.tap.bottleneck is not None

    def output_layer(self) -> nn.Module:
        if self.tap.head is None:
            return last_layer(self, self.num_outputs)
        return self.network.get_submodule(self.tap.head)

    def _output(self, x: Tensor) -> Output:
        if not self.has_features:
            return Output(logits=self._logits(x), deep=self._take_deep())
        places = [place for place in (self.tap.bottleneck, *self.tap.stages) if place is not None]
        with catch_maps(self.network, places, self.tap.head if self.tap.has_decoder else None) as maps:
            logits = self._logits(x)
        bottleneck, *stages = [as_map(maps[place], place, x) for place in places]
        decoder = maps.get(self.tap.head)
        shown = () if decoder is None else (*stages, decoder)
        return Output(logits, bottleneck, decoder, shown, self._take_deep())

    def _bottleneck(self, x: Tensor) -> Tensor:
        place = self.tap.bottleneck
        if place is None:
            raise ConfigError(f"model.name is '{self.name}', which shows no features: {self.tap.why_not}")
        with catch_maps(self.network, [place], stop=True) as maps, suppress(_Reached):
            self._pass(x)
        return as_map(maps[place], place, x)

    def _logits(self, x: Tensor) -> Tensor:
        logits = first_output(self._pass(x), x)
        expected = (x.shape[0], self.num_outputs, *x.shape[2:])
        if logits is None or logits.shape != expected:
            raise ConfigError(wrong_shape(self.name, x.shape, logits, expected))
        return logits

    def supervise_deeply(self) -> None:
        """MONAI's DynUNet, built with heads, keeps their logits in a list."""
        if not getattr(self.network, "deep_supervision", False) or not hasattr(self.network, "heads"):
            raise ConfigError(
                f"model.deep_supervision: '{self.name}' shows no coarser logits. Choose monai:DynUNet or a "
                "U-Net of ours, or leave it out."
            )
        self.is_deep = True

    def _take_deep(self) -> tuple[Tensor, ...]:
        """The coarser logits of the last pass; the network keeps none, since they hold its graph."""
        if not self.is_deep:
            return ()
        heads: list[Tensor] = self.network.heads  # type: ignore[assignment]
        found = tuple(heads) if self.training else ()
        heads[:] = [torch.empty(0)] * len(heads)
        return found

    def _pass(self, x: Tensor) -> Any:
        """What the network itself gives; its code cannot end the command without a word."""
        try:
            return self.network(x)
        except SystemExit as error:
            raise ConfigError(describe_exit(self.name, error)) from error


# Catching maps


class _Reached(Exception):
    """The wanted map is there; nothing behind it needs to run."""


@contextmanager
def catch_maps(
    network: nn.Module, places: Sequence[MapLocation], head: str | None = None, *, stop: bool = False
) -> Iterator[dict[Any, Tensor]]:
    """The maps of one pass by place, and by its name what the head was given. stop: end at the first one."""
    maps: dict[Any, Tensor] = {}
    handles = [
        network.get_submodule(place.module).register_forward_hook(_keep(maps, place, stop))
        for place in places
    ]
    if head is not None:
        layer = network.get_submodule(head)
        handles.append(layer.register_forward_pre_hook(lambda _, inputs: maps.update({head: inputs[0]})))
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def _keep(maps: dict[Any, Tensor], place: MapLocation, stop: bool) -> Any:
    calls = 0

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal calls
        if calls == place.call:
            maps[place] = output.clone() if place.is_overwritten else output
            if stop:
                raise _Reached
        calls += 1

    return hook


def as_map(x: Tensor, place: MapLocation, image: Tensor) -> Tensor:
    """Tokens (B, N, C) as the map (B, C, *grid) they are; a map as it is."""
    if place.step is None:
        return x
    grid = [side // place.step for side in image.shape[2:]]
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], *grid)


# Finding the places


def find_tap(probe: Probe, divisor: int, features: str | None) -> Tap:
    """Where to tap the network; its passes with two sizes tell maps from what only looks like one."""
    doubled: list[Call] | None = None
    calls = probe.calls(2 * divisor)
    if calls is not None:
        doubled = probe.calls(4 * divisor) if probe.is_free else None
    else:
        calls = probe.calls(divisor)
    if calls is None:
        raise ConfigError(probe.complaint())
    if doubled is not None and [call.module for call in doubled] != [call.module for call in calls]:
        doubled = None
    return Finder(calls, doubled, probe.num_outputs).tap(features)


class Finder:
    """Reads the calls of one pass, and of one with the doubled image where there is one."""

    def __init__(self, calls: list[Call], doubled: list[Call] | None, num_outputs: int) -> None:
        self.calls = calls
        self.image = calls[-1].given[0]
        self.doubled = (
            dict(zip(((c.module, c.number) for c in calls), doubled, strict=True)) if doubled else {}
        )
        self.num_outputs = num_outputs
        self.head = self._head()
        self.maps = [(call, size) for call in calls if (size := self.size_of(call)) is not None]

    def tap(self, features: str | None) -> Tap:
        head = None if self.head is None else self.head.module
        if features is not None:
            return Tap(head, self.named(features), (), self.has_decoder())
        found = self.deepest()
        if found is None:
            return Tap(
                head, why_not="no module gives a map that grows with the image. Name one in model.features."
            )
        place, size = found
        return Tap(head, self.place(place), self.stages(place, size), self.has_decoder())

    # The bottleneck

    def deepest(self) -> tuple[Call, int] | None:
        """The last map of the smallest size before resolution grows, and its voxels."""
        before_head = [(call, size) for call, size in self.maps if self._is_before_head(call)]
        if not before_head:
            return None
        smallest = min(size for _, size in before_head)
        found = self.last(before_head, smallest, is_deepest=True)
        return None if found is None else (found, smallest)

    def last(self, maps: Sequence[tuple[Call, int]], size: int, *, is_deepest: bool = False) -> Call | None:
        """The last map of this size that is no part of enlarging one; the deepest comes before all that."""
        growing = [call for call in self.calls if self._enlarges(call, size)]
        growth = min((call.start for call in growing), default=math.inf) if is_deepest else math.inf
        fitting = [
            call
            for call, voxels in maps
            if voxels == size
            and call.end < growth
            and not any(call.is_inside(other) for other in growing)
            and not isinstance(call.kind, _DropoutNd)
        ]
        wide = [call for call in fitting if call.gave[0][1] != self.num_outputs]  # no head of its own
        return (wide or fitting or [None])[-1]  # type: ignore[list-item]

    def named(self, features: str) -> MapLocation:
        """The place a user names, refused with the reason if it shows no map."""
        calls = [call for call in self.calls if call.module == features]
        if not calls:
            names = [call.module for call in self.calls if call.module]
            raise ConfigError(
                f"model.features is '{features}', which is not a module that runs in a forward pass. "
                f"Some that do: {', '.join(dict.fromkeys(names[:: max(1, len(names) // 12)]))}"
            )
        if self.size_of(calls[-1]) is None:
            given = " and ".join(str(tuple(shape)) for shape in calls[-1].gave) or "no tensor"
            raise ConfigError(
                f"model.features is '{features}', which gives {given} for an image of {tuple(self.image)}: "
                "neither a map (B, C, *spatial) nor one token (B, N, C) for each patch."
            )
        return self.place(calls[-1])

    # Decoder

    def stages(self, bottleneck: Call, size: int) -> tuple[MapLocation, ...]:
        """Behind the bottleneck the last map of every size up to the image's, coarse to fine."""
        behind = [(c, s) for c, s in self.maps if c.start > bottleneck.end and self._is_before_head(c)]
        sizes = sorted({s for _, s in behind if size < s < math.prod(self.image[2:])})
        found = [self.last(behind, s) for s in sizes]
        return tuple(self.place(call) for call in found if call is not None)

    def has_decoder(self) -> bool:
        """Whether the output layer is given a map of the image's size."""
        if self.head is None or not self.head.given:
            return False
        shape = self.head.given[0]
        return len(shape) == len(self.image) and shape[2:] == self.image[2:]

    def _head(self) -> Call | None:
        """The output layer: of those with as many outputs as there are logits, the one that ran last."""
        layers = [call for call in self.calls if isinstance(call.kind, _ConvNd | nn.Linear)]
        fitting = [call for call in layers if count_outputs(call.kind) == self.num_outputs]
        return (fitting or layers or [None])[-1]  # type: ignore[list-item]

    def _is_before_head(self, call: Call) -> bool:
        return self.head is None or call.end < self.head.start

    # Sizes

    def size_of(self, call: Call) -> int | None:
        """The voxels of the map a module gives; None if it gives none."""
        if call.output is None:
            return None
        size = self.voxels(call.output.shape, self.image)
        if size is None or not self.doubled:
            return size
        other = self.doubled[call.module, call.number].gave[0]
        dimensions = len(self.image) - 2
        larger = torch.Size([*self.image[:2], *(2 * side for side in self.image[2:])])
        channel = 1 if len(other) == len(self.image) else 2
        same = other[channel] == call.output.shape[channel]
        return size if same and self.voxels(other, larger) == size * 2**dimensions else None

    def voxels(self, shape: torch.Size, image: torch.Size) -> int | None:
        if shape[:1] != image[:1]:
            return None
        if len(shape) == len(image):
            return math.prod(shape[2:])
        return shape[1] if len(shape) == 3 and step_of(shape[1], image[2:]) else None

    def place(self, call: Call) -> MapLocation:
        assert call.output is not None
        is_tokens = call.output.dim() != len(self.image)
        step = step_of(call.output.shape[1], self.image[2:]) if is_tokens else None
        return MapLocation(call.module, call.number, step, call.output._version != call.version)

    def _enlarges(self, call: Call, size: int) -> bool:
        """Whether a module makes larger maps of one of this size; padding, which adds rows, does not."""
        given = [voxels for shape in call.given if (voxels := self.voxels(shape, self.image)) is not None]
        if call.output is not None:
            gave = [self.size_of(call) or 0]
        else:
            gave = [voxels for shape in call.gave if (voxels := self.voxels(shape, self.image)) is not None]
        return bool(given and gave) and min(given) == size < min(gave) and call.module != ""


def step_of(num_tokens: int, sides: Sequence[int]) -> int | None:
    """The voxels a side of the patches that make so many tokens of an image; None if none do.

    >>> step_of(16, (64, 64)), step_of(17, (64, 64))
    (16, None)
    """
    for step in range(1, min(sides) + 1):
        fits = all(side % step == 0 for side in sides)
        if fits and math.prod(side // step for side in sides) == num_tokens:
            return step
    return None


def count_outputs(layer: nn.Module) -> int | None:
    """The channels a convolution or linear layer gives."""
    if isinstance(layer, _ConvNd):
        return layer.out_channels
    return layer.out_features if isinstance(layer, nn.Linear) else None


# Encoder and decoder


def decoder_names(model: nn.Module) -> list[str]:
    """State-dict names of the layers that run behind the encoder, the head included.

    They are those that a forward pass calls and `encode` does not; what a method or an objective added runs
    in neither. Refused is a network without features, whose encoder nobody knows.
    """
    if not isinstance(model, Segmenter) or not model.has_features:
        raise ConfigError(f"which layers of {type(model).__name__} are its decoder is not known")
    copied = meta_copy(model).train(model.is_deep)  # heads of deep supervision run in training alone
    size = copied.padded_size([2 * model.divisor] * model.dimensions)
    image = torch.zeros(NUM_CASES, model.in_channels, *size, device="meta")
    whole = list_called(copied, lambda: copied.forward_features(image))
    encoder = list_called(copied, lambda: copied.encode(image))
    names = []
    for name in model.state_dict():
        owner = name
        while owner and owner not in whole:
            owner = owner.rpartition(".")[0]
        if owner and owner not in encoder:
            names.append(name)
    return names


def list_called(network: nn.Module, run: Callable[[], Any]) -> set[str]:
    """The names of the modules that something calls."""
    names: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: names.add(name))
        for name, module in network.named_modules(remove_duplicate=False)
    ]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return names
