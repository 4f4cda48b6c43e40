"""Start weights: a network begins from a local safetensors file, as far as the two fit.

A tensor is taken where name and shape match; all others keep their random start. Names may differ by what
stands in front ("network.", "backbone."): the pair of prefixes that fits most numbers is used. A file of
which nothing fits is refused. Pickled files (.pt, .pth) are never opened: they can run code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from wardround.errors import ConfigError
from wardround.text import format_size

Shape = tuple[int, ...]
DEPTH = 3  # parts of a name that may be a prefix


@dataclass(frozen=True)
class Match:
    """What of a file fits a network.

    taken: tensors of the network by name, each with its name in the file; left: those that keep their random
    start, each with the reason; unused: names in the file that are not needed; file_prefix, model_prefix:
    what stands in front of the names on either side; share: of all numbers in the network.
    """

    path: str
    file_prefix: str
    model_prefix: str
    taken: dict[str, str]
    left: dict[str, str]
    unused: list[str]
    share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """One line for the log."""
        total = len(self.taken) + len(self.left)
        text = f"start weights: {len(self.taken)} of {total} tensors ({self.share:.0%} of the numbers)"
        text += f" from {self.path}"
        if self.left:
            first = [f"{name} ({reason})" for name, reason in list(self.left.items())[:3]]
            more = f" and {len(self.left) - 3} more" if len(self.left) > 3 else ""
            text += f"; not taken: {', '.join(first)}{more}"
        return text


def load_into(model: nn.Module, path: Path) -> Match:
    """Give the network what fits, in its own types; refused if that is nothing."""
    match = compare(model, path)
    state = model.state_dict()
    with open_weights(path) as file, torch.no_grad():
        for name, source in match.taken.items():
            state[name].copy_(file.get_tensor(source))
    return match


def compare(model: nn.Module, path: Path) -> Match:
    """What of the file fits; only its header is read."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    with open_weights(path) as file:
        offered = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    file_prefix, model_prefix = best_prefixes(offered, wanted)
    taken, left = {}, {}
    for name, shape in wanted.items():
        source = file_prefix + name.removeprefix(model_prefix)
        if not name.startswith(model_prefix) or source not in offered:
            left[name] = "not in the file"
        elif offered[source] != shape:
            left[name] = f"{shown(shape)} here, {shown(offered[source])} in the file"
        else:
            taken[name] = source
    if not taken:
        raise ConfigError(
            f"model.weights is {path}, of which nothing fits: the network has tensors like "
            f"{example(wanted)}, the file {example(offered)}. Name a file of the same network."
        )
    unused = sorted(set(offered) - set(taken.values()))
    share = count_numbers(wanted, taken) / count_numbers(wanted, wanted)
    return Match(str(path), file_prefix, model_prefix, taken, left, unused, share)


def best_prefixes(offered: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> tuple[str, str]:
    """What to take off the file's names and the network's so that most numbers fit; the shorter where equal.

    A prefix of the file stands before at least half of its names: it is a wrapper's, not that of one layer,
    which might happen to fit another.
    """
    common = [p for p in prefixes(offered) if 2 * sum(name.startswith(p) for name in offered) >= len(offered)]
    best, most = ("", ""), -1
    for model_prefix in prefixes(wanted):
        inside = [name for name in wanted if name.startswith(model_prefix)]
        for file_prefix in common:
            fitting = sum(
                prod(wanted[name])
                for name in inside
                if offered.get(file_prefix + name.removeprefix(model_prefix)) == wanted[name]
            )
            if fitting > most:
                best, most = (file_prefix, model_prefix), fitting
    return best


def prefixes(names: Iterable[str]) -> list[str]:
    """What names begin with, the short ones first: "", "network.", "network.encoder." ..."""
    found = {""}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:depth]) + "." for depth in range(1, min(DEPTH, len(parts) - 1) + 1)}
    return sorted(found, key=lambda prefix: (prefix.count("."), prefix))


def open_weights(path: Path) -> Any:
    """The file, for reading; whatever it is instead is said."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"model.weights is {path}, which {what}. Name a safetensors file, or leave it out.")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"model.weights is {path}, which is not a safetensors file ({error}). Pickled files can run code "
            "and are not opened: load one where you trust it and save its state dict with safetensors."
        ) from None


def count_numbers(shapes: Mapping[str, Shape], names: Iterable[str]) -> int:
    return sum(prod(shapes[name]) for name in names)


def example(shapes: Mapping[str, Shape]) -> str:
    name = next(iter(shapes), None)
    return "none" if name is None else f"'{name}' ({shown(shapes[name])})"


def shown(shape: Shape) -> str:
    """
    >>> shown((2, 3)), shown(())
    ('2x3', 'one number')
    """
    return format_size(shape) or "one number"
