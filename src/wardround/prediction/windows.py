"""Windows: a network over a whole scan, or over overlapping windows of it (sliding window inference).

Volumes go through the network in windows of the size it was trained on. A window as large as the scan is one
plain pass. Pictures are predicted whole, unless they are huge.

When memory runs out: fewer windows at a time, then smaller ones, then the CPU; each is logged once.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wardround.errors import DataError
from wardround.text import format_size
from wardround.training.device import is_out_of_memory
from wardround.training.inference import AT_ONCE, count_windows, slide

log = logging.getLogger(__name__)

HUGE_PICTURE = 2**23  # pixels; larger pictures are predicted in tiles
TILE = 1024
SMALLEST = {2: 128, 3: 32}  # voxels along a side of the smallest window
LARGEST_VOLUME = (160, 160, 160)  # the window if none was trained on

Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class WindowPlan:
    """How a scan is predicted; window: voxels along each side, None for the whole scan."""

    device: torch.device
    window: tuple[int, ...] | None
    at_once: int


class Forward:
    """Logits of prepared scans by one model; keeps the plan that fitted into memory.

    window: that of the training, None if it trained on whole images; say: called when memory runs out.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        window: Sequence[int] | None,
        autocast: torch.dtype | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self.model = model
        self._wanted = None if window is None else tuple(window)
        self.plan = WindowPlan(device, self._wanted, AT_ONCE if device.type == "cuda" else 1)
        self._autocast = autocast
        self._say = say

    def __call__(self, image: Tensor, watch: Watch | None = None) -> Tensor:
        """(C, *spatial) on the CPU -> (num_outputs, *spatial) float32 on the CPU."""
        while True:
            try:
                return self._logits(image, watch)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            if self.plan.device.type == "cuda":
                torch.cuda.empty_cache()
            self.plan = self._shrink(image)  # outside the except: the failed tensors are freed by now

    def _logits(self, image: Tensor, watch: Watch | None) -> Tensor:
        plan, spatial = self.plan, tuple(image.shape[1:])
        window = self.choose_window(spatial)
        if window == spatial:
            found = self._pass(image[None])[0].float().cpu()
            if watch is not None:
                watch(1, 1)
            return found
        total = count_windows(spatial, window)
        done = 0

        def infer(parts: Tensor) -> Tensor:
            nonlocal done
            logits = self._pass(parts).float()
            done += len(parts)
            if watch is not None:
                watch(min(done, total), total)
            return logits

        cpu = torch.device("cpu")
        return slide(infer, image[None], window, plan.at_once, device=plan.device, gather=cpu)[0]

    def _pass(self, batch: Tensor) -> Tensor:
        device = self.plan.device
        typed = self._autocast is not None and device.type == "cuda"
        with torch.no_grad(), torch.autocast("cuda", self._autocast) if typed else contextlib.nullcontext():
            logits: Tensor = self.model(batch.to(device))
        return logits

    def choose_window(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """The window for a scan of this shape; never larger than it."""
        window = self.plan.window
        if window is None:
            if len(spatial) == 2 and math.prod(spatial) > HUGE_PICTURE:
                window = (TILE, TILE)
            elif len(spatial) == 3:
                window = LARGEST_VOLUME
            else:
                window = tuple(spatial)
        return tuple(min(side, length) for side, length in zip(window, spatial, strict=True))

    def _shrink(self, image: Tensor) -> WindowPlan:
        plan, spatial = self.plan, image.shape[1:]
        window = self.choose_window(spatial)
        least = SMALLEST[len(spatial)]
        if plan.at_once > 1:
            self._say("The device is out of memory; fewer windows are predicted at a time.")
            return replace(plan, at_once=plan.at_once // 2)
        if max(window) > least:
            halved = tuple(max(min(least, side), side // 2) for side in window)
            self._say(
                f"The device is out of memory; windows of {format_size(halved)} are used instead of "
                f"{format_size(window)}."
            )
            return replace(plan, window=halved)
        if plan.device.type == "cuda":
            self._say("The device is out of memory even for the smallest window; the CPU takes over.")
            self.model.to("cpu")
            return WindowPlan(torch.device("cpu"), self._wanted, 1)
        raise DataError(
            f"a scan of {format_size(spatial)} voxels does not fit into memory, even in small windows."
        )
