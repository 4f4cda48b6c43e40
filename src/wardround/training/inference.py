"""Inference: sliding windows, and the mean over mirror images (test-time augmentation).

Both replace a network's forward pass for a while, so that whatever asks for logits has them. A voxel's logits
are the mean over all windows that contain it, weighted by a Gaussian around the window's centre (MONAI).
Mirror images are averaged window by window, which needs no further copy of the scan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from wardround.data.cases import Batch
from wardround.data.serving.mirroring import find_mirror_axes
from wardround.errors import ConfigError
from wardround.losses.objective import Objective
from wardround.models.base import pad
from wardround.seeding import random_state, restore_random_state
from wardround.text import format_size

OVERLAP = 0.5
AT_ONCE = 4  # windows on a GPU

ForwardPass = Callable[[Tensor], Tensor]


@contextmanager
def evaluated_as(
    model: nn.Module,
    objective: Objective,
    window: Sequence[int] | None = None,
    tta: bool = False,
    axes: Sequence[int] | None = None,
) -> Iterator[None]:
    """Inside, the model's forward pass goes through windows and mirror images, as asked.

    axes: of the mirror images (`augmentation.mirror_axes`), None for all.
    """
    with ExitStack() as stack:
        if tta:
            stack.enter_context(mirrored(model, objective, axes))
        if window is not None:
            stack.enter_context(windowed(model, window))
        yield


# Windows


@contextmanager
def windowed(model: nn.Module, window: Sequence[int]) -> Iterator[None]:
    """Inside, images larger than the window go through the model window by window."""
    with replaced_forward(model, partial(run_in_windows, model.forward, window=window)):
        yield


def run_in_windows(forward: ForwardPass, image: Tensor, *, window: Sequence[int]) -> Tensor:
    """Logits of images, window by window where they are larger than the window."""
    size = fit_window(image, window)
    if size == image.shape[2:]:
        return forward(image)
    return slide(lambda parts: forward(parts).float(), image, size, AT_ONCE if image.is_cuda else 1)


def fit_window(image: Tensor, window: Sequence[int]) -> tuple[int, ...]:
    """The window's sides, no longer than those of the image (B, C, *spatial)."""
    sides = image.shape[2:]
    if len(sides) != len(window):
        raise ConfigError(
            f"evaluate.window is {list(window)}, but the images are {len(sides)}D "
            f"({format_size(sides)}); give {len(sides)} numbers."
        )
    return tuple(min(pair) for pair in zip(window, sides, strict=True))


def count_windows(whole: Sequence[int] | None, window: Sequence[int] | None) -> int:
    """How many windows MONAI places on a scan.

    >>> count_windows((40, 56, 40), (40, 56, 40)), count_windows((80, 56, 40), (40, 56, 40))
    (1, 3)
    """
    if whole is None or window is None:
        return 1
    pairs = [(side, min(side, part)) for side, part in zip(whole, window, strict=True)]
    return math.prod(math.ceil((side - part) / max(1, int(part * (1 - OVERLAP)))) + 1 for side, part in pairs)


def cut_window(case: Batch, window: Sequence[int], draw: torch.Generator) -> Batch:
    """One window of a single case, around a labelled voxel where there is one; smaller sides are padded."""
    sides, size = case.image.shape[2:], fit_window(case.image, window)
    labelled = case.label[0].nonzero()
    if len(labelled):
        middle = labelled[int(torch.randint(len(labelled), (), generator=draw))].tolist()
    else:
        middle = [int(torch.randint(side, (), generator=draw)) for side in sides]
    starts = [
        min(max(at - length // 2, 0), side - length)
        for at, length, side in zip(middle, size, sides, strict=True)
    ]
    image, label = case.image, case.label[:, None]
    for axis, (start, length) in enumerate(zip(starts, size, strict=True), start=2):
        image, label = image.narrow(axis, start, length), label.narrow(axis, start, length)
    return Batch(pad(image, window), pad(label, window)[:, 0])


def slide(
    infer: ForwardPass,
    image: Tensor,
    window: Sequence[int],
    at_once: int,
    *,
    device: torch.device | None = None,
    gather: torch.device | None = None,
) -> Tensor:
    """Logits of a batch by overlapping windows; device: where these are computed, gather: where joined."""
    from monai.inferers.utils import sliding_window_inference  # takes seconds

    with torch.no_grad():
        found = sliding_window_inference(
            image,
            roi_size=window,
            sw_batch_size=at_once,
            predictor=infer,
            overlap=OVERLAP,
            mode="gaussian",
            sw_device=device or image.device,
            device=gather or image.device,
        )
    assert isinstance(found, Tensor)
    return found


# Mirror images


@contextmanager
def mirrored(model: nn.Module, objective: Objective, axes: Sequence[int] | None = None) -> Iterator[None]:
    """Inside, a forward pass is the mean over all mirror images along the axes, None for all.

    Random layers (a variational stem, dropout) draw the same numbers for each image: they are views of one
    sample, and its spread over samples stays what it is.
    """
    check_averaging(objective, axes)
    plain: ForwardPass = model.forward

    def forward(image: Tensor) -> Tensor:
        every = list(list_mirrors(image.ndim - 2, axes))
        state, total = random_state(image.device), None
        for flipped in every:
            restore_random_state(image.device, state)
            found = objective.to_average(plain(image.flip(flipped) if flipped else image))
            found = found.flip(flipped) if flipped else found
            total = found if total is None else total.add_(found)
        assert total is not None
        return objective.from_average(total.div_(len(every)))

    with replaced_forward(model, forward):
        yield


def list_mirrors(dimensions: int, axes: Sequence[int] | None = None) -> Iterator[tuple[int, ...]]:
    """Every set of axes of (B, C, *spatial) to mirror, the empty set first; axes: of the image, None for all.

    >>> list(list_mirrors(3, [0, 2]))
    [(), (2,), (4,), (2, 4)]
    """
    places = [axis + 2 for axis in find_mirror_axes(axes, dimensions)]
    yield from chain.from_iterable(combinations(places, count) for count in range(len(places) + 1))


def check_averaging(objective: Objective, axes: Sequence[int] | None = None) -> None:
    """Refuse an objective whose logits cannot be averaged, and no axis to mirror along."""
    if axes is not None and not axes:
        raise ConfigError(
            "Mirror images cannot be averaged: augmentation.mirror_axes is [], so images are not mirrored. "
            "Leave tta out, or name axes."
        )
    kind = type(objective)
    if kind.probabilities is not Objective.probabilities and kind.to_average is Objective.to_average:
        raise ConfigError(
            f"Mirror images cannot be averaged: objective {kind.__name__} has probabilities of its own and "
            "does not say what to average. Write its to_average and from_average, or leave tta out."
        )


@contextmanager
def replaced_forward(model: nn.Module, forward: ForwardPass) -> Iterator[None]:
    before = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before
