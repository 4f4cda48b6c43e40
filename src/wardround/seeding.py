"""One seed in, an independent stream out for every purpose.

Streams are named, not counted: (seed, "train", client, round) always gives the same numbers, so
the order of clients, the number of processes and new hooks do not shift other streams, and
no generator state needs saving.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wardround.seeds import derive


def generator(seed: int, *purpose: object, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for this purpose."""
    return torch.Generator(device=device).manual_seed(derive(seed, *purpose))


def seed_everything(seed: int, *purpose: object) -> None:
    """Seed torch's global streams (dropout, initialisation) for the task that starts now.

    `torch.manual_seed` does the same, but notes its caller's stack for kinds of devices that are not here,
    which takes a third of a millisecond.
    """
    number = derive(seed, *purpose)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(number)


def random_state(device: torch.device) -> Tensor:
    """The state of torch's global random stream on a device."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_rng_state()


def restore_random_state(device: torch.device, state: Tensor | None) -> None:
    """Restore the state of a stream; None changes nothing."""
    if state is None:
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.set_rng_state(state)
