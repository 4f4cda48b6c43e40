"""Copies of GPU tensors on the host, made beside what the GPU computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from wardround.params import NamedTensors

_threads = threading.local()


class HostCopy:
    """Tensors as they are now, to be read by another thread.

    Made by the thread that computed the tensors, which does not wait. `get` waits for them and copies them
    over pinned memory on a stream of its own, so the GPU goes on. Tensors must not change in between.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._ready: dict[torch.device, torch.cuda.Event] = {}
        if isinstance(tensors, NamedTensors) and tensors.is_stored:
            return  # nothing is read here
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
            event = self._ready[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))

    def get(self) -> Mapping[str, Tensor]:
        """The same tensors, those of a GPU copied to the host."""
        if not self._ready:
            return self._tensors
        found = {name: tensor for name, tensor in self._tensors.items() if tensor.device not in self._ready}
        for device, ready in self._ready.items():
            stream = side_stream(device)
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                found |= copy_from({n: t for n, t in self._tensors.items() if t.device == device})
        return {name: found[name] for name in self._tensors}


def copy_from(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one GPU on the host: joined there first, since many small copies take longer than one."""
    copies: list[Tensor] = []
    found: dict[str, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        group = {name: tensor.detach() for name, tensor in tensors.items() if tensor.dtype == dtype}
        joined = torch.cat([tensor.reshape(-1) for tensor in group.values()])
        host = torch.empty(joined.shape, dtype=dtype, pin_memory=True)
        host.copy_(joined, non_blocking=True)
        copies.append(joined)  # held until the copy is done
        parts = torch.split(host, [tensor.numel() for tensor in group.values()])
        found |= {name: part.view(group[name].shape) for name, part in zip(group, parts, strict=True)}
    torch.cuda.current_stream().synchronize()
    return found


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this thread alone."""
    streams: dict[torch.device, torch.cuda.Stream] = _threads.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]
