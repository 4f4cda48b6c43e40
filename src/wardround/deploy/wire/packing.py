"""Packing a message into a parcel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wardround.clients.traffic import (
    Array,
    as_array,
    compress_array,
    encode,
    short,
)
from wardround.config import TrafficSettings
from wardround.deploy.wire.parcel import (
    SCHEMA,
    TYPES,
    Kind,
    Parcel,
    ParcelError,
    array_key,
    as_plain,
    compute_sha256,
)
from wardround.messages import Message
from wardround.params import Params


def pack(
    message: Message,
    *,
    kind: Kind,
    run: str,
    request: str,
    client: str,
    task: str,
    round: int,
    more: Mapping[str, Any] | None = None,
    traffic: TrafficSettings | None = None,
    base: Params | None = None,
) -> Parcel:
    """The message ready to travel; tensors on the host are not copied unless they are recoded.

    more: facts beside the message. traffic: only replies heed it; base: the model the request held.
    """
    settings = (traffic if kind == "reply" else None) or TrafficSettings()
    tensors: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Array] = {}
    for label, group in message.tensors().items():
        recoded = label == "params" and task == "train"
        for name in group:  # one at a time, so that no second model lies beside the parcel
            one, key = Params({name: group[name]}), array_key(label, name)
            carried, codings = encode(one, base, settings) if recoded else (one, {})
            arrays[key], tensors[key] = _pack_tensor(name, carried[name], settings.compress == "zlib")
            if name in codings:
                tensors[key]["coding"] = codings[name]
    header = {
        "schema": SCHEMA,
        "kind": kind,
        "run": run,
        "request": request,
        "client": client,
        "task": task,
        "round": round,
        "layout": [[label, list(group)] for label, group in message.tensors().items()],
        "tensors": tensors,
        "scalars": dict(message.scalars),
        "more": dict(more or {}),
    }
    plain = as_plain(header)
    return Parcel(plain | {"sha256": compute_sha256(plain, arrays)}, arrays)


def _pack_tensor(name: str, tensor: Tensor, compress: bool) -> tuple[Array, dict[str, Any]]:
    """An array that can travel, and what the header says of it."""
    dtype = short(tensor.dtype)
    if dtype not in TYPES:
        raise ParcelError(f"tensor '{name}' has type {dtype}, which cannot be sent.")
    array = as_array(tensor)
    facts: dict[str, Any] = {"dtype": dtype, "shape": list(tensor.shape)}
    small = compress_array(array) if compress else None
    return (array, facts) if small is None else (small, facts | {"compress": "zlib"})
