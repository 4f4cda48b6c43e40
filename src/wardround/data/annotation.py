"""Annotation: what the labels of one client tell apart.

A hospital that outlines livers alone says nothing about kidneys: outside of a liver its voxels are background
or kidney. Classes that a client's labels do not tell apart are one group; that of background is number 0.
Voxels to be ignored have the label above the last class.

>>> Annotation.of([[1]], num_classes=4)  # the first of three organs
Annotation(groups=(0, 1, 0, 0))
>>> Annotation.of([[1, 2]], num_classes=3)  # the whole disc, of rim and cup
Annotation(groups=(0, 1, 1))
>>> Annotation.of([[1], [2]], num_classes=3) is None  # everything
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wardround.errors import ConfigError
from wardround.text import suggest

Regions = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Annotation:
    """The group of every class; clients whose labels say everything have no Annotation.

    ignores: whether some voxels have the label `ignored`, and are to count nowhere.
    """

    groups: tuple[int, ...]
    ignores: bool = False

    @classmethod
    def of(
        cls, annotated: Sequence[Sequence[int]], num_classes: int, *, ignores: bool = False
    ) -> Annotation | None:
        """From what is outlined, each a class or several joined; None where that says everything."""
        numbers: dict[tuple[bool, ...], int] = {}
        groups = tuple(
            numbers.setdefault(tuple(number in classes for classes in annotated), len(numbers))
            for number in range(num_classes)
        )
        return None if len(numbers) == num_classes and not ignores else cls(groups, ignores)

    @property
    def num_groups(self) -> int:
        return max(self.groups) + 1

    @property
    def ignored(self) -> int:
        return len(self.groups)

    @property
    def unannotated(self) -> tuple[int, ...]:
        """Classes that the client's background may hold."""
        return tuple(number for number, group in enumerate(self.groups) if number and not group)

    @property
    def told_classes(self) -> tuple[bool, ...]:
        """Of each class after background, whether its voxels have a label that is not background's."""
        return tuple(group > 0 for group in self.groups[1:])

    def members(self, group: int) -> tuple[int, ...]:
        return tuple(number for number, own in enumerate(self.groups) if own == group)

    def tells(self, classes: Sequence[int]) -> bool:
        """Whether the labels say which voxels belong to these classes, taken together."""
        inside = {self.groups[number] for number in classes}
        return all((group in inside) == (number in classes) for number, group in enumerate(self.groups))

    def merges(self, number: int) -> bool:
        """Whether a label is hidden behind another one of its group, or ignored."""
        return number == self.ignored or self.groups.index(self.groups[number]) != number

    def to_groups(self, label: Tensor) -> Tensor:
        """Class numbers as group numbers."""
        return renumber(label, self.groups)

    def hide(self, label: Tensor) -> Tensor:
        """Class numbers without what the client does not annotate: each group is its lowest class."""
        return renumber(label, [self.groups.index(group) for group in self.groups])

    def hide_voxels(self, voxels: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Voxels (N, d) of each class present, likewise; those of background are left out."""
        found: dict[int, list[Tensor]] = {}
        for number, places in sorted(voxels.items()):
            if number < self.ignored and self.groups[number]:
                found.setdefault(self.groups.index(self.groups[number]), []).append(places)
        return {number: torch.cat(places) for number, places in found.items()}

    def drop_ignored(self, predicted: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Two label maps, both background where voxels are to be ignored."""
        if not self.ignores:
            return predicted, label
        where = label == self.ignored
        return predicted.masked_fill(where, 0), label.masked_fill(where, 0)


def renumber(label: Tensor, numbers: Sequence[int]) -> Tensor:
    """Class n becomes numbers[n]; without a table, so that a CUDA graph can hold it."""
    result = label
    for number, other in enumerate(numbers):
        if other != number:
            result = result.masked_fill(label == number, other)
    return result


def find_errors(predicted: Tensor, label: Tensor, annotation: Annotation | None) -> Tensor:
    """Where a client's labels contradict a predicted label map."""
    if annotation is None:
        return predicted != label
    predicted, label = annotation.drop_ignored(predicted, label)
    return annotation.to_groups(predicted) != annotation.to_groups(label)


def measurable(regions: Regions, annotation: Annotation | None) -> Regions:
    """The regions that can be scored by a client's labels."""
    if annotation is None:
        return regions
    return {name: classes for name, classes in regions.items() if annotation.tells(classes)}


def annotations_of(
    annotates: Mapping[str, Sequence[str]],
    classes: Sequence[str],
    regions: Regions,
    clients: Sequence[str],
    *,
    ignores: bool = False,
) -> dict[str, Annotation]:
    """Of each client that does not annotate everything.

    annotates: client -> names of classes, or of regions that are outlined as a whole; ignores: whether labels
    of all clients may have voxels to be ignored.
    """
    known: dict[str, tuple[int, ...]] = {name: (n,) for n, name in enumerate(classes, start=1)}
    for name, numbers in regions.items():
        if any(name in names for names in annotates.values()) and known.get(name, tuple(numbers)) != tuple(
            numbers
        ):
            raise ConfigError(
                f"annotates names '{name}', which is class {known[name][0]} under labels but joins "
                f"{list(numbers)} under regions. Give one of them another name."
            )
        known[name] = tuple(numbers)
    found: dict[str, Annotation] = {}
    given = {client: tuple(classes) for client in clients if ignores} | dict(annotates)
    for client, names in given.items():
        if client not in clients:
            raise ConfigError(
                f"annotates names client '{client}', which does not exist.{suggest(client, clients)} "
                f"There are: {', '.join(clients)}."
            )
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None or not names:
            said = "is empty" if unknown is None else f"names '{unknown}', which is no class or region"
            raise ConfigError(
                f"annotates.{client} {said}.{suggest(unknown or '', known)} Give one or more of: "
                f"{', '.join(known)}."
            )
        annotation = Annotation.of([known[name] for name in names], len(classes) + 1, ignores=ignores)
        if annotation is not None:
            found[client] = annotation
    return found


def shared_annotation(annotations: Mapping[str, Annotation | None]) -> Annotation | None:
    """What all clients annotate, where that is the same; for cases that are trained on together."""
    kinds = set(annotations.values())
    if len(kinds) > 1:
        partial = next(name for name, annotation in sorted(annotations.items()) if annotation is not None)
        raise ConfigError(
            f"clients annotate different classes (annotates in federation.yaml, for example '{partial}'), so "
            "their cases cannot be trained on as one set. Choose a method that trains at each client, such "
            "as fedavg, or leave annotates out."
        )
    return next(iter(kinds), None)
