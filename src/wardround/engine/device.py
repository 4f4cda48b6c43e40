"""Device, precision and threads from the `compute` settings."""

from __future__ import annotations

import os

import torch

from wardround.config import ComputeSettings
from wardround.errors import ConfigError


def choose_device(settings: ComputeSettings) -> torch.device:
    """The device asked for; `auto` takes a GPU where there is one."""
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"compute.device is '{name}'; use auto, cpu, cuda or cuda:0.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("compute.device is 'cuda', but torch finds no GPU here. Use auto or cpu.")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"compute.device is '{name}'; use auto, cpu, cuda or cuda:0.")
    return device


def autocast_dtype(settings: ComputeSettings, device: torch.device) -> torch.dtype | None:
    """bfloat16 where it pays (a GPU), none otherwise; GPUs use TF32 unless float32 is asked."""
    precision = settings.precision
    if device.type == "cuda":
        exact = precision == "float32"
        torch.backends.cuda.matmul.allow_tf32 = not exact
        torch.backends.cudnn.allow_tf32 = not exact
    if precision == "bfloat16" or (precision == "auto" and device.type == "cuda"):
        return torch.bfloat16
    return None


def threads_for(settings: ComputeSettings) -> int:
    """Threads of each process: as asked, or the cores shared evenly among the workers."""
    if settings.threads is not None:
        return settings.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // settings.workers)


def set_threads(settings: ComputeSettings) -> int:
    """Fix the number of torch threads, so that sums are formed in the same order every time."""
    threads = threads_for(settings)
    torch.set_num_threads(threads)
    return threads
