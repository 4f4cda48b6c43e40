"""Hardware: what a client computes with, to three digits."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from wardround.data.fingerprint.histogram import FingerprintModel, round_all
from wardround.machine import cores, total_memory


class Hardware(FingerprintModel):
    """What a client computes with. memory: bytes of its GPU, or of the machine."""

    device: Literal["cuda", "cpu"]
    memory: int = Field(ge=1, le=2**50)
    cores: int = Field(ge=1, le=2**16)


def describe_hardware(device: str = "auto") -> Hardware:
    """What this machine computes with; memory to three digits. device: the one that is used; auto: a GPU."""
    on_gpu = torch.cuda.is_available() and device != "cpu"
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else total_memory()
    return Hardware(device="cuda" if on_gpu else "cpu", memory=int(round_all([memory])[0]), cores=cores())
