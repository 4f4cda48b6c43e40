"""Means of groups of cases: what a client may share in place of its cases.

A group has at least LEAST_GROUP cases, and groups of one client are disjoint: of overlapping ones, a
difference of two means could show a single case. Means travel as float16; a mean of masks is a soft
mask in the channels of the network's output.

>>> cases = TensorSplit(list("abcde"), torch.arange(5.0).reshape(5, 1, 1, 1), torch.ones(5, 1, 1).long(), [])
>>> means = group_means(cases, [torch.arange(5)], num_outputs=1)
>>> means["image"], means["label"]
(tensor([[[[2.]]]], dtype=torch.float16), tensor([[[[1.]]]], dtype=torch.float16))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from wardround.data.cases import Batch, TensorSplit
from wardround.errors import ClientError, DataError
from wardround.losses.segmentation import targets
from wardround.params import Params
from wardround.precision import widest
from wardround.text import format_size

LEAST_GROUP = 5  # below it, a mean looks like the cases it is made of
MOST_FLOAT16 = 65504.0

GroupSize = Annotated[int, Field(ge=LEAST_GROUP, description="cases behind each mean")]


def deal_into_groups(count: int, size: int, draw: torch.Generator) -> list[Tensor]:
    """Case indices dealt at random into groups of `size`; what is left over joins the last group.

    Fewer cases than `size` make no group.

    >>> [len(group) for group in deal_into_groups(13, 5, torch.Generator())]
    [5, 8]
    >>> deal_into_groups(4, 5, torch.Generator())
    []
    """
    if count < size:
        return []
    order = torch.randperm(count, generator=draw)
    last = (count // size - 1) * size  # where the last group begins
    return [*torch.split(order[:last], size), order[last:]] if last else [order]


def group_means(split: TensorSplit, groups: Sequence[Tensor], num_outputs: int) -> Params:
    """The mean image (M, C, *spatial) and soft mask (M, num_outputs, *spatial) of each group.

    num_outputs: as in `segmentation.targets`; 1 gives the share of foreground. No groups, no tensors.
    """
    if not groups:
        return Params()
    if min(len(group) for group in groups) < LEAST_GROUP:
        raise ValueError(f"a mean of fewer than {LEAST_GROUP} cases must not leave a client")
    batches = [split.batch(group) for group in groups]
    image = torch.stack([batch.image.mean(dim=0, dtype=widest(batch.image.device)) for batch in batches])
    label = torch.stack(
        [targets(batch.label, num_outputs).mean(dim=0, dtype=widest(batch.label.device)) for batch in batches]
    )
    largest = float(image.abs().max())
    if largest > MOST_FLOAT16:
        raise ClientError(
            f"mean images reach an intensity of {largest:.3g}, but travel as float16, which ends at "
            f"{MOST_FLOAT16:.0f}. Normalise the images."
        )
    return Params({"image": image.half(), "label": label.half()})


def check_means(given: Params, num_cases: int) -> str | None:
    """Why the means of a client with so many cases cannot be distributed, or None.

    >>> check_means(Params({"image": torch.zeros(1, 1, 4, 4).half()}), num_cases=5)
    "means are of ['image'], not of image and label"
    """
    if set(given) != {"image", "label"}:
        return f"means are of {sorted(given)}, not of image and label"
    (image, image_type), (label, label_type) = given.spec("image"), given.spec("label")
    if {image_type, label_type} != {torch.float16}:
        return "means are not float16"
    if len(image) < 3 or not all(image) or (image[:1], image[2:]) != (label[:1], label[2:]):
        return f"mean images {image} and mean masks {label} do not belong together"
    if image[0] > num_cases // LEAST_GROUP:
        return f"{image[0]} means of {num_cases} cases are of fewer than {LEAST_GROUP} each"
    if float(given["label"].min()) < 0 or float(given["label"].max()) > 1:
        return "a mean mask is not between 0 and 1"
    return None


def select_fitting(
    bank: Mapping[str, Tensor], channels: int, num_outputs: int, dimensions: int
) -> dict[str, Tensor]:
    """The means of a bank that fit a network; those that do not must not stop its training."""
    expected = {"image": channels, "label": num_outputs}
    owners = {name.rpartition("/")[0] for name in bank}
    misfits = {
        owner
        for owner in owners
        for part, count in expected.items()
        if bank[f"{owner}/{part}"].shape[1] != count or bank[f"{owner}/{part}"].ndim != dimensions + 2
    }
    return {name: bank[name] for name in bank if name.rpartition("/")[0] not in misfits}


def group_by_grid(bank: Mapping[str, Tensor]) -> list[Batch]:
    """All means of a bank (`<client>/image`, `<client>/label`), those of one grid together.

    >>> bank = {"north/image": torch.zeros(2, 1, 4, 4), "north/label": torch.zeros(2, 1, 4, 4)}
    >>> bank |= {"east/image": torch.zeros(3, 1, 4, 4), "east/label": torch.zeros(3, 1, 4, 4)}
    >>> [len(means) for means in group_by_grid(bank)]
    [5]
    """
    owners = [name.removesuffix("/image") for name in bank if name.endswith("/image")]
    grids: dict[torch.Size, list[str]] = {}
    for owner in owners:
        grids.setdefault(bank[f"{owner}/image"].shape[1:], []).append(owner)
    return [
        Batch(
            image=torch.cat([bank[f"{owner}/image"] for owner in together]),
            label=torch.cat([bank[f"{owner}/label"] for owner in together]),
        )
        for together in grids.values()
    ]


def draw_means(pools: Sequence[Batch], count: int, draw: torch.Generator) -> Batch:
    """Up to `count` means of one grid as float32, without repeats; each is equally likely to come first."""
    place = int(torch.randint(sum(map(len, pools)), (1,), generator=draw))
    pool = [pool for pool in pools for _ in range(len(pool))][place]
    chosen = torch.randperm(len(pool), generator=draw)[:count].to(pool.image.device)
    return Batch(pool.image[chosen].float(), pool.label[chosen].float())


def require_one_grid(method: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse images (C, *spatial) whose shapes differ between clients, where voxels are mixed."""
    first = next(iter(shapes), "")
    for client, shape in shapes.items():
        if tuple(shape) != tuple(shapes[first]):
            sides, other = (format_size(list(given)[1:]) for given in (shapes[first], shape))
            raise DataError(
                f"method '{method}' mixes images voxel by voxel, but those of '{first}' are {sides} and "
                f"those of '{client}' {other}. Resample all to one grid."
            )


def share_evenly(able: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` split as evenly as what each can give allows.

    >>> share_evenly({"north": 1, "east": 9, "south": 9}, 8)
    {'north': 1, 'east': 4, 'south': 3}
    """
    shares = dict.fromkeys(able, 0)
    for _ in range(min(total, max(able.values(), default=0))):
        for name in able:
            if shares[name] < able[name] and sum(shares.values()) < total:
                shares[name] += 1
    return shares
