"""Cases handed over in Python: `wr.run(config, data={"north": dataset, "south": [(image, label), ...]})`.

A client's cases are a PyTorch `Dataset` or any sequence of `(image, label)` pairs or MONAI-style dictionaries
with `image` and `label`, as NumPy arrays or tensors; or a mapping with `train`, `val` and `test` of these.
A label that is None says that a case trains without one (objectives `mean_teacher` and `pseudo_labels`).
They are read once and used as they are: nothing is resampled or normalised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from wardround.data.cases import UNLABELLED, Case, ClientData, TensorSplit, as_stack, blank_label
from wardround.data.federation import Federation, ScanSummary
from wardround.data.listing import SPLITS
from wardround.errors import DataError
from wardround.objects import DIGITS
from wardround.seeding import generator
from wardround.text import format_size

MISSING = object()  # in place of a label that nobody gave; None says that there is none
SHARES = (0.6, 0.2)  # of a client's cases for training and validation, where it has not divided them itself


def open_in_memory(
    data: Mapping[str, Any], seed: int, *, classes: Sequence[str] = (), spacing: Sequence[float] | None = None
) -> Federation:
    """A federation of cases in memory; classes: their names without the background."""
    if not data:
        raise DataError("data has no client. Give a mapping from client names to their cases.")
    for name in data:
        if not isinstance(name, str):
            raise DataError(f"data: {name!r} is not a name; call clients by text, such as {str(name)!r}.")
    clients = {name: divide(name, items, seed, spacing) for name, items in data.items()}
    splits = [getattr(client, split) for client in clients.values() for split in SPLITS]
    filled = [split for split in splits if len(split)]
    if not filled:
        raise DataError("data has no case at any client.")
    shapes = {tuple(split.images.shape[1:]) for split in filled}
    if len({(shape[0], len(shape)) for shape in shapes}) > 1:
        found = ", ".join(sorted(format_size(shape) for shape in shapes))
        raise DataError(f"data: images must have the same channels and dimensions everywhere; found {found}.")
    shape = next(iter(shapes))
    num_classes = max(2, len(classes) + 1, *(int(split.labels.max()) + 1 for split in filled))
    names = [*classes, *(f"class {number}" for number in range(len(classes) + 1, num_classes))]
    return Federation(
        names=sorted(clients),
        counts={name: sum(len(getattr(own, split)) for split in SPLITS) for name, own in clients.items()},
        dimensions=len(shape) - 1,
        in_channels=shape[0],
        num_classes=num_classes,
        regions={name: [number] for number, name in enumerate(names, start=1)},
        load_one=clients.__getitem__,
        units="px" if spacing is None else "mm",
        labels={name: [number] for number, name in enumerate(names, start=1)},
        summarise_scans=lambda: ScanSummary(None, shape[1:] if len(shapes) == 1 else None),
    )


def describe_clients(federation: Federation) -> dict[str, str]:
    """What a run writes down of each client's cases: their number, and the first digits of a SHA-256."""
    found = {}
    for name in federation.names:
        summed = hashlib.sha256()
        for part in SPLITS:
            split = as_stack(getattr(federation.load(name), part), "data")
            for tensor in (split.images, split.labels):
                summed.update(f"{tuple(tensor.shape)}".encode())
                summed.update(tensor.contiguous().numpy().data)
        found[name] = f"{federation.counts[name]} cases @{summed.hexdigest()[:DIGITS]}"
    return found


