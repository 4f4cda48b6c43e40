"""Probe: what the modules of a network take and give, seen in one pass of an empty image.

The pass runs on a copy without numbers (the meta device), and so at no cost.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wardround.errors import ConfigError

DIVISORS = (1, 2, 4, 8, 16, 32)
PROBE_SIDE = 33  # of the images divisors are tried with, about: five halvings of it are possible
NUM_CASES = 2  # in a probe: tells the cases from other axes of length one or three

Network = TypeVar("Network", bound=nn.Module)


@dataclass
class Call:
    """One call of a module: when it began and ended, what it was given and gave (the shapes of tensors)."""

    module: str
    number: int
    kind: nn.Module
    start: int
    given: list[torch.Size]
    end: int = -1
    gave: list[torch.Size] = field(default_factory=list)
    output: Tensor | None = None
    version: int = 0

    def is_inside(self, other: Call) -> bool:
        return other.start < self.start and self.end < other.end


class Probe:
    """Passes of empty images through a copy of the network, which stays as it is.

    The copy has shapes but no numbers (the meta device); a network that cannot work so gets real zeros.
    """

    def __init__(
        self, network: nn.Module, name: str, *, in_channels: int, num_outputs: int, dimensions: int
    ) -> None:
        self.name = name
        self.in_channels, self.num_outputs, self.dimensions = in_channels, num_outputs, dimensions
        self._network = network
        self._copy = meta_copy(network)
        self.error: Exception | None = None
        self.misshapen = ""

    def takes(self, side: int) -> bool:
        """Whether an image of this side comes out as logits of the same size."""
        return self.calls(side) is not None

    def calls(self, side: int) -> list[Call] | None:
        """All calls of modules in the order they end; None if the pass fails, and `error` says how."""
        shape = (NUM_CASES, self.in_channels, *[side] * self.dimensions)
        for attempt in ("meta", "real"):
            image = torch.zeros(shape, device="cpu" if attempt == "real" else self._device())
            try:
                return self._pass(image)
            except (ConfigError, _Misshapen) as error:
                self.misshapen = str(error)
                return None
            except SystemExit as error:
                raise ConfigError(describe_exit(self.name, error)) from error
            except Exception as error:
                self.error = error
                if self._device() == "cpu" or not is_about_meta(error):
                    return None
                self._copy = copy.deepcopy(self._network).eval()
        return None

    @property
    def is_free(self) -> bool:
        """Whether passes cost next to nothing."""
        return self._device() == "meta"

    def _device(self) -> str:
        parameter = next(self._copy.parameters(), None)
        return "cpu" if parameter is None else parameter.device.type

    def _pass(self, image: Tensor) -> list[Call]:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), trace_calls(self._copy) as calls:
            output = self._copy(image)
        logits = first_output(output, image)
        expected = (NUM_CASES, self.num_outputs, *image.shape[2:])
        if logits is None or logits.shape != expected:
            raise _Misshapen(wrong_shape(self.name, image.shape, logits, expected))
        return calls

    def find_divisor(self) -> int:
        """The smallest of `DIVISORS` whose multiples the network takes; refused if there is none."""
        for divisor in DIVISORS:
            multiple = -(-PROBE_SIDE // divisor)
            if self.takes(divisor * (multiple + 1 - multiple % 2)):  # an odd multiple: no larger one divides
                return divisor
        raise ConfigError(self.complaint() + " If it needs images of certain sizes, give model.divisor.")

    def complaint(self) -> str:
        if self.misshapen:
            return self.misshapen
        if (package := missing_package(self.error)) is not None:
            return f"model.name is '{self.name}', which needs the package '{package}'. Install it."
        said = " ".join(str(self.error).split())[:300]
        return (
            f"model.name is '{self.name}', which cannot take an image of {self.in_channels} channels in "
            f"{self.dimensions}D: {said}."
        )


def missing_package(error: BaseException | None) -> str | None:
    """The package that an error says is not installed."""
    found = re.search(r"No module named '([\w.]+)'", str(error))
    return None if found is None else found[1]


class _Misshapen(Exception):
    """The pass went through, but gave no logits of the image's size."""


def is_about_meta(error: Exception) -> bool:
    """Whether the lack of numbers may be what failed, rather than shapes."""
    words = ("meta", "item()", "nonzero", "data-dependent", "device", "numpy", "no data", "bool")
    return isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in words)


def meta_copy(network: Network) -> Network:
    """A copy on the meta device in evaluation mode; the numbers are not copied even for a moment."""
    memo: dict[int, Any] = {}
    for parameter in network.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in network.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(network, memo).eval()


@contextmanager
def trace_calls(network: nn.Module) -> Iterator[list[Call]]:
    """The calls of all modules inside, in the order they end."""
    calls: list[Call] = []
    running: list[Call] = []
    numbers: Counter[str] = Counter()
    clock = iter(range(10**9))

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            running.append(Call(name, numbers[name], module, next(clock), list_shapes([args, kwargs])))
            numbers[name] += 1

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        call.end, call.gave = next(clock), list_shapes(output)
        if isinstance(output, Tensor):
            call.output, call.version = output, output._version
        calls.append(call)

    handles = []
    for name, module in network.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def list_shapes(value: Any) -> list[torch.Size]:
    """Of all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        return [value.shape]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [shape for entry in value for shape in list_shapes(entry)]
    return []


# What a network gives


def first_output(output: Any, x: Tensor) -> Tensor | None:
    """The logits among what a network gives; None if there are none."""
    if isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        return None
    return output[:, 0] if output.dim() == x.dim() + 1 else output  # DynUNet: (B, outputs, C, *spatial)


def describe_exit(name: str, error: SystemExit) -> str:
    return f"model.name is '{name}', whose forward pass called sys.exit({error.code!r}). Remove that call."


def wrong_shape(name: str, given: Sequence[int], logits: Tensor | None, expected: Sequence[int]) -> str:
    gives = "something that is not a tensor" if logits is None else f"{tuple(logits.shape)}"
    return (
        f"model.name is '{name}', which turns an image of {tuple(given)} into {gives}, "
        f"not {tuple(expected)}. It is not a segmentation network for these data; choose another."
    )
