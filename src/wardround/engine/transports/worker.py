"""The worker process: reads requests from standard input, writes one JSON line for each answer."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imports drop hardly any objects; looking for some would take a fifth of a second

import time
from pathlib import Path
from typing import Any

import torch

from wardround.child_process import connect
from wardround.clients import Answer, SyncState
from wardround.config_file import load_config
from wardround.engine.host import Host
from wardround.errors import WardroundError
from wardround.messages import Message
from wardround.training.device import choose_device, set_threads

PROGRESS_SECONDS = 0.2


def main() -> None:
    requests, answer = connect()
    last = [0.0]

    def progress(name: str, step: int, steps: int) -> None:
        now = time.monotonic()
        if now - last[0] > PROGRESS_SECONDS:
            last[0] = now
            answer({"progress": [name, step, steps]})

    setup = next(requests)
    set_threads(setup["threads"])
    try:
        config = load_config(setup["config"], [f"compute.device={setup['device']}"])
        take(choose_device(config.compute))
        host = Host(config, Path(setup["folder"]), setup["names"], progress)
        answer({"clients": [host.register(name).as_dict() for name in host.names]})
    except WardroundError as error:
        answer({"failure": str(error)})
        return
    gc.freeze()  # what is here now stays
    gc.enable()
    for request in requests:
        answer(serve(host, request))


def take(device: torch.device) -> None:
    """Let everything that names no GPU of its own go to this worker's."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def serve(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    """Do one request; the reply's tensors go into the file the server named."""
    try:
        message = Message.load(Path(request["message"]))
    except WardroundError as error:
        answer = Answer(request["client"], failure=str(error))
    else:
        sync_state = SyncState.from_dict(request["sync_state"])
        answer = host.send(request["client"], request["task"], request["round"], message, sync_state)
    if answer.failure is None:
        answer.message.save(Path(request["reply"]), durable=False)
    return {**answer.as_dict(), "reply": request["reply"]}


if __name__ == "__main__":
    main()