def divide(client: str, items: Any, seed: int, spacing: Sequence[float] | None) -> ClientData:
    """A client's three splits: as given, or 60, 20 and 20 % of its cases in a random order of their own."""
    if isinstance(items, Mapping):
        for key in items:
            if key not in SPLITS:
                raise DataError(f"data, client '{client}': '{key}' is not a split; use train, val and test.")
        parts = {split: read_cases(client, split, items.get(split, ()), spacing) for split in SPLITS}
    else:
        every = read_cases(client, "case", items, spacing)
        cases = [case for case in every if not is_unlabelled(case)]  # those without label can only train
        order = torch.randperm(len(cases), generator=generator(seed, "in_memory", client)).tolist()
        first = max(1, round(SHARES[0] * len(cases)))
        second = first + round(SHARES[1] * len(cases))
        bounds = {"train": (0, first), "val": (first, second), "test": (second, len(cases))}
        parts = {split: [cases[i] for i in sorted(order[a:b])] for split, (a, b) in bounds.items()}
        parts["train"] += [case for case in every if is_unlabelled(case)]
    check_one_shape(client, sorted((c for cases in parts.values() for c in cases), key=lambda c: c.name))
    bare = {split: [case.name for case in parts[split] if is_unlabelled(case)] for split in SPLITS}
    if bare["val"] or bare["test"]:
        name = (bare["val"] + bare["test"])[0]
        raise DataError(f"data, client '{client}': {name} has no label, so it can only train.")
    train, val, test = (TensorSplit.of(parts[split]) for split in SPLITS)
    return ClientData(train, val, test, num_unlabelled=len(bare["train"]))


def is_unlabelled(case: Case) -> bool:
    return bool((case.label == UNLABELLED).any())


def check_one_shape(client: str, cases: Sequence[Case]) -> None:
    for case in cases:
        if case.image.shape != cases[0].image.shape:
            raise DataError(
                f"data, client '{client}': {cases[0].name} is {format_size(cases[0].image.shape)} but "
                f"{case.name} is {format_size(case.image.shape)}. Resample them to one size, or use a "
                "federation.yaml, which does."
            )


def read_cases(client: str, prefix: str, items: Any, spacing: Sequence[float] | None) -> list[Case]:
    if not isinstance(items, Sized) or not hasattr(items, "__getitem__"):
        raise DataError(
            f"data, client '{client}': expected a Dataset or a sequence of (image, label), not "
            f"{type(items).__name__}."
        )
    source: Any = items
    where = f"data, client '{client}', {prefix}"
    cases = [
        read_case(f"{prefix}-{index:04d}", f"{where} {index}", source[index], spacing)
        for index in range(len(items))
    ]
    if cases and not torch.equal(read_case("again", where, source[0], spacing).image, cases[0].image):
        raise DataError(
            f"{where} 0 is another image each time it is read. Cases are read once, so leave random "
            "transforms out, and set `augmentation` in the configuration."
        )
    return cases


def read_case(name: str, where: str, item: Any, spacing: Sequence[float] | None) -> Case:
    """One case; the channel axis may be left out of an image with one channel."""
    if isinstance(item, Mapping):
        pair = (item.get("image"), item.get("label", MISSING))
    elif isinstance(item, tuple | list) and len(item) == 2:
        pair = (item[0], item[1])
    else:
        pair = (None, None)
    if pair[0] is None or pair[1] is MISSING:
        raise DataError(f"{where}: expected (image, label) or a dictionary with 'image' and 'label'.")
    try:
        if pair[1] is None:
            image = torch.as_tensor(pair[0]).float()
            image = image[None] if image.ndim == 2 else image
            check_arrays(where, image, torch.zeros(image.shape[1:]))
            return Case(
                name, image.contiguous(), blank_label(image), tuple(spacing or (1.0,) * (image.ndim - 1))
            )
        image, label = (torch.as_tensor(part) for part in pair)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: not an array ({error}).") from None
    if label.ndim == image.ndim and label.shape[0] == 1 and label.shape[1:] == image.shape[1:]:
        label = label[0]
    if image.ndim == label.ndim:
        image = image[None]
    check_arrays(where, image, label)
    return Case(name, image.float().contiguous(), label.long(), tuple(spacing or (1.0,) * label.ndim))


def check_arrays(where: str, image: Tensor, label: Tensor) -> None:
    if label.ndim not in (2, 3) or image.shape[1:] != label.shape:
        raise DataError(
            f"{where}: image is {format_size(image.shape)} and label {format_size(label.shape)}; expected "
            "(channels, *spatial) and (*spatial), in two or three dimensions."
        )
    if not bool(torch.isfinite(image.float()).all()):
        raise DataError(f"{where}: the image has values that are not finite.")
    values = label.float()
    if bool((values != values.round()).any()) or bool((values < 0).any()):
        raise DataError(f"{where}: labels must be class numbers, 0 for background.")
